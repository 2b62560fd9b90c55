"""Routing against a stable sort. ``T`` tokens, ``E`` experts, ``K`` experts a token."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.kernels import RadixTally, Routing, UniformTally, replay, route

QUICK = settings.get_profile("kernels")
Check = Callable[[Tensor, Tensor], None]

# 2049 and 5000 cross the block of 2048 tokens
TOKENS = [0, 1, 33, 257, 2049, 5000]
CHOICES = [(num_experts, top_k) for num_experts in (2, 7, 8, 60, 256) for top_k in (1, 2, 6, 8) if top_k < num_experts]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def draw(num_tokens: int, num_experts: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits ``[T, E]`` and a bias ``[E]``."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, num_experts, generator=generator) * 2
    return logits.to(dtype), torch.randn(num_experts, generator=generator) * 0.2


def stable_top(biased: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Experts ``[T, K]`` by falling value, the lowest id first among equals, and the cutoff ``[T]``."""
    values, order = biased.sort(dim=-1, descending=True, stable=True)
    return order[:, :top_k], values[:, top_k]


def count_load(experts: Tensor, num_experts: int) -> Tensor:
    return torch.nn.functional.one_hot(experts.flatten(), num_experts).sum(0).int()


def uniform_tally(num_experts: int) -> UniformTally:
    return UniformTally.zeros(num_experts, 100, torch.tensor(-1.5), torch.tensor(1.5))


def radix_tally(num_experts: int) -> RadixTally:
    return RadixTally(torch.zeros(num_experts, 256, dtype=torch.int32))


def check_against_oracle(
    routing: Routing, logits: Tensor, bias: Tensor, top_k: int, selection: str, assert_close: Check
) -> None:
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    exact_scores = logits.double().sigmoid()
    assert_close(routing.scores, exact_scores)
    unbiased = routing.scores if selection == "score" else logits.to(wide)
    experts, cutoff = stable_top(unbiased + bias, top_k)
    assert torch.equal(routing.experts, experts)
    assert torch.equal(routing.cutoff, cutoff)
    assert torch.equal(routing.margins, cutoff[:, None] - unbiased)
    assert torch.equal(routing.load, count_load(experts, logits.shape[1]))
    assert_close(routing.weights, exact_scores.gather(-1, experts))
    assert (routing.experts.dtype, routing.load.dtype) == (torch.int64, torch.int32)
    assert routing.weights.dtype == routing.cutoff.dtype == routing.scores.dtype == routing.margins.dtype == wide
    assert (routing.top_k, routing.num_experts, int(routing.num_valid)) == (top_k, logits.shape[1], len(logits))


@pytest.mark.parametrize("selection", ["score", "logit"])
@pytest.mark.parametrize(("num_experts", "top_k"), CHOICES)
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_shapes(num_tokens: int, num_experts: int, top_k: int, selection: str, assert_close: Check) -> None:
    logits, bias = draw(num_tokens, num_experts)
    routing = route(logits, bias, top_k, selection=selection)
    check_against_oracle(routing, logits, bias, top_k, selection, assert_close)


@pytest.mark.parametrize("selection", ["score", "logit"])
@pytest.mark.parametrize(("num_experts", "top_k"), [(2, 1), (7, 6), (60, 8)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: torch.dtype, num_experts: int, top_k: int, selection: str, assert_close: Check) -> None:
    for num_tokens in TOKENS[:-1]:
        logits, bias = draw(num_tokens, num_experts, dtype)
        routing = route(logits, bias, top_k, selection=selection)
        check_against_oracle(routing, logits, bias, top_k, selection, assert_close)


@pytest.mark.parametrize("selection", ["score", "logit"])
def test_softmax_gate(selection: str, assert_close: Check) -> None:
    logits, bias = draw(257, 60)
    routing = route(logits, bias, 6, gate="softmax", selection=selection, scale=2.5)
    exact = logits.double().softmax(-1)
    assert_close(routing.scores, exact)
    experts, cutoff = stable_top((routing.scores if selection == "score" else logits) + bias, 6)
    assert torch.equal(routing.experts, experts)
    assert torch.equal(routing.cutoff, cutoff)
    assert_close(routing.weights, 2.5 * exact.gather(-1, experts))


@pytest.mark.parametrize(
    "logits",
    [
        torch.randn(8, 300).t(),
        torch.randn(300, 20)[:, 5:13],
        torch.randn(300, 16)[:, ::2],
        torch.randn(1, 8).expand(300, 8),
        torch.randn(300, 1).expand(300, 8),
    ],
    ids=["transposed", "columns", "every_second_column", "one_row", "one_column"],
)
@pytest.mark.parametrize("make_tally", [uniform_tally, radix_tally])
def test_logits_may_be_any_view(logits: Tensor, make_tally: Callable[[int], Any]) -> None:
    tally, expected_tally = make_tally(8), make_tally(8)
    routing = route(logits, None, 3, tally=tally)
    expected = route(logits.contiguous(), None, 3, tally=expected_tally)
    assert torch.equal(routing.experts, expected.experts)
    assert torch.equal(routing.cutoff, expected.cutoff)
    assert torch.equal(routing.weights, expected.weights)
    assert torch.equal(tally.counts, expected_tally.counts)


def test_no_bias_is_a_bias_of_zeros() -> None:
    logits, _ = draw(2049, 60)
    bare, zeros = route(logits, None, 6), route(logits, torch.zeros(60), 6)
    assert torch.equal(bare.experts, zeros.experts)
    assert torch.equal(bare.cutoff, zeros.cutoff)
    assert torch.equal(bare.weights, zeros.weights)


def test_bias_moves_the_choice_but_not_the_weights() -> None:
    logits, bias = draw(257, 8)
    biased, plain = route(logits, bias, 2), route(logits, None, 2)
    assert not torch.equal(biased.experts, plain.experts)
    assert torch.equal(biased.weights, biased.scores.gather(-1, biased.experts))


def test_inputs_are_left_as_they_are_and_the_bias_gets_no_gradient() -> None:
    logits, bias = draw(33, 8)
    logits.requires_grad_()
    bias.requires_grad_()
    before = logits.detach().clone(), bias.detach().clone()
    routing = route(logits, bias, 2)
    routing.weights.sum().backward()
    assert torch.equal(logits.detach(), before[0])
    assert torch.equal(bias.detach(), before[1])
    assert bias.grad is None
    assert logits.grad is not None
    assert not routing.cutoff.requires_grad
    assert not routing.margins.requires_grad


# ties


def lowest_id_first(row: list[float], top_k: int) -> list[int]:
    return sorted(range(len(row)), key=lambda expert: (-row[expert], expert))[:top_k]


@pytest.mark.parametrize("selection", ["score", "logit"])
@pytest.mark.parametrize(("num_experts", "top_k"), CHOICES)
def test_all_scores_equal(num_experts: int, top_k: int, selection: str) -> None:
    routing = route(torch.full((257, num_experts), 0.25), None, top_k, selection=selection)
    assert routing.experts.tolist() == [list(range(top_k))] * 257
    assert routing.cutoff.unique().numel() == 1
    assert routing.margins.abs().max() == 0
    assert routing.load.tolist() == [257] * top_k + [0] * (num_experts - top_k)


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
@pytest.mark.parametrize("selection", ["score", "logit"])
@pytest.mark.parametrize(("num_experts", "top_k"), [(7, 2), (60, 8), (256, 8)])
def test_quantised_logits(num_experts: int, top_k: int, selection: str, gate: str) -> None:
    logits = torch.randint(-2, 3, (129, num_experts)).float()
    routing = route(logits, None, top_k, selection=selection, gate=gate)
    assert routing.experts.tolist() == [lowest_id_first(row, top_k) for row in logits.tolist()]


def test_bf16_logits_with_ties() -> None:
    logits, bias = draw(2100, 256, torch.bfloat16)
    routing = route(logits, bias.bfloat16(), 8, selection="logit")
    biased = logits.float() + bias.bfloat16().float()
    assert routing.experts.tolist() == [lowest_id_first(row, 8) for row in biased.tolist()]


@pytest.mark.parametrize(
    ("row", "bias", "experts", "cutoff"),
    [
        # inside the K, across the cut, beyond the cut
        ([1.0, 3.0, 3.0, 0.0, -1.0], None, [1, 2], 1.0),
        ([1.0, 1.0, 3.0, 1.0, 0.0], None, [2, 0], 1.0),
        ([0.0, 3.0, 2.0, 1.0, 1.0], None, [1, 2], 1.0),
        ([1.0, 0.0, 2.0, 0.0, -9.0], [0.0, 1.0, -1.0, 1.0, 0.0], [0, 1], 1.0),
        ([-0.0, 0.0, -0.0, 0.0, -1.0], None, [0, 1], 0.0),
        ([0.0, -0.0, 5.0, 0.0, -0.0], None, [2, 0], 0.0),
    ],
)
def test_e7_ties_go_to_the_lowest_expert_id(
    row: list[float], bias: list[float] | None, experts: list[int], cutoff: float
) -> None:
    routing = route(torch.tensor([row] * 3), None if bias is None else torch.tensor(bias), 2, selection="logit")
    assert routing.experts.tolist() == [experts] * 3
    assert routing.cutoff.tolist() == [cutoff] * 3


# extremes


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", [[200.0] * 8, [-200.0] * 8, [200.0, -200.0] * 4, [200.0] + [-200.0] * 7])
def test_saturated_scores(pattern: list[float], dtype: torch.dtype, gate: str, normalise: bool) -> None:
    logits = torch.tensor([pattern] * 5, dtype=dtype, requires_grad=True)
    routing = route(logits, None, 2, gate=gate, normalise=normalise)
    assert routing.experts.tolist() == [lowest_id_first(pattern, 2)] * 5
    routing.weights.square().sum().backward()
    assert routing.weights.isfinite().all()
    assert routing.margins.isfinite().all()
    assert routing.shares.isfinite().all()
    assert logits.grad.isfinite().all()
    if normalise:
        torch.testing.assert_close(routing.weights.sum(-1), torch.ones(5, dtype=routing.weights.dtype))


@pytest.mark.parametrize("selection", ["score", "logit"])
def test_all_tokens_to_one_expert(selection: str) -> None:
    logits = torch.randn(2049, 8)
    logits[:, 5] += 30
    tally = radix_tally(8)
    routing = route(logits, None, 1, selection=selection, tally=tally)
    assert routing.load.tolist() == [0, 0, 0, 0, 0, 2049, 0, 0]
    assert routing.experts.unique().tolist() == [5]
    assert (routing.margins[:, 5] < 0).all()
    assert tally.counts.sum(-1).tolist() == [2049] * 8


def test_num_tokens_zero() -> None:
    logits = torch.zeros(0, 8, requires_grad=True)
    tally = radix_tally(8)
    routing = route(logits, None, 2, tally=tally, valid=torch.zeros(0, dtype=torch.bool))
    routing.weights.sum().backward()
    assert (routing.experts.shape, routing.weights.shape, routing.cutoff.shape) == ((0, 2), (0, 2), (0,))
    assert routing.load.tolist() == [0] * 8
    assert tally.counts.sum() == 0
    assert logits.grad.shape == (0, 8)


# masks


@pytest.mark.parametrize("make_tally", [uniform_tally, radix_tally])
@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(8, 8), (60, 60), (257, 7), (5000, 60)])
def test_masked_tokens_are_routed_but_not_counted(
    num_tokens: int, num_experts: int, gate: str, make_tally: Callable[[int], Any]
) -> None:
    logits, bias = draw(num_tokens, num_experts)
    valid = torch.rand(num_tokens, generator=torch.Generator().manual_seed(1)) < 0.6
    tally, removed_tally = make_tally(num_experts), make_tally(num_experts)
    masked = route(logits, bias, 3, gate=gate, tally=tally, valid=valid)
    unmasked = route(logits, bias, 3, gate=gate)
    removed = route(logits[valid], bias, 3, gate=gate, tally=removed_tally)
    assert torch.equal(masked.experts, unmasked.experts)
    assert torch.equal(masked.weights, unmasked.weights)
    assert torch.equal(masked.experts[valid], removed.experts)
    assert torch.equal(masked.cutoff[valid], removed.cutoff)
    assert torch.equal(masked.load, removed.load)
    assert torch.equal(masked.valid_margins, removed.margins)
    assert torch.equal(tally.counts, removed_tally.counts)
    assert int(masked.num_valid) == int(removed.num_valid) == int(valid.sum())
    assert masked.load.sum() == 3 * valid.sum()


def test_padding_of_a_case() -> None:
    # S4: 4 real and 4 padding tokens, T == E
    logits = torch.randn(8, 8)
    logits[4:, 0] = 50
    valid = torch.tensor([True] * 4 + [False] * 4)
    tally = uniform_tally(8)
    routing = route(logits, None, 1, valid=valid, tally=tally)
    assert torch.equal(routing.load, route(logits[:4], None, 1).load)
    assert tally.counts.sum(-1).tolist() == [4] * 8
    assert routing.experts[4:].flatten().tolist() == [0] * 4


def test_all_masked() -> None:
    logits, bias = draw(33, 8)
    logits.requires_grad_()
    tally = uniform_tally(8)
    routing = route(logits, bias, 2, tally=tally, valid=torch.zeros(33, dtype=torch.bool))
    assert routing.load.tolist() == [0] * 8
    assert tally.counts.sum() == 0
    assert tally.clamped.sum() == 0
    assert routing.num_valid == 0
    assert routing.valid_margins.shape == (0, 8)
    assert torch.equal(routing.experts, route(logits, bias, 2).experts)
    (routing.weights.sum() * 0).backward()
    assert logits.grad.abs().max() == 0


# errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 8}, r"top_k=8 and 8 experts"),
        ({"top_k": 9}, r"top_k=9 and 8 experts"),
        ({"top_k": 0}, r"top_k=0 and 8 experts"),
        ({"top_k": -1}, r"top_k=-1 and 8 experts"),
        ({"logits": torch.zeros(8)}, r"logits must be .*\[tokens, experts\], got torch.float32 \(8,\)"),
        ({"logits": torch.zeros(2, 3, 8)}, r"logits must be .*\(2, 3, 8\)"),
        ({"logits": torch.zeros(6, 8, dtype=torch.int64)}, r"floating point.*torch.int64"),
        ({"bias": torch.zeros(7)}, r"bias must be \[8\], got \(7,\)"),
        ({"bias": torch.zeros(6, 8)}, r"bias must be \[8\], got \(6, 8\)"),
        ({"bias": torch.tensor([0.0] * 7 + [float("nan")])}, r"bias must be finite"),
        ({"valid": torch.ones(5, dtype=torch.bool)}, r"valid must be bool \[6\].*\(5,\)"),
        ({"valid": torch.ones(6, 1, dtype=torch.bool)}, r"valid must be bool \[6\].*\(6, 1\)"),
        ({"valid": torch.ones(6)}, r"valid must be bool.*torch.float32"),
        ({"valid": torch.ones(6, dtype=torch.int64)}, r"valid must be bool.*torch.int64"),
        ({"selection": "scores"}, r"selection must be 'score' or 'logit', got 'scores'"),
        ({"gate": "relu"}, r"gate score must be 'sigmoid' or 'softmax', got 'relu'"),
        ({"num_sequences": 4}, r"num_sequences must divide the 6 tokens, got 4"),
        ({"num_sequences": 0}, r"num_sequences .* got 0"),
        ({"tally": radix_tally(7)}, r"tally.*7.*8|tally.*8.*7"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"logits": torch.zeros(6, 8), "bias": None, "top_k": 2, **options}
    tally = arguments.setdefault("tally", radix_tally(8))
    with pytest.raises(ValueError, match=message):
        route(arguments.pop("logits"), arguments.pop("bias"), arguments.pop("top_k"), **arguments)
    assert tally.counts.sum() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_logits_touch_no_counter(broken: float, dtype: torch.dtype) -> None:
    # E13, in the last block only
    logits, _ = draw(2500, 8, dtype)
    logits[2300, 2] = logits[2300, 3] = logits[2497, 7] = logits[2499, 0] = broken
    uniform, radix = uniform_tally(8), radix_tally(8)
    uniform.counts.fill_(7)
    radix.counts.fill_(7)
    for tally in (uniform, radix):
        with pytest.raises(ValueError, match="in 3 of 2500 tokens"):
            route(logits, None, 2, tally=tally)
        assert tally.counts.unique().tolist() == [7]
    assert uniform.clamped.sum() == 0


# forced and replayed experts


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 33, 2049])
def test_replay_of_recorded_experts_is_the_routing(num_tokens: int, masked: bool, normalise: bool, gate: str) -> None:
    logits, bias = draw(num_tokens, 60)
    valid = torch.arange(num_tokens) % 3 > 0 if masked else None
    options: dict[str, Any] = {"gate": gate, "normalise": normalise, "scale": 2.5, "valid": valid}
    recorded = route(logits, bias, 6, **options)
    replayed = replay(logits, recorded.experts, **options)
    for name in ("experts", "weights", "load", "scores"):
        expected = getattr(recorded, name)
        assert torch.equal(getattr(replayed, name), expected), name
        assert getattr(replayed, name).dtype == expected.dtype
    assert (replayed.top_k, replayed.num_experts, int(replayed.num_valid)) == (6, 60, int(recorded.num_valid))
    assert replayed.cutoff.isnan().all()
    assert replayed.cutoff.shape == (num_tokens,)
    assert replayed.forced
    assert not recorded.forced


def test_replay_forces_any_experts_in_their_order() -> None:
    logits, _ = draw(8, 5, torch.bfloat16)
    # round-robin
    experts = torch.arange(16).view(8, 2) % 5
    routing = replay(logits, experts, selection="logit", valid=torch.arange(8) < 5, num_sequences=2)
    assert torch.equal(routing.experts, experts)
    assert torch.equal(routing.weights, routing.scores.gather(-1, experts))
    assert routing.load.tolist() == [2] * 5
    assert (routing.load.dtype, routing.weights.dtype) == (torch.int32, torch.float32)
    assert (routing.selection, routing.num_sequences, routing.tally) == ("logit", 2, None)
    assert routing.detach().forced
    assert routing.steered(injection=torch.zeros(5)).forced


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"experts": torch.zeros(6, dtype=torch.int64)},
            r"experts must be int64 \[tokens, .*\], got torch.int64 \(6,\)",
        ),
        ({"experts": torch.zeros(6, 2, dtype=torch.int32)}, r"experts must be int64 .*, got torch.int32 \(6, 2\)"),
        ({"experts": torch.arange(10).view(5, 2) % 8}, r"experts must be \[6, K\].*, got 5 rows"),
        ({"experts": torch.arange(48).view(6, 8) % 8}, r"top_k=8 and 8 experts"),
        ({"experts": torch.zeros(6, 0, dtype=torch.int64)}, r"top_k=0 and 8 experts"),
        ({"experts": torch.tensor([[0, 1]] * 5 + [[7, 8]])}, r"got an expert outside \[0, 8\) in token 5"),
        ({"experts": torch.tensor([[0, 1]] * 4 + [[7, -1]] * 2)}, r"got an expert outside \[0, 8\) in token 4"),
        ({"experts": torch.tensor([[0, 3, 1]] * 2 + [[2, 5, 2]] * 4)}, r"got an expert twice in token 2"),
        ({"logits": torch.zeros(6, 8).fill_(float("nan"))}, r"router logits must be finite"),
        ({"logits": torch.zeros(6)}, r"logits must be floating point"),
        ({"valid": torch.ones(6)}, r"valid must be bool"),
        ({"selection": "scores"}, r"selection must be 'score' or 'logit', got 'scores'"),
        ({"gate": "relu"}, r"gate score must be 'sigmoid' or 'softmax', got 'relu'"),
        ({"num_sequences": 4}, r"num_sequences must divide the 6 tokens, got 4"),
    ],
)
def test_what_replay_refuses(options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"logits": torch.zeros(6, 8), "experts": torch.tensor([[0, 1]] * 6), **options}
    with pytest.raises(ValueError, match=message):
        replay(arguments.pop("logits"), arguments.pop("experts"), **arguments)


# the same bits wherever a token stands


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
@pytest.mark.parametrize("selection", ["score", "logit"])
@QUICK
@given(data=st.data(), num_experts=st.sampled_from([2, 7, 13, 60]))
def test_a_split_batch_gives_the_same_bits(data: st.DataObject, num_experts: int, selection: str, gate: str) -> None:
    num_tokens = data.draw(st.integers(1, 150))
    cuts = sorted(data.draw(st.lists(st.integers(0, num_tokens), max_size=5)))
    logits, bias = draw(num_tokens, num_experts, seed=data.draw(st.integers(0, 1000)))
    whole_tally, parts_tally = radix_tally(num_experts), radix_tally(num_experts)
    whole = route(logits, bias, 1, selection=selection, gate=gate, tally=whole_tally)
    bounds = [0, *cuts, num_tokens]
    parts = [
        route(logits[start:stop].clone(), bias, 1, selection=selection, gate=gate, tally=parts_tally)
        for start, stop in pairwise(bounds)
    ]
    assert torch.equal(torch.cat([part.experts for part in parts]), whole.experts)
    assert torch.equal(torch.cat([part.cutoff for part in parts]), whole.cutoff)
    assert torch.equal(torch.cat([part.margins for part in parts]), whole.margins)
    assert torch.equal(torch.cat([part.weights for part in parts]), whole.weights)
    assert torch.equal(torch.stack([part.load for part in parts]).sum(0).int(), whole.load)
    assert torch.equal(parts_tally.counts, whole_tally.counts)


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_order_of_the_tokens_does_not_matter(gate: str) -> None:
    logits, bias = draw(5000, 7)
    shuffled = torch.randperm(5000, generator=torch.Generator().manual_seed(3))
    tally, shuffled_tally = radix_tally(7), radix_tally(7)
    whole = route(logits, bias, 2, gate=gate, tally=tally)
    mixed = route(logits[shuffled], bias, 2, gate=gate, tally=shuffled_tally)
    assert torch.equal(whole.margins[shuffled], mixed.margins)
    assert torch.equal(whole.experts[shuffled], mixed.experts)
    assert torch.equal(tally.counts, shuffled_tally.counts)


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_number_of_threads_does_not_matter(gate: str) -> None:
    logits, bias = draw(5000, 60)
    torch.set_num_threads(1)
    expected = route(logits, bias, 6, gate=gate)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        routing = route(logits, bias, 6, gate=gate)
        assert torch.equal(routing.margins, expected.margins)
        assert torch.equal(routing.experts, expected.experts)


@pytest.mark.usefixtures("restore_default_dtype")
@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_default_dtype_does_not_matter(gate: str) -> None:
    # E9
    logits, bias = draw(2049, 60)
    expected_tally, tally = uniform_tally(60), uniform_tally(60)
    expected = route(logits, bias, 6, gate=gate, normalise=True, scale=2.5, tally=expected_tally)
    torch.set_default_dtype(torch.bfloat16)
    routing = route(logits, bias, 6, gate=gate, normalise=True, scale=2.5, tally=tally)
    assert routing.weights.dtype == routing.margins.dtype == torch.float32
    assert torch.equal(routing.weights, expected.weights)
    assert torch.equal(routing.margins, expected.margins)
    assert torch.equal(routing.experts, expected.experts)
    assert torch.equal(tally.counts, expected_tally.counts)


# what the pass counts is what the routing gives


@pytest.mark.parametrize("make_tally", [uniform_tally, radix_tally])
@pytest.mark.parametrize("selection", ["score", "logit"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(0, 7), (1, 8), (2049, 60), (5000, 7)])
def test_tally_counts_the_margins(
    num_tokens: int, num_experts: int, masked: bool, selection: str, make_tally: Callable[[int], Any]
) -> None:
    logits, bias = draw(num_tokens, num_experts)
    valid = torch.arange(num_tokens) % 3 > 0 if masked else None
    tally, expected = make_tally(num_experts), make_tally(num_experts)
    routing = route(logits, bias, 2, selection=selection, tally=tally, valid=valid)
    expected.add(routing.valid_margins)
    assert routing.tally is tally
    assert torch.equal(tally.counts, expected.counts)
    assert tally.counts.sum() == routing.num_valid * num_experts


def test_num_sequences_is_kept() -> None:
    assert route(torch.zeros(6, 4), None, 1, num_sequences=3).num_sequences == 3
    assert route(torch.zeros(0, 4), None, 1, num_sequences=3).num_sequences == 3


def test_e13_replay_reports_what_the_triton_path_cannot_refuse(
    monkeypatch: pytest.MonkeyPatch, interpreter: None
) -> None:
    monkeypatch.setenv("EQUIPOISE_KERNELS", "triton")
    logits = torch.zeros(5, 4)
    logits[3, 1] = torch.inf
    assert int(replay(logits, torch.tensor([[0, 2]] * 5)).uncounted) == 1
    assert int(replay(logits[:3], torch.tensor([[0, 2]] * 3)).uncounted) == 0
