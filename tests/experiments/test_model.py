import dataclasses
from functools import partial

import pytest
import torch

from equipoise.balancers import LEI, ExactQB
from equipoise.experiments.model import Model, ModelConfig, rotary_turns, rotate

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
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SIZES, **changes)
