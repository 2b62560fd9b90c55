"""GShard and LEI against closed forms and plain autograd, in fp64."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.balancers import LEI, GradientBalancer, GShard, update_balancers
from equipoise.balancers.lei import bound_factor
from equipoise.kernels import Routing, route

E, K = 6, 2
GATES = ["sigmoid", "softmax"]
TIGHT: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-17}


def tokens(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    skew = torch.linspace(-1, 1, E, dtype=torch.float64)
    return torch.randn(count, E, generator=generator, dtype=torch.float64) + skew


def steered(
    balancers: list[GradientBalancer], logits: Tensor, valid: Tensor | None = None, **options: Any
) -> tuple[Tensor, Routing]:
    """Gradient of the logits that the balancers alone add to a loss."""
    leaf = logits.detach().clone().requires_grad_()
    routing = route(leaf, None, K, valid=valid, **options)
    for balancer in balancers:
        routing = balancer.steer(routing)
    routing.weights.mul(0).sum().backward()
    assert leaf.grad is not None
    return leaf.grad, routing


def through_scores(logits: Tensor, grad_scores: Tensor, gate: str) -> Tensor:
    """Gradient of the logits, by autograd, of scores that receive ``grad_scores``."""
    leaf = logits.detach().clone().requires_grad_()
    scores = leaf.sigmoid() if gate == "sigmoid" else leaf.softmax(-1)
    return torch.autograd.grad(scores, leaf, grad_scores)[0]


def relative_error(load: Tensor) -> Tensor:
    return load.double() / load.double().mean() - 1


def factor(error: Tensor, bound: str | None, tau: float = 1.0) -> float:
    xi = error.abs().max().item() / tau
    return math.tanh(xi) / xi if bound and xi else 1.0


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("bound", ["tanh", None])
@pytest.mark.parametrize("units", ["raw", "per_token"])
def test_lei_injects_the_load_error(gate: str, normalise: bool, bound: str | None, units: str) -> None:
    logits, valid = tokens(12), torch.arange(12) % 4 != 1
    balancer = LEI(E, K, eta=2e-3, tau=0.7, bound=bound, units=units)
    gradient, routing = steered([balancer], logits, valid, gate=gate, normalise=normalise)
    error = relative_error(routing.load)
    injected = 2e-3 * factor(error, bound, 0.7) * error / (9 if units == "per_token" else 1)
    expected = through_scores(logits, injected * valid[:, None], gate)
    torch.testing.assert_close(gradient, expected, **TIGHT)
    if gate == "sigmoid":
        scores = logits.sigmoid()
        torch.testing.assert_close(gradient[valid], (injected * scores * (1 - scores))[valid], **TIGHT)
    assert not gradient[~valid].any()


@pytest.mark.parametrize("normalise", [True, False])
def test_lei_adds_to_the_loss_gradient(normalise: bool) -> None:
    logits = tokens(10).requires_grad_()
    target = torch.randn(10, K, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain = route(logits, None, K, normalise=normalise, scale=2.5)
    error = relative_error(plain.load)
    injected = 1e-2 * factor(error, "tanh") * error
    surrogate = (logits.sigmoid() * injected).sum()
    weights = logits.sigmoid().gather(1, plain.experts)
    weights = 2.5 * (weights / weights.sum(-1, keepdim=True) if normalise else weights)
    (expected,) = torch.autograd.grad((weights * target).sum() + surrogate, logits)
    routing = LEI(E, K, eta=1e-2).steer(plain)
    (gradient,) = torch.autograd.grad((routing.weights * target).sum(), logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-16)


def loaded_routing(load: list[int]) -> Routing:
    """A routing with this load, K=2."""
    logits = tokens(sum(load) // 2)
    routing = route(logits, None, K)
    return Routing(**(vars(routing) | {"load": torch.tensor(load, dtype=torch.int32)}))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 500), min_size=E, max_size=E).filter(lambda load: sum(load) > 1),
    st.floats(1e-6, 1.0),
    st.floats(0.05, 5.0),
    st.sampled_from(["raw", "per_token"]),
)
def test_lei_keeps_zero_sum_direction_and_bound(load: list[int], eta: float, tau: float, units: str) -> None:
    error = relative_error(torch.tensor(load))
    routing = loaded_routing(load)
    injection = LEI(E, K, eta=eta, tau=tau, units=units).injection(routing)
    unbounded = LEI(E, K, eta=eta, tau=tau, units=units, bound=None).injection(routing)
    assert abs(injection.sum().item()) <= 1e-13 * eta * max(tau, 1)
    assert injection.abs().max() <= eta * tau * (1 + 1e-12)
    torch.testing.assert_close(unbounded * (len(routing.logits) if units == "per_token" else 1), eta * error, **TIGHT)
    torch.testing.assert_close(injection, factor(error, "tanh", tau) * unbounded, **TIGHT)


def test_lei_descent_lowers_the_overloaded_experts_scores() -> None:
    logits = tokens(40)
    gradient, routing = steered([LEI(E, K, eta=1.0)], logits)
    moved = (logits - 0.1 * gradient).sigmoid() - logits.sigmoid()
    error = relative_error(routing.load)
    assert (moved[:, error > 0] < 0).all()
    assert (moved[:, error < 0] > 0).all()


def test_lei_units_meet_at_the_number_of_valid_tokens() -> None:
    logits, valid = tokens(12), torch.arange(12) < 7
    raw, _ = steered([LEI(E, K, eta=1e-3)], logits, valid)
    per_token, _ = steered([LEI(E, K, eta=1e-3 * 7, units="per_token")], logits, valid)
    torch.testing.assert_close(raw, per_token, **TIGHT)


def test_bound_factor_is_one_without_a_load_error() -> None:
    errors = torch.tensor([[0.0, 0.0], [0.5, -0.5], [3.0, -3.0]], dtype=torch.float64)
    assert bound_factor(errors, None).tolist() == [1.0, 1.0, 1.0]
    expected = [1.0, math.tanh(1.0), math.tanh(6.0) / 6]
    assert bound_factor(errors, "tanh", tau=0.5).tolist() == pytest.approx(expected, rel=1e-14)


def reference_loss(scores: Tensor, experts: Tensor, valid: Tensor, num_sequences: int, bound: str | None) -> Tensor:
    """Coefficient-free, written out sequence by sequence: ``1 + g * sum_e (f - 1) P``."""
    losses = []
    rows = zip(scores.chunk(num_sequences), experts.chunk(num_sequences), valid.chunk(num_sequences), strict=True)
    for score, chosen, real in rows:
        if real.any():
            load = torch.bincount(chosen[real].flatten(), minlength=E).double()
            share = load * E / (K * real.sum())
            mean = (score / score.sum(-1, keepdim=True))[real].mean(0)
            losses.append(1 + factor(share - 1, bound) * ((share - 1) * mean).sum())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("bound", ["tanh", None])
@pytest.mark.parametrize(
    ("scope", "num_sequences"), [("microbatch", 3), ("sequence", 3), ("sequence", 1), ("global", 3)]
)
def test_gshard_value_and_gradient(scope: str, num_sequences: int, bound: str | None, gate: str) -> None:
    logits = tokens(18)
    # the second sequence is all padding, the third has some
    valid = (torch.arange(18) < 6) | (torch.arange(18) > 13) if num_sequences == 3 else torch.arange(18) < 11
    balancer = GShard(E, K, coefficient=0.3, scope=scope, bound=bound)
    gradient, routing = steered([balancer], logits, valid, gate=gate, num_sequences=num_sequences)

    leaf = logits.clone().requires_grad_()
    scores = leaf.sigmoid() if gate == "sigmoid" else leaf.softmax(-1)
    pieces = num_sequences if scope == "sequence" else 1
    loss = 0.3 * reference_loss(scores, routing.experts, valid, pieces, bound)
    loss.backward()
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-11, atol=1e-16)
    value = reference_loss(scores, routing.experts, valid, pieces, None)
    torch.testing.assert_close(balancer.last_value, value.detach(), **TIGHT)


@pytest.mark.parametrize("bound", ["tanh", None])
def test_gshard_closed_form(bound: str | None) -> None:
    logits, valid = tokens(12), torch.arange(12) != 5
    gradient, routing = steered([GShard(E, K, coefficient=0.3, bound=bound)], logits, valid)
    error = relative_error(routing.load)
    scores = logits.sigmoid()
    total = scores.sum(-1, keepdim=True)
    coupled = (error * scores / total).sum(-1, keepdim=True)
    grad_scores = 0.3 * factor(error, bound) / 11 * (error - coupled) / total * valid[:, None]
    torch.testing.assert_close(gradient, grad_scores * scores * (1 - scores), rtol=1e-11, atol=1e-16)


def test_gshard_global_takes_the_load_of_the_step_so_far() -> None:
    balancer = GShard(E, K, coefficient=0.3, scope="global")
    so_far = torch.zeros(E, dtype=torch.long)
    for seed, count in enumerate((9, 4, 12)):
        logits = tokens(count, seed)
        gradient, routing = steered([balancer], logits)
        so_far += routing.load
        leaf = logits.clone().requires_grad_()
        mean = (leaf.sigmoid() / leaf.sigmoid().sum(-1, keepdim=True)).mean(0)
        value = (so_far.double() / so_far.double().mean() * mean).sum()
        (0.3 * value).backward()
        torch.testing.assert_close(gradient, leaf.grad, rtol=1e-11, atol=1e-16)
        torch.testing.assert_close(balancer.last_value, value.detach(), **TIGHT)
        assert torch.equal(balancer.step_load, so_far)
    update_balancers([balancer])
    assert not balancer.step_load.any()


def test_g3_uneven_microbatches_weigh_by_their_tokens() -> None:
    balancer = GShard(2, 1, scope="global")
    for count, load in ((8, [8, 0]), (2, [0, 2])):
        logits = torch.zeros(10, 2, dtype=torch.float64)
        logits[:, load.index(count)] = 1.0
        # both microbatches have 10 rows, so that only the mask tells their sizes apart
        routing = route(logits.requires_grad_(), None, 1, valid=torch.arange(10) < count)
        assert routing.load.tolist() == load
        balancer.steer(routing)
    shares = balancer.step_load / balancer.step_load.sum()
    assert shares.tolist() == pytest.approx([0.8, 0.2])
    # f = (1.6, .4) over P of the second microbatch
    low, high = 1 / (1 + math.exp(0)), 1 / (1 + math.exp(-1))
    expected = (1.6 * low + 0.4 * high) / (low + high)
    assert balancer.last_value is not None
    assert balancer.last_value.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("scope", ["microbatch", "sequence", "global"])
@pytest.mark.parametrize("offset", [0.0, 60.0, 300.0], ids=["plain", "scores_1e-26", "scores_1e-130"])
def test_g7_no_epsilon_where_scores_underflow(scope: str, offset: float) -> None:
    logits = tokens(12).float() - offset
    balancer = GShard(E, K, coefficient=1.0, scope=scope)
    gradient, routing = steered([balancer], logits, selection="logit", num_sequences=2)
    # far below zero the logarithm of a sigmoid is the logit, so its share is a softmax
    leaf = logits.double().requires_grad_()
    shares = torch.nn.functional.logsigmoid(leaf).softmax(-1)
    loss = reference_loss(
        shares, routing.experts, torch.ones(12, dtype=torch.bool), 2 if scope == "sequence" else 1, None
    )
    loss.backward()
    assert balancer.last_value is not None
    assert balancer.last_value.item() == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(gradient.double(), leaf.grad, rtol=1e-4, atol=1e-7)
    assert gradient.any()


@pytest.mark.parametrize("scope", ["microbatch", "sequence"])
def test_balanced_load_has_no_gradient(scope: str) -> None:
    logits = torch.zeros(2 * E, E, dtype=torch.float64)
    rows = torch.arange(2 * E)
    logits[rows, rows % E] = 2.0
    logits[rows, (rows + 1) % E] = 1.0
    for bound in ("tanh", None):
        gradient, routing = steered([GShard(E, K, scope=scope, bound=bound)], logits, num_sequences=2)
        assert routing.load.unique().tolist() == [4]
        assert not gradient.any()
        gradient, _ = steered([LEI(E, K, eta=1.0, bound=bound)], logits)
        assert not gradient.any()


BOTH = [
    pytest.param(partial(GShard, E, K), id="gshard"),
    pytest.param(partial(GShard, E, K, scope="sequence", bound="tanh"), id="gshard_sequence_bounded"),
    pytest.param(partial(LEI, E, K, eta=1e-3), id="lei"),
    pytest.param(partial(LEI, E, K, eta=1e-3, units="per_token"), id="lei_per_token"),
]


@pytest.mark.parametrize("build", BOTH)
@pytest.mark.parametrize("scale", [0.125, 1024.0, torch.tensor(1024.0)], ids=["float", "large", "tensor"])
def test_loss_scale_scales_the_gradient_only(build: Callable[[], Any], scale: Any) -> None:
    plain, scaled = build(), build()
    scaled.loss_scale = scale
    gradient, _ = steered([plain], tokens(12), num_sequences=2)
    larger, _ = steered([scaled], tokens(12), num_sequences=2)
    assert larger.dtype == torch.float64
    torch.testing.assert_close(larger, gradient * float(scale), **TIGHT)
    assert plain.last_value is None or torch.equal(plain.last_value, scaled.last_value)


@pytest.mark.parametrize("build", BOTH)
def test_g2_gradient_does_not_depend_on_ranks_and_accumulation(build: Callable[[], Any]) -> None:
    """8 equal microbatches as ranks x microbatches: mean over ranks of sums that carry 1 / (microbatches a rank)."""
    parts = tokens(8 * 6).chunk(8)
    found = []
    for num_ranks in (1, 2, 4, 8):
        balancer = build()
        balancer.loss_scale = num_ranks / 8
        gradients = [steered([balancer], part, num_sequences=2)[0] for part in parts]
        # one weight that all microbatches share: the sum over tokens of input x gradient
        found.append(sum((part.T @ gradient for part, gradient in zip(parts, gradients, strict=True))) / num_ranks)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-11, atol=1e-16)


SHARDED = [
    *[
        pytest.param(partial(GShard, E, K, scope=scope, bound=bound), id=f"gshard_{scope}_{bound}")
        for scope in ("microbatch", "sequence")
        for bound in (None, "tanh")
    ],
    *[
        pytest.param(partial(LEI, E, K, eta=1e-3, units=units, bound=bound), id=f"lei_{units}_{bound}")
        for units in ("raw", "per_token")
        for bound in (None, "tanh")
    ],
]
# True is a real token of three sequences of eight: as many in every two columns, but not of every sequence
EVEN = torch.tensor([[1, 1, 0, 0, 1, 1, 1, 0], [1, 0, 1, 1, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1, 0, 1]]).bool()
# padded tails and a sequence of padding alone
UNEVEN = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0], [0] * 8, [1, 1, 1, 0, 0, 0, 0, 0]]).bool()
# the last shard of four has no real token
EMPTY = torch.arange(8).expand(3, 8) < torch.tensor([[5], [2], [6]])


def columns(tensor: Tensor, num_shards: int) -> list[Tensor]:
    """Of ``[sequences, length, ...]`` the tokens ``[sequences * length / shards, ...]`` of every shard."""
    return [part.flatten(0, 1) for part in tensor.chunk(num_shards, dim=1)]


def pooled_loads(routing: Routing) -> Callable[[list[Tensor], object], list[Tensor]]:
    """What a collective over the shards of this routing answers: its load, or that of its sequences."""
    assert routing.valid is not None
    rows = zip(routing.experts.chunk(3), routing.valid.chunk(3), strict=True)
    by_sequence = torch.stack([torch.bincount(chosen[real].flatten(), minlength=E) for chosen, real in rows])
    return lambda loads, group: [(routing.load if load.numel() == E else by_sequence).view_as(load) for load in loads]


@pytest.mark.parametrize("build", SHARDED)
@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize("mask", [EVEN, UNEVEN, EMPTY], ids=["even", "uneven", "empty_shard"])
def test_g2_gradient_does_not_depend_on_the_shards_of_a_microbatch(
    build: Callable[[], Any], num_shards: int, mask: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mean over the shards: with a mean loss if each has as many real tokens, else with a token-normalised loss."""
    logits = tokens(24)
    whole = build()
    expected, routing = steered([whole], logits, mask.flatten(), num_sequences=3)
    assert expected.any()
    monkeypatch.setattr("equipoise.balancers.update.sum_over_shards", pooled_loads(routing))
    gradients, value = [], 0.0
    for part, valid in zip(columns(logits.unflatten(0, (3, 8)), num_shards), columns(mask, num_shards), strict=True):
        balancer = build()
        balancer.microbatch_shards = "a group"
        weight = int(valid.sum()) / int(mask.sum())
        balancer.loss_scale = num_shards * weight
        gradient, _ = steered([balancer], part, valid, num_sequences=3)
        gradients.append(gradient.unflatten(0, (3, -1)) / num_shards)
        value += weight * float(balancer.last_value or 0)
        assert mask is not EVEN or balancer.loss_scale == 1
    torch.testing.assert_close(torch.cat(gradients, dim=1).flatten(0, 1), expected, rtol=1e-11, atol=1e-16)
    assert value == pytest.approx(float(whole.last_value or 0), rel=1e-12)


@pytest.mark.parametrize("build", SHARDED)
@pytest.mark.parametrize("valid", [None, torch.arange(12) % 4 != 1], ids=["no_mask", "mask"])
def test_one_shard_is_the_whole_microbatch(build: Callable[[], Any], valid: Tensor | None) -> None:
    alone, shard = build(), build()
    # without torch.distributed a group is this process
    shard.microbatch_shards = "a group"
    expected, _ = steered([alone], tokens(12), valid, num_sequences=3)
    gradient, _ = steered([shard], tokens(12), valid, num_sequences=3)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-17)
    assert float(shard.last_value or 0) == pytest.approx(float(alone.last_value or 0), rel=1e-12)


@pytest.mark.parametrize("build", SHARDED)
def test_g4_pooled_load_leaves_the_local_one(build: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.balancers.update.sum_over_shards", lambda loads, group: [load + 5 for load in loads])
    balancer = build()
    balancer.microbatch_shards = "a group"
    logits = tokens(12)
    _, routing = steered([balancer], logits, num_sequences=2)
    assert torch.equal(routing.load, route(logits, None, K).load)
    assert routing.load.sum() == 12 * K


def test_pairing_adds_both_gradients_in_any_order() -> None:
    logits, valid = tokens(12), torch.arange(12) != 4
    gshard, lei = partial(GShard, E, K, coefficient=0.2), partial(LEI, E, K, eta=1e-3)
    alone = [steered([build()], logits, valid)[0] for build in (gshard, lei)]
    first, routing = steered([gshard(), lei()], logits, valid)
    second, _ = steered([lei(), gshard()], logits, valid)
    torch.testing.assert_close(first, alone[0] + alone[1], rtol=1e-11, atol=1e-16)
    torch.testing.assert_close(second, first, rtol=1e-12, atol=1e-17)
    assert torch.equal(routing.weights, route(logits, None, K).weights)


def test_pairing_of_equal_kinds_adds_up() -> None:
    logits = tokens(12)
    for build in (partial(GShard, E, K), partial(LEI, E, K)):
        once, _ = steered([build()], logits)
        twice, _ = steered([build(), build()], logits)
        torch.testing.assert_close(twice, 2 * once, rtol=1e-11, atol=1e-17)


@pytest.mark.parametrize("build", BOTH)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_logits_get_a_gradient_of_their_dtype(build: Callable[[], Any], dtype: torch.dtype) -> None:
    logits = tokens(12).to(dtype)
    gradient, routing = steered([build()], logits, num_sequences=2)
    assert gradient.dtype == dtype
    assert routing.weights.dtype == torch.float32
    expected, _ = steered([build()], logits.double(), num_sequences=2)
    largest = expected.abs().max().item()
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-2, atol=1e-2 * largest)


@pytest.mark.parametrize("build", BOTH)
def test_frozen_router_is_left_alone(build: Callable[[], Any]) -> None:
    routing = build().steer(route(tokens(12), None, K, num_sequences=2))
    assert not routing.weights.requires_grad


BAD_OPTIONS: list[tuple[Any, dict[str, Any], str]] = [
    (GShard, {"scope": "batch"}, "scope must be one of microbatch, sequence, global, got 'batch'"),
    (GShard, {"bound": "clip"}, "bound must be 'tanh' or null, got 'clip'"),
    (GShard, {"bound": "none"}, "bound must be 'tanh' or null, got 'none'"),
    (GShard, {"coefficient": 0.0}, r"coefficient must be positive \(.*\), got 0.0"),
    (GShard, {"coefficient": -1.0}, r"coefficient must be positive \(.*\), got -1.0"),
    (GShard, {"coefficient": math.nan}, r"coefficient must be positive \(.*\), got nan"),
    (LEI, {"eta": 0.0}, r"eta and tau must be positive \(.*\), got 0.0 and 1.0"),
    (LEI, {"eta": -1e-5}, r"eta and tau must be positive \(.*\), got -1e-05 and 1.0"),
    (LEI, {"eta": math.nan}, r"eta and tau must be positive"),
    (LEI, {"tau": 0.0}, r"eta and tau must be positive \(.*\), got 1e-05 and 0.0"),
    (LEI, {"bound": "clip"}, "bound must be 'tanh' or null, got 'clip'"),
    (LEI, {"units": "token"}, "units must be 'raw' or 'per_token', got 'token'"),
]


@pytest.mark.parametrize(("build", "options", "message"), BAD_OPTIONS)
def test_bad_option_is_an_error(build: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(E, K, **options)
