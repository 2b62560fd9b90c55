"""Uniform histograms against the formula in numpy. ``T`` tokens, ``E`` experts."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from equipoise.kernels import counting
from equipoise.kernels.counting import add_uniform_counts, uniform_counts

BOUNDS = [(-1.0, 1.0), (-1.3271484, 1.1), (-3e-3, 7e4), (0.1, 0.10001)]


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and slabs so small that a few thousand tokens fill many."""
    monkeypatch.setattr(counting, "BLOCK_SIZE", 1000)
    monkeypatch.setattr(counting, "SLAB_SIZE", 3000)


def naive(margins: Tensor, lower: Tensor, upper: Tensor, num_bins: int) -> tuple[np.ndarray, np.ndarray]:
    """One expert at a time, in the arithmetic of the margins."""
    values = margins.numpy()
    scale = np.float32(1) / (upper.numpy() - lower.numpy()) * np.float32(num_bins)
    with np.errstate(over="ignore", invalid="ignore"):
        bins = np.clip((values - lower.numpy()) * scale, 0, num_bins - 1).astype(np.int64)
    columns = [np.bincount(column, minlength=num_bins) for column in bins.T]
    return np.stack(columns), ((values < lower.numpy()) | (values > upper.numpy())).sum(0)


def check(margins: Tensor, lower: Tensor, upper: Tensor, num_bins: int) -> None:
    counts, outside = uniform_counts(margins, lower, upper, num_bins)
    assert counts.dtype == outside.dtype == torch.int32
    expected_counts, expected_outside = naive(margins, lower, upper, num_bins)
    assert np.array_equal(counts.numpy(), expected_counts)
    assert np.array_equal(outside.numpy(), expected_outside)


def draw(num_tokens: int, num_experts: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens + num_experts)
    return 0.4 * torch.randn(num_tokens, num_experts, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_bins", [1, 10, 1000, 40_000])
@pytest.mark.parametrize("num_experts", [2, 7, 60])
@pytest.mark.parametrize("num_tokens", [0, 1, 33, 257, 2049, 5000])
def test_counts(num_tokens: int, num_experts: int, num_bins: int, dtype: torch.dtype) -> None:
    bias = torch.linspace(-0.3, 0.2, num_experts)
    check(draw(num_tokens, num_experts, dtype), bias.min() - 1, bias.max() + 1, num_bins)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("num_bins", [10, 1000, 5000])
@pytest.mark.parametrize("num_experts", [2, 7, 60])
def test_counts_of_many_blocks(num_experts: int, num_bins: int) -> None:
    check(draw(5000, num_experts), torch.tensor(-0.5), torch.tensor(0.7), num_bins)
    check(draw(5000, num_experts), torch.tensor(-3.0), torch.tensor(3.0), num_bins)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("num_bins", [1, 3, 1000])
def test_margins_on_the_edges(num_bins: int, bounds: tuple[float, float], dtype: torch.dtype) -> None:
    lower, upper = torch.tensor(bounds[0]), torch.tensor(bounds[1])
    edges = torch.linspace(bounds[0], bounds[1], num_bins + 1, dtype=torch.float64)
    edges = torch.cat([edges.to(dtype), lower.to(dtype)[None], upper.to(dtype)[None]])
    infinity = torch.tensor(float("inf"), dtype=dtype)
    around = torch.cat([edges, torch.nextafter(edges, infinity), torch.nextafter(edges, -infinity)])
    # each alone, so that no other margin makes the whole block be looked at closely
    for value in around[:: max(1, len(around) // 100)]:
        check(value.expand(1, 2), lower, upper, num_bins)
    for value in (lower, upper, torch.nextafter(lower, -torch.inf * lower.abs()), torch.nextafter(upper, upper + 1)):
        check(value.to(dtype).expand(5, 2), lower, upper, num_bins)
    check(around[:, None].repeat(1, 3), lower, upper, num_bins)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_tokens", [5, 3000])
def test_huge_margins_and_infinities(num_tokens: int, dtype: torch.dtype) -> None:
    margins = draw(num_tokens, 7, dtype)
    margins[0] = torch.tensor([float("inf"), float("-inf"), 3e38, -3e38, 1e-45, -1e-45, -0.0])
    check(margins, torch.tensor(-1.0), torch.tensor(1.0), 1000)
    check(margins, torch.tensor(0.0), torch.tensor(3e38), 1000)


@pytest.mark.parametrize("num_tokens", [3, 5000])
def test_nan_is_refused(num_tokens: int) -> None:
    margins = draw(num_tokens, 7)
    margins[-1, 3] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        uniform_counts(margins, torch.tensor(-1.0), torch.tensor(1.0), 1000)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("num_tokens", [3, 2050])
@pytest.mark.parametrize(
    "view",
    [
        lambda margins: margins.t().contiguous().t(),
        lambda margins: torch.cat([margins, margins], 1)[:, 2:9],
        lambda margins: margins.repeat_interleave(2, 1)[:, ::2],
        lambda margins: margins[:1].expand(margins.shape),
        lambda margins: margins[:, :1].expand(margins.shape),
    ],
)
def test_counts_of_a_view(view: Callable[[Tensor], Tensor], num_tokens: int) -> None:
    margins = view(draw(num_tokens, 7))
    before = margins.clone()
    check(margins, torch.tensor(-1.0), torch.tensor(1.0), 100)
    assert torch.equal(margins, before)


@pytest.mark.parametrize("num_tokens", [0, 3, 5000])
def test_counts_are_added(num_tokens: int) -> None:
    counts, outside = torch.ones(7, 100, dtype=torch.int32), torch.ones(7, dtype=torch.int32)
    margins, lower, upper = draw(num_tokens, 7), torch.tensor(-0.5), torch.tensor(0.5)
    add_uniform_counts(counts, outside, margins, lower, upper)
    more_counts, more_outside = uniform_counts(margins, lower, upper, 100)
    assert torch.equal(counts, 1 + more_counts)
    assert torch.equal(outside, 1 + more_outside)


@pytest.mark.usefixtures("small_blocks")
def test_a_thread_of_the_pool_leaves_the_number_of_threads_alone(threads: int) -> None:
    uniform_counts(draw(5000, 60), torch.tensor(-1.0), torch.tensor(1.0), 1000)
    assert torch.get_num_threads() == threads


@pytest.mark.usefixtures("small_blocks")
@torch.inference_mode()
def test_counts_in_inference_mode() -> None:
    check(draw(5000, 60), torch.tensor(-0.5), torch.tensor(0.7), 1000)
