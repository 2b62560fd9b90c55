"""Gate weights and their gradient against plain autograd in fp64."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.kernels import Gate, Routing, replay, route
from equipoise.kernels.gate import sigmoid

QUICK = settings.get_profile("kernels")
Check = Callable[[Tensor, Tensor], None]

every_gate = pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
every_normalise = pytest.mark.parametrize("normalise", [False, True])


def draw(num_tokens: int, num_experts: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens * num_experts)
    logits = torch.randn(num_tokens, num_experts, generator=generator, dtype=torch.float64) * 2
    return logits.to(dtype).requires_grad_()


def plain_scores(logits: Tensor, gate: str) -> Tensor:
    return torch.sigmoid(logits) if gate == "sigmoid" else torch.softmax(logits, -1)


def plain_weights(logits: Tensor, experts: Tensor, gate: str, normalise: bool, scale: float) -> Tensor:
    chosen = plain_scores(logits, gate).gather(-1, experts)
    return scale * (chosen / chosen.sum(-1, keepdim=True) if normalise else chosen)


def exact(logits: Tensor) -> Tensor:
    """The same logits in fp64, as a leaf of a graph of its own."""
    return logits.detach().double().requires_grad_()


def weighing(weights: Tensor) -> Tensor:
    """A loss that treats every weight differently."""
    factors = torch.linspace(-1, 1, weights.numel(), dtype=weights.dtype).view_as(weights)
    return (factors * weights + weights.square() / 2).sum()


# sigmoid


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@QUICK
@given(start=st.integers(0, 40), length=st.integers(0, 100))
def test_sigmoid_has_the_same_bits_in_every_slice(dtype: torch.dtype, start: int, length: int) -> None:
    logits = torch.linspace(-110, 110, 3001, dtype=dtype)
    whole = sigmoid(logits)
    part = slice(start, start + length)
    assert torch.equal(sigmoid(logits[part]), whole[part])
    assert torch.equal(sigmoid(logits[part].clone()), whole[part])


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sigmoid_has_the_same_bits_in_every_layout(dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    # long enough to be split over threads
    logits = (torch.randn(100_003, generator=torch.Generator().manual_seed(0)) * 20).to(dtype)
    whole = sigmoid(logits)
    rows, expected = logits[:100_002].view(-1, 7), whole[:100_002].view(-1, 7)
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        assert torch.equal(sigmoid(logits), whole)
        assert torch.equal(sigmoid(logits[1:]), whole[1:])
        assert torch.equal(sigmoid(rows), expected)
        assert torch.equal(sigmoid(rows.t()), expected.t())
        assert torch.equal(sigmoid(rows[:, ::2]), expected[:, ::2])
        assert torch.equal(sigmoid(rows[::3]), expected[::3])
    elements = torch.stack([sigmoid(logits[i]) for i in range(300)])
    assert torch.equal(elements, whole[:300])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sigmoid_is_the_sigmoid(dtype: torch.dtype, assert_close: Check) -> None:
    logits = torch.linspace(-120, 120, 4001, dtype=dtype, requires_grad=True)
    scores = sigmoid(logits)
    (gradient,) = torch.autograd.grad(scores.sum(), logits)
    expected = logits.detach().double().sigmoid()
    assert_close(scores, expected)
    assert_close(gradient, expected * (1 - expected))
    assert (scores.diff() >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sigmoid_at_the_ends(dtype: torch.dtype) -> None:
    far = torch.tensor([-1e30, -200.0, 0.0, 200.0, 1e30], dtype=dtype, requires_grad=True)
    scores = sigmoid(far)
    scores.sum().backward()
    assert scores[[0, 2, 3, 4]].tolist() == [0.0, 0.5, 1.0, 1.0]
    assert 0 <= scores[1].item() < 1e-80
    assert far.grad.isfinite().all()


# weights


@every_gate
@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("num_experts", [7, 60])
def test_weights_are_the_gathered_unbiased_scores(
    num_experts: int, dtype: torch.dtype, scale: float, gate: str
) -> None:
    # G9: exactly, whatever the bias
    bias = torch.linspace(-0.5, 0.5, num_experts)
    routing = route(draw(257, num_experts, dtype), bias, 5, gate=gate, scale=scale)
    assert torch.equal(routing.weights, scale * routing.scores.gather(-1, routing.experts))


@every_gate
@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("num_experts", [7, 60, 256])
def test_normalised_weights(num_experts: int, scale: float, gate: str) -> None:
    logits = draw(500, num_experts, torch.float32)
    routing = route(logits, None, 5, gate=gate, normalise=True, scale=scale)
    expected = plain_weights(logits.double(), routing.experts, gate, True, scale)
    assert ((routing.weights - expected).abs() <= 1e-6 * expected).all()
    torch.testing.assert_close(routing.weights.sum(-1), torch.full((500,), scale), rtol=1e-6, atol=0)


@pytest.mark.parametrize("logit", [-57.6, -80.0, -200.0, -1000.0])
@every_gate
def test_normalising_has_no_epsilon_to_hide_in(gate: str, logit: float) -> None:
    # G7: every score is 1e-25 or underflows
    logits = torch.full((4, 8), logit)
    logits[:, 3] += 1
    routing = route(logits, None, 2, gate=gate, normalise=True, selection="logit")
    ratio = torch.tensor([1.0, 0.0]).exp()
    torch.testing.assert_close(routing.weights, (ratio / ratio.sum()).expand(4, 2), rtol=1e-4, atol=0)
    torch.testing.assert_close(routing.shares.sum(-1), torch.ones(4))
    torch.testing.assert_close(
        routing.shares[:, 3] / routing.shares[:, 0], torch.full((4,), 2.7182818), rtol=1e-4, atol=0
    )


@every_gate
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shares_and_their_gradient(dtype: torch.dtype, gate: str, assert_close: Check) -> None:
    logits = draw(33, 7, dtype)
    reference = exact(logits)
    scores = plain_scores(reference, gate)
    expected = scores / scores.sum(-1, keepdim=True)
    shares = route(logits, None, 2, gate=gate).shares
    assert_close(shares.detach(), expected.detach())
    weighing(shares).backward()
    weighing(expected).backward()
    assert_close(logits.grad, reference.grad)


def test_unknown_gate_score() -> None:
    with pytest.raises(ValueError, match="'sigmoid' or 'softmax', got 'tanh'"):
        Gate("tanh")


# gradient of the weights


@every_gate
@every_normalise
@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gradient(
    dtype: torch.dtype, top_k: int, scale: float, normalise: bool, gate: str, assert_close: Check
) -> None:
    logits = draw(33, 7, dtype)
    reference = exact(logits)
    routing = route(logits, torch.linspace(-0.3, 0.3, 7), top_k, gate=gate, normalise=normalise, scale=scale)
    weighing(routing.weights).backward()
    weighing(plain_weights(reference, routing.experts, gate, normalise, scale)).backward()
    assert logits.grad.dtype == dtype
    assert_close(logits.grad, reference.grad)


@every_gate
@every_normalise
@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 2, 1), (3, 5, 2), (4, 3, 2)])
def test_gradcheck(num_tokens: int, num_experts: int, top_k: int, scale: float, normalise: bool, gate: str) -> None:
    # well apart, so that no finite difference crosses a cut
    order = torch.stack([torch.randperm(num_experts) for _ in range(num_tokens)]).double()
    logits = (order * 0.7 - 1).requires_grad_()

    def weights(logits: Tensor) -> Tensor:
        return route(logits, None, top_k, gate=gate, normalise=normalise, scale=scale).weights

    assert torch.autograd.gradcheck(weights, (logits,))


@every_gate
def test_g11_one_normalised_expert_has_a_constant_weight(gate: str) -> None:
    # the weight cannot carry a gradient, a balancer's injection still does
    logits = draw(33, 7, torch.float32)
    routing = route(logits, None, 1, gate=gate, normalise=True, scale=2.5)
    weighing(routing.weights).backward()
    assert routing.weights.unique().tolist() == [2.5]
    assert logits.grad.abs().max() == 0
    logits.grad = None
    steered = routing.steered(injection=torch.linspace(-1, 1, 7))
    weighing(steered.weights).backward()
    assert logits.grad.abs().max() > 0


@every_gate
def test_g11_one_expert_whose_weight_is_not_normalised_has_a_gradient(gate: str) -> None:
    logits = draw(33, 7, torch.float32)
    weighing(route(logits, None, 1, gate=gate).weights).backward()
    assert (logits.grad.abs().amax(-1) > 0).all()


@every_gate
@every_normalise
@pytest.mark.parametrize("masked", [False, True])
def test_replay_has_the_gradient_of_the_routing(masked: bool, normalise: bool, gate: str) -> None:
    valid = torch.arange(33) % 3 > 0 if masked else None
    gradients = []
    for replayed in (False, True):
        logits = draw(33, 7, torch.float32)
        routing = route(logits, torch.linspace(-1, 1, 7), 3, gate=gate, normalise=normalise, valid=valid)
        if replayed:
            routing = replay(logits, routing.experts, gate=gate, normalise=normalise, valid=valid)
        # what the layer itself steers still works, a z-loss say
        routing = routing.steered(penalty=logits.logsumexp(-1).square().mean())
        weighing(routing.weights).backward()
        gradients.append(logits.grad)
    assert gradients[0].any()
    assert torch.equal(*gradients)


@every_gate
def test_gradient_of_replayed_experts(gate: str, assert_close: Check) -> None:
    logits = draw(33, 7)
    experts = torch.arange(66).view(33, 2) % 7
    weighing(replay(logits, experts, gate=gate, normalise=True, scale=2.5).weights).backward()
    leaf = exact(logits)
    weighing(plain_weights(leaf, experts, gate, True, 2.5)).backward()
    assert_close(logits.grad, leaf.grad)
    with torch.no_grad():
        assert not replay(logits, experts).weights.requires_grad


@every_gate
@every_normalise
def test_expert_without_tokens(gate: str, normalise: bool) -> None:
    # G12
    logits = draw(33, 7, torch.float32).detach()
    logits[:, 4] = -50
    logits.requires_grad_()
    routing = route(logits, None, 2, gate=gate, normalise=normalise).steered(injection=torch.ones(7))
    weighing(routing.weights).backward()
    assert routing.load[4] == 0
    assert logits.grad.isfinite().all()


# steering


def steered_twice(routing: Routing, injections: Tensor, mask: Tensor | None) -> Routing:
    """Two balancers in a chain, with different factors on their losses."""
    penalty = routing.shares if mask is None else routing.shares[mask]
    first = routing.steered(injection=injections[0], scale=0.25)
    second = first.steered(penalty=penalty.mean(0).square().sum(), scale=torch.tensor(0.5, dtype=injections.dtype))
    return second.steered(injection=injections[1], penalty=penalty.mean(0)[0].exp(), scale=3.0)


def plain_loss(
    logits: Tensor, experts: Tensor, gate: str, normalise: bool, injections: Tensor, mask: Tensor | None
) -> Tensor:
    scores = plain_scores(logits, gate)
    valid = scores if mask is None else scores[mask]
    mean_share = (valid / valid.sum(-1, keepdim=True)).mean(0)
    injected = 0.25 * (injections[0] * valid).sum() + 3.0 * (injections[1] * valid).sum()
    penalty = 0.5 * mean_share.square().sum() + 3.0 * mean_share[0].exp()
    return weighing(plain_weights(logits, experts, gate, normalise, 1.7)) + injected + penalty


@every_gate
@every_normalise
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_steered_gradient(dtype: torch.dtype, masked: bool, normalise: bool, gate: str, assert_close: Check) -> None:
    logits = draw(33, 7, dtype)
    reference = exact(logits)
    mask = torch.arange(33) % 3 > 0 if masked else None
    injections = torch.randn(2, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    routing = route(logits, None, 3, gate=gate, normalise=normalise, scale=1.7, valid=mask)
    weighing(steered_twice(routing, injections.to(dtype), mask).weights).backward()
    plain_loss(reference, routing.experts, gate, normalise, injections, mask).backward()
    assert_close(logits.grad, reference.grad)


@every_gate
@every_normalise
@pytest.mark.parametrize("injection_dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_injection_of_another_dtype(
    dtype: torch.dtype, injection_dtype: torch.dtype, normalise: bool, gate: str, assert_close: Check
) -> None:
    logits = draw(33, 7, dtype)
    reference = exact(logits)
    # exact in every dtype
    injection = torch.arange(-3, 4) / 4
    routing = route(logits, None, 2, gate=gate, normalise=normalise)
    weighing(routing.steered(injection=injection.to(injection_dtype)).weights).backward()
    loss = weighing(plain_weights(reference, routing.experts, gate, normalise, 1.0))
    (loss + (injection.double() * plain_scores(reference, gate)).sum()).backward()
    assert logits.grad.dtype == dtype
    assert_close(logits.grad, reference.grad)


@every_gate
def test_masked_tokens_are_not_injected(gate: str) -> None:
    logits = draw(8, 8, torch.float32)
    valid = torch.tensor([True] * 5 + [False] * 3)
    routing = route(logits, None, 2, gate=gate, valid=valid).steered(injection=torch.linspace(-1, 1, 8))
    (routing.weights.sum() * 0).backward()
    assert (logits.grad[:5].abs().sum(-1) > 0).all()
    assert logits.grad[5:].abs().max() == 0
    alone = logits.detach()[:5].clone().requires_grad_()
    removed = route(alone, None, 2, gate=gate).steered(injection=torch.linspace(-1, 1, 8))
    (removed.weights.sum() * 0).backward()
    assert torch.equal(logits.grad[:5], alone.grad)


def test_all_masked_injects_nothing() -> None:
    logits = draw(8, 8, torch.float32)
    routing = route(logits, None, 2, valid=torch.zeros(8, dtype=torch.bool)).steered(injection=torch.ones(8))
    (routing.weights.sum() * 0).backward()
    assert logits.grad.abs().max() == 0


@every_gate
@every_normalise
def test_steering_leaves_the_forward_alone(gate: str, normalise: bool) -> None:
    logits = draw(33, 7, torch.float32)
    routing = route(logits, torch.linspace(-1, 1, 7), 2, gate=gate, normalise=normalise)
    steered = routing.steered(injection=torch.ones(7), penalty=routing.shares.mean())
    bare = route(logits.detach(), torch.linspace(-1, 1, 7), 2, gate=gate, normalise=normalise)
    for other in (steered, bare):
        assert torch.equal(other.weights, routing.weights)
        assert torch.equal(other.experts, routing.experts)
        assert torch.equal(other.cutoff, routing.cutoff)
        assert torch.equal(other.load, routing.load)


def test_steering_with_nothing_changes_nothing() -> None:
    logits = draw(33, 7, torch.float32)
    gradients = []
    for steer in (False, True):
        routing = route(logits, None, 2)
        weighing((routing.steered() if steer else routing).weights).backward()
        gradients.append(logits.grad.clone())
        logits.grad = None
    assert torch.equal(gradients[0], gradients[1])


def test_penalty_enters_once_however_often_the_weights_are_used(assert_close: Check) -> None:
    logits = draw(33, 7)
    reference = exact(logits)
    routing = route(logits, None, 2)
    weights = routing.steered(penalty=routing.scores.sum(), injection=torch.ones(7, dtype=torch.float64)).weights
    (weights.sum() + weights.square().sum() + weights[0, 0]).backward()
    plain = reference.sigmoid()
    chosen = plain.gather(-1, routing.experts)
    (chosen.sum() + chosen.square().sum() + chosen[0, 0] + 2 * plain.sum()).backward()
    assert_close(logits.grad, reference.grad)


def test_penalty_of_logits_without_gradient() -> None:
    factor = torch.tensor(2.0, requires_grad=True)
    routing = route(draw(33, 7, torch.float32).detach(), None, 2).steered(penalty=factor.square(), scale=0.5)
    routing.weights.sum().backward()
    assert factor.grad == 2.0


@pytest.mark.parametrize("injection", [torch.ones(6), torch.ones(33, 7), torch.ones(1), torch.tensor(1.0)])
def test_injection_of_another_shape(injection: Tensor) -> None:
    routing = route(draw(33, 7, torch.float32), None, 2)
    with pytest.raises(ValueError, match=r"injection must be \[7\]"):
        routing.steered(injection=injection)


@every_gate
def test_nothing_requires_a_gradient_under_no_grad(gate: str) -> None:
    logits = draw(33, 7, torch.float32)
    with torch.no_grad():
        routing = route(logits, torch.zeros(7, requires_grad=True), 2, gate=gate)
        steered = routing.steered(injection=torch.ones(7), penalty=routing.shares.mean())
    for tensor in (routing.weights, routing.cutoff, routing.margins, steered.weights):
        assert not tensor.requires_grad


def test_detached_routing_has_the_same_numbers_and_no_graph() -> None:
    logits = draw(33, 7, torch.float32)
    routing = route(logits, None, 2).steered(injection=torch.ones(7), penalty=logits.sum())
    detached = routing.detach()
    assert routing.weights.requires_grad
    for tensor in (detached.weights, detached.logits, detached.scores, detached.shares, detached.margins):
        assert not tensor.requires_grad
    assert detached.penalty is None
    assert torch.equal(detached.weights, routing.weights)
    assert torch.equal(detached.scores, routing.scores)
    assert torch.equal(detached.margins, routing.margins)
    assert torch.equal(detached.load, routing.load)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradient_of_steering(dtype: torch.dtype, assert_close: Check) -> None:
    logits = draw(33, 7, dtype)
    reference = exact(logits)
    injections = torch.randn(2, 7, generator=torch.Generator().manual_seed(1))
    routing = route(logits, None, 3, normalise=True, scale=1.7)
    weighing(steered_twice(routing, injections, None).weights).backward()
    plain_loss(reference, routing.experts, "sigmoid", True, injections.double(), None).backward()
    assert logits.grad.dtype == dtype
    assert_close(logits.grad, reference.grad)
