"""Tallies against a NumPy histogram. ``T`` tokens, ``E`` experts, ``B`` bins."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from equipoise.kernels import CutTally, FixedScale, RadixTally, UniformTally, WindowTally, radix_counts, route, to_key


def uniform(num_experts: int, num_bins: int, lower: float = -1.0, upper: float = 1.0) -> UniformTally:
    return UniformTally.zeros(num_experts, num_bins, torch.tensor(lower), torch.tensor(upper))


def radix(num_experts: int) -> RadixTally:
    return RadixTally(torch.zeros(num_experts, 256, dtype=torch.int32))


def numpy_counts(margins: Tensor, num_bins: int, lower: float, upper: float) -> np.ndarray[Any, Any]:
    """The multiply form, in fp32 as it stands in the definition."""
    low, high = np.float32(lower), np.float32(upper)
    bins = np.floor((margins.numpy() - low) * (np.float32(num_bins) / (high - low)))
    counts = np.zeros((margins.shape[1], num_bins), dtype=np.int64)
    for expert in range(margins.shape[1]):
        np.add.at(counts[expert], np.clip(bins[:, expert], 0, num_bins - 1).astype(int), 1)
    return counts


@pytest.mark.parametrize("num_experts", [2, 7, 256])
def test_first_step_puts_margin_zero_into_the_middle_bin(num_experts: int) -> None:
    # E5: b = 0, B = 1000, range [-1, 1]
    tally = uniform(num_experts, 1000)
    tally.add(torch.zeros(33, num_experts))
    assert tally.counts[:, 500].tolist() == [33] * num_experts
    assert tally.counts.sum() == 33 * num_experts
    assert tally.clamped.sum() == 0


def test_first_step_through_the_routing() -> None:
    # all scores equal: every margin is 0
    tally = uniform(8, 1000)
    route(torch.full((2500, 8), 0.3), torch.zeros(8), 2, tally=tally)
    assert tally.counts[:, 500].tolist() == [2500] * 8


@pytest.mark.parametrize(("lower", "upper"), [(-1.0, 1.0), (-1.25, 1.3), (-4.1, 3.7), (0.1, 0.2)])
@pytest.mark.parametrize("num_bins", [1, 10, 1000])
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(0, 7), (1, 1), (33, 7), (3000, 60)])
def test_uniform_counts(num_tokens: int, num_experts: int, num_bins: int, lower: float, upper: float) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    margins = torch.rand(num_tokens, num_experts, generator=generator) * (upper - lower) + lower
    # on the edges of bins, and beyond the range
    margins[::3] = lower + (upper - lower) * torch.arange(num_experts) / max(num_bins, 10)
    margins[5::50] = upper + 1
    tally = uniform(num_experts, num_bins, lower, upper)
    tally.add(margins)
    assert np.array_equal(tally.counts.numpy(), numpy_counts(margins, num_bins, lower, upper))
    outside = (margins < torch.tensor(lower)) | (margins > torch.tensor(upper))
    assert tally.clamped.tolist() == outside.sum(0).tolist()


def test_margins_outside_go_to_the_outermost_bin_and_are_counted_apart() -> None:
    below, above = torch.tensor(-1.0).nextafter(torch.tensor(-2.0)), torch.tensor(1.0).nextafter(torch.tensor(2.0))
    columns = [
        [-1.0, -1.0, 1.0, 1.0],
        [below, -3.0, -1e30, float("-inf")],
        [above, 3.0, 1e30, float("inf")],
        [0.5, 2.0, -2.0, 0.99],
    ]
    tally = uniform(4, 10)
    tally.add(torch.tensor(columns).t())
    assert tally.counts[:, 0].tolist() == [2, 4, 0, 1]
    assert tally.counts[:, 9].tolist() == [2, 0, 4, 2]
    assert tally.clamped.tolist() == [0, 4, 4, 2]
    assert tally.counts.sum(-1).tolist() == [4] * 4


@pytest.mark.parametrize(("num_tokens", "num_experts"), [(0, 7), (1, 1), (33, 7), (2500, 60)])
def test_radix_tally_counts_the_high_byte_of_bf16(num_tokens: int, num_experts: int) -> None:
    margins = torch.randn(num_tokens, num_experts)
    tally = radix(num_experts)
    tally.add(margins)
    assert torch.equal(tally.counts, radix_counts(margins.bfloat16(), None, 0))
    high = to_key(margins.bfloat16()) >> 8
    for expert in range(num_experts):
        assert tally.counts[expert].tolist() == torch.bincount(high[:, expert], minlength=256).tolist()


def test_radix_tally_refuses_nan() -> None:
    tally = radix(2)
    with pytest.raises(ValueError, match="NaN"):
        tally.add(torch.tensor([[0.0, float("nan")]]))
    assert tally.counts.sum() == 0


@pytest.mark.parametrize("tally", [uniform(7, 100), radix(7)], ids=["uniform", "radix"])
def test_counts_accumulate_where_they_are(tally: UniformTally | RadixTally) -> None:
    # E14: a CUDA graph keeps the address
    address = tally.counts.data_ptr()
    batches = [torch.randn(num_tokens, 7) for num_tokens in (33, 0, 2049)]
    for logits in batches:
        route(logits, None, 2, tally=tally)
    assert tally.counts.data_ptr() == address
    assert tally.counts.dtype == torch.int32
    assert tally.counts.sum(-1).tolist() == [33 + 2049] * 7


def test_an_empty_tally() -> None:
    tally = uniform(7, 100)
    assert (tally.counts.shape, tally.counts.dtype) == ((7, 100), torch.int32)
    assert (tally.clamped.shape, tally.clamped.dtype) == ((7,), torch.int32)
    assert tally.counts.sum() == tally.clamped.sum() == 0


def test_clamped_margins_are_counted_by_the_routing() -> None:
    # E3: the fixed range misses what the range around the bias holds
    bias = torch.tensor([3.0, 3.0, 3.0, -3.0])
    logits = torch.randn(257, 4, generator=torch.Generator().manual_seed(0))
    fixed, adaptive = uniform(4, 100), uniform(4, 100, -4.0, 4.0)
    for tally in (fixed, adaptive):
        routing = route(logits, bias, 2, tally=tally)
    margins = routing.margins
    assert adaptive.clamped.sum() == 0
    assert fixed.clamped.tolist() == ((margins < -1) | (margins > 1)).sum(0).tolist()
    assert (fixed.clamped == 257).all()
    assert fixed.counts[:, 99].tolist() == [257] * 4


@pytest.mark.parametrize("selection", ["score", "logit"])
def test_clamped_tokens_of_the_mask_do_not_count(selection: str) -> None:
    valid = torch.arange(257) % 2 == 0
    tally = uniform(4, 10, 0.0, 0.1)
    logits = torch.randn(257, 4, generator=torch.Generator().manual_seed(0))
    routing = route(logits, None, 1, tally=tally, valid=valid, selection=selection)
    margins = routing.valid_margins
    assert tally.clamped.tolist() == ((margins < 0) | (margins > torch.tensor(0.1))).sum(0).tolist()
    assert tally.clamped.sum() > 0


def test_counts_may_lie_bin_by_bin() -> None:
    margins = torch.rand(5, 7, generator=torch.Generator().manual_seed(0)) * 2 - 1
    expected = uniform(7, 100)
    expected.add(margins)
    counts = torch.zeros(100, 7, dtype=torch.int32).t()
    UniformTally(counts, torch.zeros(7, dtype=torch.int32), expected.lower, expected.upper).add(margins)
    assert torch.equal(counts, expected.counts)
    assert counts.sum() == 35


def window(first: Tensor, scale: FixedScale | None) -> WindowTally:
    return WindowTally(torch.zeros(len(first), 256, dtype=torch.int32), first, scale)


SCALES = {"bf16": None, **{f"fixed{bits}": (-1.0, 1.25, bits) for bits in (8, 12, 16)}}


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(0, 7), (1, 1), (33, 7), (3000, 60)])
def test_window_counts(num_tokens: int, num_experts: int, name: str) -> None:
    bounds = SCALES[name]
    scale = bounds and FixedScale.of_bits(torch.tensor(bounds[0]), torch.tensor(bounds[1]), bounds[2])
    generator = torch.Generator().manual_seed(num_tokens)
    margins = torch.rand(num_tokens, num_experts, generator=generator) * 2.25 - 1
    # both zeros, and the ends of the range
    margins[::3], margins[1::5], margins[2::7], margins[3::11] = 0.0, -0.0, -1.0, 1.25
    keys = to_key(margins.bfloat16()) if scale is None else scale.to_level(margins).long()
    centre = to_key(torch.zeros(num_experts).bfloat16()) if scale is None else scale.to_level(torch.zeros(num_experts))
    first = centre.long() - torch.arange(num_experts) % 300
    tally, by_rows = window(first, scale), window(first, scale)
    tally.add(margins)
    by_rows.add_rows(margins.bfloat16() if scale is None else scale.to_code(margins))
    expected = torch.zeros(num_experts, 256, dtype=torch.int64)
    for expert in range(num_experts):
        bins = (keys[:, expert] - first[expert] + 1).clamp(0, 255)
        expected[expert] = torch.bincount(bins, minlength=256)
    assert torch.equal(tally.counts.long(), expected)
    assert torch.equal(by_rows.counts, tally.counts)


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize(("num_experts", "top_k", "num_tokens"), [(60, 4, 70), (8, 2, 1), (8, 2, 0)])
def test_window_of_the_kernel_counts_as_the_reference(
    num_experts: int, top_k: int, num_tokens: int, name: str, monkeypatch: pytest.MonkeyPatch, interpreter: None
) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(num_tokens, num_experts, generator=generator)
    bias = torch.randn(num_experts, generator=generator) * 0.1
    valid = torch.rand(num_tokens, generator=generator) > 0.2
    bounds = SCALES[name]
    scale = bounds and FixedScale.of_bits(bias.min() - 1, bias.max() + 1, bounds[2])
    first = (to_key(bias.bfloat16()) if scale is None else scale.to_level(bias).long()) - 127
    found = []
    for backend in ("torch", "triton"):
        monkeypatch.setenv("EQUIPOISE_KERNELS", backend)
        tally = window(first, scale)
        route(logits, bias, top_k, tally=tally, valid=valid, exact=True)
        # what is there already stays
        route(logits, bias, top_k, tally=tally, exact=True)
        found.append(tally.counts)
    assert torch.equal(*found)
    assert found[0].sum() == (valid.sum() + num_tokens) * num_experts


class Pairs:
    """What a cut lets through."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.experts: list[int] = []

    def append(self, values: Tensor, experts: Tensor) -> None:
        self.values += values.tolist()
        self.experts += experts.tolist()


@pytest.mark.parametrize("num_tokens", [0, 1, 5000])
def test_cut_takes_what_is_at_most_the_cut(num_tokens: int) -> None:
    logits = torch.randn(num_tokens, 6, generator=torch.Generator().manual_seed(0))
    valid = torch.arange(num_tokens) % 4 != 1
    bias, pairs = torch.linspace(-0.1, 0.1, 6), Pairs()
    tally = CutTally(pairs, bias + 0.01, lambda margins: margins)
    routing = route(logits, bias, 2, tally=tally, valid=valid)
    kept = routing.margins <= tally.cut
    kept &= valid[:, None]
    assert pairs.experts == kept.nonzero()[:, 1].tolist()
    assert pairs.values == routing.margins[kept].tolist()


def test_a_tally_for_other_experts_is_refused() -> None:
    for tally in (window(torch.zeros(5, dtype=torch.int64), None), CutTally(Pairs(), torch.zeros(5), torch.clone)):
        with pytest.raises(ValueError, match="tally counts 5 experts, the logits have 6"):
            route(torch.zeros(3, 6), None, 2, tally=tally)
