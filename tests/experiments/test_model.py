import dataclasses
from functools import partial

import pytest
import torch

from equipoise.balancers import LEI, ExactQB, GShard, HistogramQB, RankAveragedQB, SignedCount, update_balancers
from equipoise.experiments.measure import _observe
from equipoise.experiments.model import Model, ModelConfig, rotary_turns, rotate
from equipoise.experiments.train import language_loss

SIZES = ModelConfig(
    width=16, num_heads=2, num_layers=3, num_dense_layers=1, dense_width=24, num_experts=8, top_k=2, expert_width=8
)


def make_model(**changes):
    model = Model(dataclasses.replace(SIZES, **changes))
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def test_shapes_and_layers():
    model = make_model(shared_width=8)
    assert model(torch.zeros(2, 5, dtype=torch.long)).shape == (2, 5, 256)
    assert len(list(model.routers())) == 2
    assert [router.name for router in model.routers()] == ["router of layer 1", "router of layer 2"]


def test_a_later_token_does_not_change_earlier_logits():
    model = make_model()
    first = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(0))
    second = first.clone()
    second[0, 8] += 1
    before, after = model(first), model(second)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def test_rotary_products_depend_on_distance_only():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(8, generator=generator), torch.randn(8, generator=generator)
    turns = rotary_turns(10, 8, q.device)
    products = rotate(q.expand(1, 1, 10, 8), turns) @ rotate(k.expand(1, 1, 10, 8), turns).transpose(-1, -2)
    torch.testing.assert_close(products[0, 0, 2, 0], products[0, 0, 9, 7])
    assert not torch.allclose(products[0, 0, 2, 0], products[0, 0, 3, 0])


def test_every_balancer_starts_from_the_same_weights():
    plain = make_model().state_dict()
    balanced = Model(SIZES, ExactQB, partial(LEI, eta=1e-4))
    balanced.init_weights(torch.Generator().manual_seed(0))
    state = balanced.state_dict()
    assert all(torch.equal(plain[name], state[name]) for name in plain)
    assert sorted(set(state) - set(plain)) == [f"blocks.{n}.feed_forward.router.bias.bias" for n in (1, 2)]


def test_parameter_counts():
    model = make_model()
    total = sum(parameter.numel() for parameter in model.parameters())
    one_expert = 3 * 16 * 8
    assert model.count_parameters() == {"total": total, "active": total - 2 * 6 * one_expert}


def test_g8_a_balancer_that_nothing_uses_is_refused():
    dense = dataclasses.replace(SIZES, num_dense_layers=3)
    with pytest.raises(ValueError, match="no mixture-of-experts layer"):
        Model(dense, ExactQB)
    with pytest.raises(ValueError, match="no mixture-of-experts layer"):
        Model(dataclasses.replace(dense, z_loss=1e-3))
    assert not list(Model(dense).routers())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 8}, "top_k=8 and num_experts=8"),
        ({"top_k": 0}, "model.top_k must be a positive whole number, got 0"),
        ({"width": -4}, "model.width must be a positive whole number, got -4"),
        ({"width": 18, "num_heads": 4}, "width=18 and num_heads=4"),
        ({"num_dense_layers": 4}, "num_dense_layers=4 and num_layers=3"),
        ({"dense_width": 0}, "model.dense_width must be positive"),
        ({"width": "abc"}, "model.width must be a positive whole number, got 'abc'"),
        ({"num_layers": 2.5}, "model.num_layers must be a positive whole number, got 2.5"),
        ({"gate": "foo"}, "model.gate must be one of sigmoid, softmax, got 'foo'"),
        ({"selection": "foo"}, "model.selection must be one of score, logit, got 'foo'"),
        ({"normalise": "maybe"}, "model.normalise must be true or false, got 'maybe'"),
        ({"scale": float("inf")}, "model.scale must be a positive number, got inf"),
        ({"z_loss": -1.0}, "model.z_loss must be a number of at least 0, got -1.0"),
        ({"capacity_factor": 0}, r"model.capacity_factor \(negative: off\) must be a positive number, got 0"),
        ({"capacity_factor": "big"}, "model.capacity_factor .* must be a number, got 'big'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SIZES, **changes)


BIASES = [ExactQB, HistogramQB, RankAveragedQB, SignedCount, None]
GRADIENTS = [
    partial(LEI, eta=1e-2),
    *(partial(GShard, coefficient=0.1, scope=scope) for scope in ("sequence", "global")),
]
PAIRS = [pytest.param(bias, GRADIENTS[index % 3], id=f"pair{index}") for index, bias in enumerate(BIASES)]


def build(bias, gradient):
    model = Model(dataclasses.replace(SIZES, z_loss=0.1, shared_width=8), bias, gradient)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def text(rows=2, length=9, seed=0):
    return torch.randint(0, 256, (rows, length + 1), generator=torch.Generator().manual_seed(seed))


def state_after(model, step):
    """Gradients, what the layers showed, and the next biases, after ``step(model)``."""
    step(model)
    seen = [_observe(layer) for layer in model.layers()]
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    update_balancers(model)
    return gradients, seen, [router.bias.bias for router in model.routers() if router.bias is not None]


def two_microbatches(model):
    for seed in range(2):
        tokens = text(seed=seed)
        (language_loss(model(tokens[:, :-1]), tokens) / 2).backward()


@pytest.mark.parametrize(("bias", "gradient"), PAIRS)
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_s2_activation_checkpointing_of_blocks_changes_no_bit(bias, gradient, recompute):
    plain, model = build(bias, gradient), build(bias, gradient)
    model.set_recompute(recompute)
    expected, actual = state_after(plain, two_microbatches), state_after(model, two_microbatches)
    assert expected[0].keys() == actual[0].keys()
    for name, gradient_of in expected[0].items():
        assert torch.equal(actual[0][name], gradient_of), name
    for layer, wanted in zip(actual[1], expected[1], strict=True):
        assert layer.keys() == wanted.keys()
        assert all(torch.equal(layer[name], wanted[name]) for name in wanted)
    assert all(torch.equal(*pair) for pair in zip(actual[2], expected[2], strict=True))


def test_recomputation_saves_what_it_promises():
    """How much autograd keeps between forward and backward."""
    kept = {}
    for recompute in ("none", "selective", "full"):
        model = build(ExactQB, None)
        model.set_recompute(recompute)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, sizes=sizes: sizes.append(tensor) or tensor, lambda t: t
        ):
            model(text()[:, :-1])
        kept[recompute] = len(sizes)
    assert kept["full"] < kept["none"]
    assert kept["selective"] < kept["none"]


@pytest.mark.parametrize(("bias", "gradient"), PAIRS)
def test_s4_padding_of_sequences_equals_their_real_tokens_alone(bias, gradient):
    """4 real and 4 padding tokens a sequence: loss, gradient, bias and metrics."""
    tokens = text(rows=3, length=8)
    valid = (torch.arange(8) < 4).expand(3, 8)

    def padded(model):
        losses.append(language_loss(model(tokens[:, :-1], valid), tokens, valid))
        losses[-1].backward()

    def alone(model):
        short = tokens[:, :5]
        losses.append(language_loss(model(short[:, :-1]), short))
        losses[-1].backward()

    losses = []
    actual, expected = state_after(build(bias, gradient), padded), state_after(build(bias, gradient), alone)
    torch.testing.assert_close(*losses)
    for name, gradient_of in expected[0].items():
        torch.testing.assert_close(actual[0][name], gradient_of, msg=name)
    for layer, wanted in zip(actual[1], expected[1], strict=True):
        for name in wanted:
            torch.testing.assert_close(layer[name], wanted[name], rtol=1e-5, atol=1e-7, msg=name)
    for pair in zip(actual[2], expected[2], strict=True):
        torch.testing.assert_close(*pair, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("bias", "gradient"), PAIRS)
def test_s8_a_microbatch_of_padding_alone_gives_zeros(bias, gradient):
    tokens = text()

    def nothing(model):
        valid = torch.zeros(2, 9, dtype=torch.bool)
        loss = language_loss(model(tokens[:, :-1], valid), tokens, valid)
        assert loss == 0
        loss.backward()

    gradients, seen, biases = state_after(build(bias, gradient), nothing)
    assert not any(each.any() for each in gradients.values())
    assert not any(layer["load"].any() for layer in seen)
    assert not any(each.any() for each in biases)


def test_a_mask_of_another_shape_is_refused():
    tokens = text()
    with pytest.raises(ValueError, match=r"valid must be \[2, 9\] as the inputs are, got \[2, 10\]"):
        language_loss(build(None, None)(tokens[:, :-1]), tokens, torch.ones(2, 10, dtype=torch.bool))


@pytest.mark.parametrize(("bias", "gradient"), PAIRS)
def test_g10_the_logged_loss_holds_no_auxiliary_loss(bias, gradient):
    tokens = text()
    losses = [language_loss(build(*slots)(tokens[:, :-1]), tokens) for slots in ((None, None), (bias, gradient))]
    assert torch.equal(*losses)


def test_a_recorded_routing_can_be_replayed():
    tokens = text()[:, :-1]
    model = build(SignedCount, None)
    expected = model(tokens)
    recorded = torch.stack([router.last.experts for router in model.routers()])
    for router in model.routers():
        router.bias.bias.copy_(torch.linspace(3, -3, 8))
    assert not torch.allclose(model(tokens), expected)
    with pytest.warns(UserWarning, match="forced"):
        assert torch.equal(model(tokens, forced=recorded), expected)
    with pytest.raises(ValueError, match="one row for each of the 2 layers, got 1"):
        model(tokens, forced=recorded[:1])
