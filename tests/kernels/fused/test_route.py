"""The routing kernel against the reference. ``T`` tokens, ``E`` experts, ``K`` experts a token."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise.kernels import MarginTally, RadixTally, Routing, UniformTally, route
from equipoise.kernels.tally import FixedRows

On = Callable[[str], Any]
Check = Callable[[Tensor, Tensor], None]

TOKENS = [0, 1, 33, 257]
CHOICES = [(E, K) for E in (2, 7, 8, 60, 256, 512) for K in (1, 2, 6, 8, 16) if K < E]
SMALL = [(2, 1), (7, 6), (60, 8), (256, 6)]


def draw(num_tokens: int, num_experts: int, device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Logits ``[T, E]`` and a bias ``[E]``."""
    generator = torch.Generator().manual_seed(num_tokens + num_experts)
    logits = torch.randn(num_tokens, num_experts, generator=generator) * 2
    return logits.to(device, dtype), (torch.randn(num_experts, generator=generator) * 0.2).to(device)


def check_equal(actual: Routing, expected: Routing, assert_close: Check) -> None:
    """The integers exactly, the cutoff to the bit, the weights to rounding."""
    assert torch.equal(actual.experts, expected.experts)
    assert torch.equal(actual.load, expected.load)
    assert torch.equal(actual.cutoff, expected.cutoff)
    assert_close(actual.weights, expected.weights)
    assert int(actual.uncounted) == 0
    for name in ("experts", "weights", "cutoff", "load"):
        assert getattr(actual, name).dtype == getattr(expected, name).dtype, name
        assert getattr(actual, name).shape == getattr(expected, name).shape, name


def resolution(bias: Tensor) -> float:
    """What the fast key cannot tell apart, with one step for the rounding of the sum."""
    return 2 * (1 + (bias.max() - bias.min()).item()) * 2.0**-22


def near_ties(routing: Routing, bias: Tensor) -> Tensor:
    """Rows whose top K+1 biased scores lie too close, to one another or to the next, for the fast key."""
    biased = routing.scores + bias
    top = biased.topk(min(routing.top_k + 2, biased.shape[1]), dim=-1).values
    return (top[:, :-1] - top[:, 1:] <= resolution(bias)).any(-1)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "selection"),
    [(*choice, "score") for choice in CHOICES] + [(*choice, "logit") for choice in [*SMALL, (512, 16)]],
)
def test_exact_comparison_is_the_reference(
    num_experts: int,
    top_k: int,
    selection: str,
    on: On,
    device: str,
    same_scores: None,
    poisoned: None,
    assert_close: Check,
) -> None:
    for num_tokens in TOKENS:
        logits, bias = draw(num_tokens, num_experts, device)
        options: dict[str, Any] = {"selection": selection, "exact": True, "normalise": True, "scale": 2.5}
        with on("torch"):
            expected = route(logits, bias, top_k, **options)
        with on("triton"):
            actual = route(logits, bias, top_k, **options)
        check_equal(actual, expected, assert_close)


@pytest.mark.parametrize(("num_experts", "top_k"), CHOICES)
def test_fast_key_differs_at_near_ties_only(
    num_experts: int, top_k: int, on: On, device: str, same_scores: None, poisoned: None, assert_close: Check
) -> None:
    for num_tokens in TOKENS:
        logits, bias = draw(num_tokens, num_experts, device)
        with on("torch"):
            expected = route(logits, bias, top_k)
        with on("triton"):
            actual = route(logits, bias, top_k)
        differs = (actual.experts != expected.experts).any(-1)
        assert not (differs & ~near_ties(expected, bias)).any()
        assert differs.sum() <= 1
        same = ~differs
        assert torch.equal(actual.cutoff[same], expected.cutoff[same])
        assert_close(actual.weights[same], expected.weights[same])
        assert actual.load.sum() == num_tokens * top_k


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("num_experts", "top_k"), SMALL)
def test_dtypes_gates_and_several_programs(
    num_experts: int,
    top_k: int,
    dtype: torch.dtype,
    normalise: bool,
    gate: str,
    on: On,
    device: str,
    same_scores: None,
    small_programs: None,
    poisoned: None,
    assert_close: Check,
) -> None:
    logits, bias = draw(33, num_experts, device, dtype)
    options: dict[str, Any] = {"gate": gate, "normalise": normalise, "exact": True, "scale": 1.5}
    with on("torch"):
        expected = route(logits, bias, top_k, **options)
    with on("triton"):
        actual = route(logits, bias, top_k, **options)
    check_equal(actual, expected, assert_close)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("selection", ["score", "logit"])
@pytest.mark.parametrize(("num_experts", "top_k"), [*SMALL, (512, 16), (1024, 16)])
def test_ties_go_to_the_lowest_id(
    num_experts: int,
    top_k: int,
    selection: str,
    exact: bool,
    on: On,
    device: str,
    assert_close: Check,
    same_scores: None,
) -> None:
    generator = torch.Generator().manual_seed(0)
    quantised = torch.randint(-2, 3, (33, num_experts), generator=generator).float()
    # the fast key does not tell exp(-60) from exp(-120)
    saturated = [quantised * 60] if exact or selection == "logit" else [quantised.clamp(min=0) * 60]
    for logits in (torch.full((33, num_experts), 0.25), quantised, *saturated):
        logits = logits.to(device)
        with on("torch"):
            expected = route(logits, None, top_k, selection=selection)
        with on("triton"):
            actual = route(logits, None, top_k, selection=selection, exact=exact)
        check_equal(actual, expected, assert_close)


@pytest.mark.parametrize("exact", [True, False])
def test_all_tokens_to_the_same_experts(exact: bool, on: On, device: str) -> None:
    logits, _ = draw(257, 60, device)
    bias = torch.zeros(60, device=device)
    bias[[3, 59]] = 5.0
    tally = UniformTally.zeros(60, 100, bias.min() - 1, bias.max() + 1)
    with on("triton"):
        routing = route(logits, bias, 2, tally=tally, exact=exact)
    assert routing.load.nonzero().flatten().tolist() == [3, 59]
    assert routing.load.sum() == 514
    assert tally.counts.sum(-1).tolist() == [257] * 60
    assert int(tally.clamped.sum()) == 0


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_weights_hold_where_every_score_underflows(gate: str, on: On, device: str, assert_close: Check) -> None:
    logits = torch.tensor([[-300.0, -301.0, -302.0, -303.0], [90.0, 80.0, -300.0, -310.0]], device=device)
    with on("triton"):
        routing = route(logits, None, 2, gate=gate, normalise=True, selection="logit")
    wide = logits.double()
    logs = torch.nn.functional.logsigmoid(wide) if gate == "sigmoid" else wide
    assert_close(routing.weights, logs[:, :2].softmax(-1))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("selection", "gate"), [("score", "sigmoid"), ("logit", "sigmoid"), ("score", "softmax")])
@pytest.mark.parametrize(("num_experts", "top_k"), [(2, 1), (7, 6), (60, 8)])
def test_tallies_and_masks(
    num_experts: int,
    top_k: int,
    selection: str,
    gate: str,
    exact: bool,
    on: On,
    device: str,
    same_scores: None,
    small_programs: None,
) -> None:
    logits, bias = draw(33, num_experts, device)
    valid = torch.arange(33, device=device) % 3 != 1
    results = {}
    for backend in ("torch", "triton"):
        # bounds inside the margins, so that some are clamped
        uniform = UniformTally.zeros(
            num_experts, 37, torch.tensor(-0.3, device=device), torch.tensor(0.6, device=device)
        )
        counts = torch.zeros(num_experts, 256, dtype=torch.int32, device=device)
        radix = RadixTally(counts)
        options: dict[str, Any] = {"selection": selection, "gate": gate, "valid": valid, "exact": exact}
        with on(backend):
            for tally in (uniform, radix):
                # twice: a tally goes on counting
                routing = route(logits, bias, top_k, tally=tally, **options)
                route(logits[:5], bias, top_k, tally=tally, **(options | {"valid": None}))
        results[backend] = (routing.load, uniform.counts, uniform.clamped, counts)
    for actual, expected in zip(results["triton"], results["torch"], strict=True):
        assert torch.equal(actual, expected)
    assert results["triton"][2].sum() > 0
    assert results["triton"][3].sum() == (22 + 5) * num_experts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_margins_are_kept_rounded_to_nearest(dtype: torch.dtype, on: On, device: str, same_scores: None) -> None:
    logits, bias = draw(257, 60, device)
    valid = torch.arange(257, device=device) % 5 != 0
    kept = torch.full((300, 60), 7.0, dtype=dtype, device=device)
    filled = torch.tensor([20], device=device)
    tally = MarginTally(FixedRows(kept, filled))
    with on("triton"):
        routing = route(logits, bias, 4, valid=valid, tally=tally, exact=True)
    assert filled.item() == 277
    assert torch.equal(kept[20:277][valid], routing.margins[valid].to(dtype))
    assert kept[20:277][~valid].isnan().all()
    assert (kept[:20] == 7).all()
    assert (kept[277:] == 7).all()


def test_tokens_without_room_are_reported(on: On, device: str) -> None:
    logits, bias = draw(33, 8, device)
    kept = torch.full((40, 8), 7.0, dtype=torch.bfloat16, device=device)
    filled = torch.tensor([20], device=device)
    with on("triton"):
        routing = route(logits, bias, 2, tally=MarginTally(FixedRows(kept, filled)))
    assert int(routing.uncounted) == 13
    assert (kept[:20] == 7).all()
    assert torch.equal(kept[20:].float(), routing.margins[:20].bfloat16().float())


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("selection", ["score", "logit"])
@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
@pytest.mark.parametrize(("num_experts", "top_k"), [(7, 6), (60, 8)])
def test_infinite_logits_corrupt_no_counter(
    num_experts: int, top_k: int, gate: str, selection: str, exact: bool, on: On, device: str
) -> None:
    logits, bias = draw(33, num_experts, device)
    broken = [2, 3, 4, 30]
    good = [row for row in range(33) if row not in broken]
    logits[2, 1] = float("nan")
    logits[3] = float("inf")
    logits[4, -1] = float("-inf")
    logits[30] = float("nan")
    results = []
    for rows in (list(range(33)), good):
        uniform = UniformTally.zeros(num_experts, 50, bias.min() - 1, bias.max() + 1)
        kept = torch.full((33, num_experts), 7.0, dtype=torch.bfloat16, device=device)
        counts = torch.zeros(num_experts, 256, dtype=torch.int32, device=device)
        margins = MarginTally(FixedRows(kept, torch.zeros(1, dtype=torch.int64, device=device)))
        with on("triton"):
            for tally in (uniform, RadixTally(counts), margins):
                options: dict[str, Any] = {"selection": selection, "gate": gate, "exact": exact}
                routing = route(logits[rows], bias, top_k, tally=tally, **options)
        results.append((routing, uniform, counts, kept))
    (routing, uniform, counts, kept), (clean, clean_uniform, clean_counts, _) = results
    assert (int(routing.uncounted), int(clean.uncounted)) == (4, 0)
    assert torch.equal(routing.load, clean.load)
    assert torch.equal(uniform.counts, clean_uniform.counts)
    assert torch.equal(uniform.clamped, clean_uniform.clamped)
    assert torch.equal(counts, clean_counts)
    assert torch.equal(routing.experts[good], clean.experts)
    assert routing.experts[broken].tolist() == [list(range(top_k))] * 4
    for outcome in (routing.weights, routing.cutoff, kept):
        assert outcome[broken].isnan().all()
        assert not outcome[good].isnan().any()


@pytest.mark.parametrize("exact", [True, False])
def test_a_broken_bias_is_reported_for_every_token(exact: bool, on: On, device: str) -> None:
    logits, bias = draw(33, 8, device)
    bias[3] = float("nan")
    with on("triton"):
        routing = route(logits, bias, 2, exact=exact)
    assert int(routing.uncounted) == 33
    assert int(routing.load.sum()) == 0


def test_views_and_offsets(on: On, device: str) -> None:
    logits, bias = draw(33, 16, device)
    with on("triton"):
        for view in (logits[:, ::2], logits[:, 3:11], logits.t()[:, :8], logits[:1, :8].expand(33, 8)):
            actual, expected = route(view, bias[:8], 3), route(view.contiguous(), bias[:8], 3)
            assert torch.equal(actual.experts, expected.experts)
            assert torch.equal(actual.weights, expected.weights)


def test_what_the_kernel_cannot_do_is_said(on: On, device: str) -> None:
    with on("triton"):
        with pytest.raises(ValueError, match="fp64"):
            route(torch.zeros(3, 8, dtype=torch.float64, device=device), None, 2)
        with pytest.raises(ValueError, match="up to 1024 experts and top-16, got 2048 and top-2"):
            route(torch.zeros(3, 2048, device=device), None, 2)
        with pytest.raises(ValueError, match="top-17"):
            route(torch.zeros(3, 32, device=device), None, 17)


@pytest.mark.parametrize(
    ("gate", "spread", "allowed"), [("sigmoid", 0.0, 1), ("sigmoid", 0.3, 1), ("softmax", 0.0, 20)]
)
def test_how_often_the_fast_key_differs(gate: str, spread: float, allowed: int, on: On, device: str) -> None:
    """Counted over 4,096 tokens of 256 experts: the rows that the docstring of the kernel speaks of."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4096, 256, generator=generator).to(device)
    bias = (torch.rand(256, generator=generator) * spread).to(device)
    with on("triton"):
        fast, exact = (route(logits, bias, 6, gate=gate, exact=exact) for exact in (False, True))
    differs = (fast.experts != exact.experts).any(-1)
    assert not (differs & ~near_ties(exact, bias)).any()
    assert int(differs.sum()) <= allowed
    # at a near tie the other expert is as good to the key's resolution
    assert (fast.cutoff - exact.cutoff).abs().max() <= resolution(bias)
