"""Tallies against a NumPy histogram. ``T`` tokens, ``E`` experts, ``B`` bins."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from equipoise.kernels import RadixTally, UniformTally, radix_counts, route, to_key


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
