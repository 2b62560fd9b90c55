"""Fuzzed routing and bias updates against an oracle in NumPy, which takes nothing but the scores from the code.

``T`` tokens, ``E`` experts, ``K`` experts a token, ``B`` bins. Given the scores, everything that is counted is held to
equality. The tokens of a step are cut into pieces one after the other, some of them empty: microbatches that one tally
counts, or that are dealt out to virtual ranks. ``scripts/fuzz`` runs these tests at length.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.balancers import BiasBalancer, ExactQB, HistogramQB, SignedCount, quantile, simulate_ranks
from equipoise.kernels import MarginTally, RadixTally, Routing, UniformTally, counting, route, routing
from equipoise.kernels.tally import FixedRows

FUZZ = settings.get_profile("fuzz")
Array = np.ndarray[Any, Any]
Check = Callable[[Tensor, Tensor], bool]

EXPERTS = [*range(2, 25), *range(2, 25), 33, 64, 130]
# 2049 does not fit into a block of 2048 tokens
TOKENS = [*range(41), *range(41), 2049]
# small blocks, number of pieces
PIECES = list(product([False, False, True], range(1, 5)))
NUM_BINS = [1000, 100, 10, 2, 1]
SEEDS = st.integers(0, 2**32 - 1)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def smallest_normal(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).smallest_normal


# logits [T, E] in fp64, before they are rounded to the dtype under test
VALUES: dict[str, Callable[[np.random.Generator, tuple[int, int], torch.dtype], Array]] = {
    "normal": lambda rng, shape, dtype: rng.normal(0, 2, shape),
    "ties": lambda rng, shape, dtype: rng.choice([-1.5, -0.0, 0.0, 0.25, 1.0], shape),
    "last_places": lambda rng, shape, dtype: 0.5 + rng.integers(-2, 3, shape) * torch.finfo(dtype).eps,
    "equal": lambda rng, shape, dtype: np.full(shape, rng.normal()),
    "one_expert": lambda rng, shape, dtype: rng.normal(0, 2, shape) + 30 * (np.arange(shape[1]) == shape[1] // 2),
    "rising": lambda rng, shape, dtype: np.sort(rng.normal(0, 2, shape), axis=-1),
    "falling": lambda rng, shape, dtype: -np.sort(rng.normal(0, 2, shape), axis=-1),
    "saturated": lambda rng, shape, dtype: rng.choice([-1e4, 1e4], shape),
    "saturated_in_part": lambda rng, shape, dtype: rng.choice([-1e4, -30.0, -1.0, 0.0, 20.0, 1e4], shape),
    "huge": lambda rng, shape, dtype: rng.choice([-3e38, 0.0, 3e38], shape),
    "subnormal": lambda rng, shape, dtype: rng.uniform(-1, 1, shape) * smallest_normal(dtype),
}
BIASES: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "zero": lambda rng, num_experts: np.zeros(num_experts),
    "random": lambda rng, num_experts: rng.normal(0, 0.2, num_experts),
    "ties": lambda rng, num_experts: rng.choice([-0.25, 0.0, 0.5], num_experts),
    # E3
    "wide": lambda rng, num_experts: np.where(np.arange(num_experts) == num_experts - 1, -3.0, 3.0),
}
MASKS: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "random": lambda rng, num_tokens: rng.random(num_tokens) < 0.6,
    "all_real": lambda rng, num_tokens: np.ones(num_tokens, dtype=bool),
    "all_padding": lambda rng, num_tokens: np.zeros(num_tokens, dtype=bool),
}


# what varies beside the sizes, the simplest first: drawn at once, since a draw costs as much as routing does
OPTIONS = list(product(VALUES, [None, *BIASES], [None, *MASKS], DTYPES, ["score", "logit"], ["sigmoid", "softmax"]))
BOUNDED = [options for options in OPTIONS if "score" in options]


@dataclass(frozen=True)
class Case:
    """One optimizer step of a layer; ``seed`` settles what the other fields leave open."""

    num_tokens: int
    num_experts: int
    top_k: int
    values: str
    bias: str | None
    mask: str | None
    dtype: torch.dtype
    selection: str
    gate: str
    num_pieces: int
    small_blocks: bool
    seed: int

    def fill(self) -> "Step":
        """The tensors."""
        rng = np.random.default_rng(self.seed)
        exact = VALUES[self.values](rng, (self.num_tokens, self.num_experts), self.dtype)
        largest = torch.finfo(self.dtype).max
        logits = torch.from_numpy(exact.clip(-largest, largest)).to(self.dtype)
        bias = None if self.bias is None else torch.from_numpy(BIASES[self.bias](rng, self.num_experts)).float()
        valid = None if self.mask is None else torch.from_numpy(MASKS[self.mask](rng, self.num_tokens))
        cuts = sorted(rng.integers(0, self.num_tokens + 1, self.num_pieces - 1).tolist())
        return Step(self, logits, bias, valid, cuts)

    @contextmanager
    def blocks(self) -> Iterator[None]:
        """With ``small_blocks``, every loop over blocks of the reference runs more than once."""
        if not self.small_blocks or self.num_tokens > 40:
            yield
            return
        with (
            mock.patch.object(routing, "BLOCK_TOKENS", 7),
            mock.patch.multiple(counting, BLOCK_SIZE=128, SLAB_SIZE=2**12),
            mock.patch.object(quantile, "FEW_MARGINS", 16),
        ):
            yield


@dataclass(frozen=True)
class Step:
    """Logits ``[T, E]``, bias ``[E]`` fp32, mask ``[T]``, and where one piece ends and the next begins."""

    case: Case
    logits: Tensor
    bias: Tensor | None
    valid: Tensor | None
    cuts: list[int]

    def pieces(self) -> list[tuple[Tensor, Tensor | None]]:
        """Logits ``[T_i, E]`` and mask ``[T_i]`` of every microbatch, which may be empty."""
        logits = self.logits.tensor_split(self.cuts)
        masks = [None] * len(logits) if self.valid is None else self.valid.tensor_split(self.cuts)
        return list(zip(logits, masks, strict=True))

    def old_bias(self) -> Array:
        """Bias ``[E]`` before the update."""
        return np.zeros(self.case.num_experts, dtype=np.float32) if self.bias is None else self.bias.numpy()


@st.composite
def cases(draw: st.DrawFn, options: list[tuple[Any, ...]] = OPTIONS) -> Case:
    num_tokens, num_experts = draw(st.sampled_from(TOKENS)), draw(st.sampled_from(EXPERTS))
    top_k = draw(st.integers(1, num_experts - 1))
    blocks, num_pieces = draw(st.sampled_from(PIECES))
    return Case(num_tokens, num_experts, top_k, *draw(st.sampled_from(options)), num_pieces, blocks, draw(SEEDS))


# the oracle


@dataclass(frozen=True)
class Expected:
    """What follows from the scores: experts ``[T, K]``, cutoff ``[T]``, load ``[E]``, margins ``[N, E]`` that count."""

    experts: Array
    cutoff: Array
    load: Array
    margins: Array


def expect(unbiased_TE: Array, step: Step) -> Expected:
    top_k, num_experts = step.case.top_k, step.case.num_experts
    biased = unbiased_TE if step.bias is None else unbiased_TE + step.bias.numpy()
    order = np.argsort(-biased, axis=-1, kind="stable")
    cutoff = np.take_along_axis(biased, order[:, [top_k]], axis=-1)
    experts = order[:, :top_k]
    real = slice(None) if step.valid is None else step.valid.numpy()
    load = np.bincount(experts[real].ravel(), minlength=num_experts)
    # largest minus smallest of the huge ones is infinite
    with np.errstate(over="ignore"):
        return Expected(experts, cutoff[:, 0], load, (cutoff - unbiased_TE)[real])


def exact_logs(logits: Tensor, gate: str) -> Array:
    """Logarithms ``[T, E]`` of the gate scores, fp64."""
    exact = logits.double().numpy()
    peak = exact.max(axis=-1, keepdims=True, initial=-np.inf)
    if gate == "sigmoid":
        return -np.logaddexp(0, -exact)
    return exact - peak - np.log(np.exp(exact - peak).sum(axis=-1, keepdims=True))


def exact_weights(logs_TE: Array, experts: Array, normalise: bool, scale: float) -> Array:
    chosen = np.take_along_axis(logs_TE, experts, axis=-1)
    if normalise:
        chosen = chosen - chosen.max(axis=-1, keepdims=True)
        return scale * np.exp(chosen) / np.exp(chosen).sum(axis=-1, keepdims=True)
    return scale * np.exp(chosen)


def round_to(margins: Array, dtype: torch.dtype) -> Array:
    """To fp32, and for bf16 on to 8 significant bits, halves to even, by arithmetic in fp64; no negative zero."""
    with np.errstate(over="ignore"):
        exact = margins.astype(np.float32) + np.float32(0)
    if dtype == torch.float32:
        return exact
    exact = exact.astype(np.float64)
    _, exponent = np.frexp(exact)
    spacing = np.ldexp(1.0, np.maximum(exponent, -125) - 8)
    rounded = np.rint(exact / spacing) * spacing
    # infinity has no spacing
    rounded = np.where(abs(exact) < 2.0**128, rounded, exact)
    return np.where(abs(rounded) < 2.0**128, rounded, np.copysign(np.inf, exact)).astype(np.float32) + np.float32(0)


def count_columns(bins: Array, num_bins: int) -> Array:
    """Counts ``[E, B]`` of bins ``[N, E]``."""
    counts = np.zeros((bins.shape[1], num_bins), dtype=np.int64)
    np.add.at(counts, (np.arange(bins.shape[1]), bins), 1)
    return counts


def uniform_counts(margins: Array, num_bins: int, lower: np.float32, upper: np.float32) -> tuple[Array, Array]:
    """Counts ``[E, B]`` by the multiply form, and how many margins of a column are outside, ``[E]``."""
    # what a number over a tensor is in torch: the quotient itself may differ in the last place
    scale = np.float32(1) / (upper - lower) * np.float32(num_bins)
    with np.errstate(over="ignore"):
        bins = np.floor((margins - lower) * scale).clip(0, num_bins - 1).astype(np.int64)
    return count_columns(bins, num_bins), ((margins < lower) | (margins > upper)).sum(0)


def high_bytes(margins: Array) -> Array:
    """The high byte of the key of a margin rounded to bf16: ``~bits`` if the sign is set, else ``bits | 0x8000``."""
    bits = round_to(margins, torch.bfloat16).view(np.uint32) >> 16
    return (np.where(bits >= 0x8000, 0xFFFF - bits, bits + 0x8000) >> 8).astype(np.int64)


def order_statistic(margins: Array, rank: int) -> Array:
    """The ``rank``-th smallest of every column, from 1."""
    return np.sort(margins, axis=0)[rank - 1]


def target_rank(num_tokens: int, case: Case) -> int:
    return -(-num_tokens * case.top_k // case.num_experts)


def histogram_quantile(margins: Array, case: Case, num_bins: int, bias_E: Array) -> Array:
    """``[E]`` fp64, linear inside the bin that holds the target rank; fractions from integers."""
    lower, upper = bias_E.min() - np.float32(1), bias_E.max() + np.float32(1)
    counts, _ = uniform_counts(margins, num_bins, lower, upper)
    width = (float(upper) - float(lower)) / num_bins
    target = len(margins) * case.top_k
    found = []
    for column in counts:
        upto = column.cumsum()
        bin_of_rank = int(np.argmax(upto >= target_rank(len(margins), case)))
        inside = int(column[bin_of_rank])
        before = int(upto[bin_of_rank]) - inside
        fraction = (target - before * case.num_experts) / (inside * case.num_experts)
        found.append(float(lower) + (bin_of_rank + min(max(fraction, 0.0), 1.0)) * width)
    return np.array(found)


# routing


class Uniform:
    """A uniform tally, with the bounds that HistogramQB would take or others."""

    def __init__(self, step: Step, num_bins: int, adaptive: bool) -> None:
        case, old = step.case, step.old_bias()
        lower, upper = (old.min() - np.float32(0.3)) / 3, (old.max() + np.float32(0.7)) / 3
        if adaptive:
            lower, upper = old.min() - np.float32(1), old.max() + np.float32(1)
        self.bounds = lower, upper
        # no margin of bounded scores is outside, but fp64 scores are finer than the bounds
        self.all_inside = adaptive and case.selection == "score" and case.dtype != torch.float64
        self.tally = UniformTally.zeros(case.num_experts, num_bins, torch.tensor(lower), torch.tensor(upper))

    def check(self, margins: Array) -> None:
        counts, outside = uniform_counts(margins, self.tally.counts.shape[1], *self.bounds)
        assert np.array_equal(self.tally.counts, counts)
        assert np.array_equal(self.tally.clamped, outside)
        assert not (self.all_inside and outside.any())


class Radix:
    """The high bytes."""

    def __init__(self, step: Step) -> None:
        self.tally = RadixTally(torch.zeros(step.case.num_experts, 256, dtype=torch.int32))

    def check(self, margins: Array) -> None:
        assert np.array_equal(self.tally.counts, count_columns(high_bytes(margins), 256))


class Kept:
    """The margins themselves, rounded to the dtype of the rows, in the order of the tokens."""

    def __init__(self, step: Step, dtype: torch.dtype) -> None:
        # poisoned: a row that is not written is no margin
        buffer = torch.full(step.logits.shape, torch.nan, dtype=dtype)
        self.rows = FixedRows(buffer, torch.zeros(1, dtype=torch.int64))
        self.tally = MarginTally(self.rows)

    def check(self, margins: Array) -> None:
        buffer = self.rows.buffer
        assert int(self.rows.filled) == len(margins)
        assert np.array_equal(buffer[: len(margins)].float(), round_to(margins, buffer.dtype))


TALLIES: dict[str, Callable[[Step, int], Any]] = {
    "uniform_adaptive": lambda step, num_bins: Uniform(step, num_bins, adaptive=True),
    "uniform": lambda step, num_bins: Uniform(step, num_bins, adaptive=False),
    "radix": lambda step, num_bins: Radix(step),
    "kept_bf16": lambda step, num_bins: Kept(step, torch.bfloat16),
    "kept_fp32": lambda step, num_bins: Kept(step, torch.float32),
}


def join(parts: list[Routing], name: str) -> Tensor:
    return torch.cat([getattr(part, name) for part in parts])


def unbiased_scores(parts: list[Routing], step: Step, is_close: Check) -> Array:
    """What the bias is added to, ``[T, E]``: the code's own scores, once they are known to be right."""
    scores = join(parts, "scores")
    assert is_close(scores, torch.from_numpy(np.exp(exact_logs(step.logits, step.case.gate))))
    return (scores if step.case.selection == "score" else step.logits.to(scores.dtype)).numpy()


@FUZZ
@given(
    case=cases(),
    tally=st.sampled_from(list(product(TALLIES, NUM_BINS))),
    normalise=st.booleans(),
    num_sequences=st.integers(1, 3),
)
def test_route(case: Case, tally: tuple[str, int], normalise: bool, num_sequences: int, is_close: Check) -> None:
    step = case.fill()
    name, num_bins = tally
    counted = TALLIES[name](step, num_bins)
    options = {"selection": case.selection, "gate": case.gate, "normalise": normalise, "scale": 2.5}
    parts = []
    with case.blocks():
        for logits, valid in step.pieces():
            runs = num_sequences if len(logits) % num_sequences == 0 else 1
            part = route(logits, step.bias, case.top_k, tally=counted.tally, valid=valid, num_sequences=runs, **options)
            parts.append(part)
    expected = expect(unbiased_scores(parts, step, is_close), step)
    load = sum(part.load.numpy() for part in parts)
    assert np.array_equal(join(parts, "experts"), expected.experts)
    assert np.array_equal(join(parts, "cutoff"), expected.cutoff)
    assert np.array_equal(load, expected.load)
    assert load.sum() == len(expected.margins) * case.top_k == sum(int(part.num_valid) for part in parts) * case.top_k
    assert sum(int(part.uncounted) for part in parts) == 0
    assert np.array_equal(join(parts, "valid_margins"), expected.margins)
    counted.check(expected.margins)
    weights = exact_weights(exact_logs(step.logits, case.gate), expected.experts, normalise, 2.5)
    assert is_close(join(parts, "weights"), torch.from_numpy(weights))


# bias updates

# virtual ranks, and whether the routing pass fills the tally or the balancer afterwards
RANKS = st.sampled_from(list(product(range(1, 4), [True, False])))


def next_bias(
    build: Callable[..., BiasBalancer], step: Step, num_ranks: int, in_pass: bool, is_close: Check
) -> tuple[Array, Expected]:
    """The bias ``[E]`` after one update over virtual ranks, equal on all of them, and what the routing should give."""
    case, parts = step.case, []
    ranks = [build(case.num_experts, case.top_k) for _ in range(num_ranks)]
    for balancer in ranks:
        balancer.bias.copy_(torch.from_numpy(step.old_bias()))
    with case.blocks():
        for index, (logits, valid) in enumerate(step.pieces()):
            balancer = ranks[index % num_ranks]
            tally = balancer.tally if in_pass else None
            options = {"selection": case.selection, "gate": case.gate}
            part = route(logits, balancer.bias, case.top_k, tally=tally, valid=valid, **options)
            balancer.observe(part)
            parts.append(part)
        simulate_ranks([[balancer] for balancer in ranks])
    found = ranks[0].bias.numpy()
    assert all(same_bits(balancer.bias.numpy(), found) for balancer in ranks)
    return found, expect(unbiased_scores(parts, step, is_close), step)


def same_bits(found: Array, wanted: Array) -> bool:
    return found.dtype == wanted.dtype == np.float32 and np.array_equal(found.view(np.int32), wanted.view(np.int32))


@FUZZ
@given(case=cases(), key=st.sampled_from(["bf16", "fp32"]), order=st.sampled_from(["q", "q_plus_1"]), ranks=RANKS)
def test_exact_qb(case: Case, key: str, order: str, ranks: tuple[int, bool], is_close: Check) -> None:
    step = case.fill()
    build = partial(ExactQB, key=key, order=order, centre=False)
    found, expected = next_bias(build, step, *ranks, is_close)
    margins = round_to(expected.margins, torch.bfloat16 if key == "bf16" else torch.float32)
    rank = min(target_rank(len(margins), case) + (order == "q_plus_1"), len(margins))
    wanted = order_statistic(margins, rank) if rank else step.old_bias()
    if not np.isfinite(wanted).all():
        assert same_bits(found, step.old_bias())
        return
    assert same_bits(found, wanted)
    assert not rank or (((margins < found).sum(0) < rank) & (rank <= (margins <= found).sum(0))).all()


@FUZZ
@given(case=cases(BOUNDED), num_bins=st.sampled_from(NUM_BINS), ranks=RANKS)
def test_histogram_qb(case: Case, num_bins: int, ranks: tuple[int, bool], is_close: Check) -> None:
    step = case.fill()
    old = step.old_bias()
    found, expected = next_bias(partial(HistogramQB, num_bins=num_bins, centre=False), step, *ranks, is_close)
    margins = expected.margins
    if not len(margins):
        assert same_bits(found, old)
        return
    assert same_bits(found, histogram_quantile(margins, case, num_bins, old).astype(np.float32))
    width = (old.max() - old.min() + 2) / num_bins
    assert (abs(found - order_statistic(margins, target_rank(len(margins), case))) <= width + 1e-5).all()


@FUZZ
@given(case=cases(), rule=st.sampled_from(["sign", "proportional"]), ranks=RANKS)
def test_signed_count(case: Case, rule: str, ranks: tuple[int, bool], is_close: Check) -> None:
    step = case.fill()
    old = step.old_bias()
    found, expected = next_bias(partial(SignedCount, rule=rule), step, *ranks, is_close)
    total = int(expected.load.sum())
    error = total - case.num_experts * expected.load
    moves = np.sign(error) if rule == "sign" else error / max(total, 1)
    assert same_bits(found, (old + 1e-3 * moves).astype(np.float32) if total else old)
