"""The radix kernels against the reference. ``T`` rows, ``E`` experts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise.kernels import from_key, radix_counts, select_rank, target_rank

On = Callable[[str], Any]

SHAPES = [(T, E) for T in (0, 1, 33, 257) for E in (2, 7, 8, 60, 256, 512)] + [(33, 1024), (5000, 8)]
NUM_PASSES = {torch.bfloat16: 2, torch.float32: 4}


def draw(kind: str, num_rows: int, num_experts: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    normal = torch.randn(num_rows, num_experts, generator=generator)
    if kind == "margins":
        values = normal * 0.3
    elif kind == "all_magnitudes":
        values = normal * torch.exp(25 * torch.randn(num_rows, num_experts, generator=generator))
        values[::5] = float("inf")
        values[1::5] = float("-inf")
    elif kind == "zeros":
        values = torch.zeros(num_rows, num_experts)
        values[::2] = -0.0
    else:
        values = torch.randint(-3, 3, (num_rows, num_experts), generator=generator).float()
    return values.to(device, dtype)


@pytest.mark.parametrize("dtype", NUM_PASSES)
@pytest.mark.parametrize("kind", ["margins", "all_magnitudes", "zeros", "ties"])
def test_every_pass_and_selection(kind: str, dtype: torch.dtype, on: On, device: str, poisoned: None) -> None:
    for num_rows, num_experts in SHAPES if kind == "margins" else [(33, 7), (257, 60)]:
        values = draw(kind, num_rows, num_experts, dtype, device)
        prefix = None
        rank = target_rank(torch.full((num_experts,), num_rows, device=device), 1, 2)
        for byte in range(NUM_PASSES[dtype]):
            with on("torch"):
                expected = radix_counts(values, prefix, byte)
                expected_choice = select_rank(expected, prefix, rank)
            with on("triton"):
                counts = radix_counts(values, prefix, byte)
                choice = select_rank(counts, prefix, rank)
            assert (counts.dtype, counts.shape) == (expected.dtype, expected.shape)
            assert torch.equal(counts, expected), (num_rows, num_experts, byte)
            assert torch.equal(choice[0], expected_choice[0])
            assert torch.equal(choice[1], expected_choice[1])
            prefix, rank = choice
        if num_rows:
            assert prefix is not None
            ordered = values.float().sort(0).values
            assert torch.equal(from_key(prefix, dtype), ordered[(num_rows + 1) // 2 - 1] + 0.0)


@pytest.mark.parametrize("dtype", NUM_PASSES)
def test_several_programs(dtype: torch.dtype, on: On, device: str, small_programs: None) -> None:
    values = draw("margins", 257, 60, dtype, device)
    prefix = None
    rank = torch.full((60,), 100, device=device)
    for byte in range(NUM_PASSES[dtype]):
        with on("torch"):
            expected = radix_counts(values, prefix, byte)
        with on("triton"):
            assert torch.equal(radix_counts(values, prefix, byte), expected)
        prefix, rank = select_rank(expected, prefix, rank)


@pytest.mark.parametrize("dtype", NUM_PASSES)
def test_only_rows_in_use_and_no_nan(dtype: torch.dtype, on: On, device: str) -> None:
    values = draw("margins", 100, 7, dtype, device)
    buffer = torch.full((300, 7), 0.25, dtype=dtype, device=device)
    buffer[:100] = values
    # tokens that do not count
    buffer[100:120] = float("nan")
    buffer[110:120] = -buffer[110:120]
    in_use = torch.tensor([120], device=device)
    with on("torch"):
        first = radix_counts(values, None, 0)
        prefix, _ = select_rank(first, None, torch.full((7,), 40, device=device))
        second = radix_counts(values, prefix, 1)
    with on("triton"):
        assert torch.equal(radix_counts(buffer, None, 0, in_use), first)
        assert torch.equal(radix_counts(buffer, prefix, 1, in_use), second)
        # more in use than there is room for: a graph that was replayed too often
        assert radix_counts(buffer, None, 0, in_use + 1000).sum() == 280 * 7


def test_counts_of_many_shards_select_as_int64(on: On, device: str) -> None:
    counts = torch.zeros(7, 256, dtype=torch.int64, device=device)
    counts[:, 3] = 2**40
    counts[:, 200] = 5
    rank = torch.tensor([1, 2, 2**40, 2**40 + 1, 2**40 + 5, 7, 0], device=device)
    prefix = torch.arange(7, device=device)
    with on("torch"):
        expected = select_rank(counts, prefix, rank)
    with on("triton"):
        actual = select_rank(counts, prefix, rank)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])
