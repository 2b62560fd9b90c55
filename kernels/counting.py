"""Histograms of every column of a tensor, in few passes over small integers. ``T`` tokens, ``E`` experts, ``B`` bins.

The columns are taken a slab at a time, so narrow that an int16 tells the counters of the slab apart and that they stay
in the cache; the rows of a slab are taken in blocks, so that what is made of a block stays there too.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

BLOCK_SIZE = 2**18  # values of a block
SLAB_SIZE = 2**15  # counters of a slab

Item = TypeVar("Item")
Result = TypeVar("Result")


def uniform_counts(margins: Tensor, lower: Tensor, upper: Tensor, num_bins: int) -> tuple[Tensor, Tensor]:
    """Count every column into equal bins between ``lower`` and ``upper``; what lies outside is in the outermost bin.

    The bin is ``floor((margin - lower) * (1 / (upper - lower) * B))``, the factor rounded to fp32 after each operation.

    Args:
        margins: ``[T, E]`` floating point, no NaN; ``T`` may be 0.
        lower, upper: 0-dim fp32.
        num_bins: ``B``.

    Returns:
        counts ``[E, B]``, and how many margins of a column lie outside, ``[E]``; both int32.

    Raises:
        ValueError: NaN.

    >>> margins = torch.tensor([[0.0], [0.1], [7.0]])
    >>> counts, outside = uniform_counts(margins, torch.tensor(-1.0), torch.tensor(1.0), 4)
    >>> counts.tolist(), outside.tolist()
    ([[0, 0, 2, 1]], [1])
    """
    counts = torch.zeros(margins.shape[1], num_bins, dtype=torch.int32, device=margins.device)
    outside = counts.new_zeros(margins.shape[1])
    add_uniform_counts(counts, outside, margins, lower, upper)
    return counts, outside


def add_uniform_counts(counts: Tensor, outside: Tensor, margins: Tensor, lower: Tensor, upper: Tensor) -> None:
    """``uniform_counts`` added to ``counts [E, B]`` and ``outside [E]``, both int32."""
    num_bins = counts.shape[1]
    scale = (upper - lower).reciprocal_().mul_(num_bins)
    # below it, no rounding of the scale and of a product can hide a margin that is outside
    safe = num_bins * (1 - 8 * max(torch.finfo(margins.dtype).eps, torch.finfo(torch.float32).eps))

    def to_bins(block: Tensor, columns: slice, dtype: torch.dtype) -> Tensor:
        scaled = (block - lower).mul_(scale)
        smallest, largest = (bound.item() for bound in scaled.aminmax())
        if smallest != smallest:
            raise ValueError("NaN has no bin: got NaN among the margins")
        if smallest > 0 and largest < safe:
            return scaled.to(dtype)
        outside[columns] += ((block < lower) | (block > upper)).sum(0)
        return scaled.clamp_(0, num_bins - 1).to(dtype)

    def count(block: Tensor, columns: slice) -> Tensor:
        return count_bins(to_bins(block, columns, index_dtype(block.shape[1], num_bins)), num_bins)

    if not margins.numel():
        return
    if margins.numel() > counts.numel() or not counts.is_contiguous():
        counts += count_blocks(margins, num_bins, count)
        return
    # fewer margins than counters: most of these are not touched
    index = number(to_bins(margins, slice(None), torch.int64), num_bins).flatten()
    counts.view(-1).scatter_add_(0, index, counts.new_ones(()).expand(len(index)))


def count_blocks(values: Tensor, num_bins: int, count: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """Sum and join what ``count(block, columns)`` gives for the blocks of ``values [T, E]``.

    Returns:
        ``[E, num_bins]`` int32.
    """
    num_rows, num_columns = values.shape
    threads = worth_threads(values)
    num_slabs = -(-num_columns // max(1, SLAB_SIZE // num_bins))
    # as many for each thread
    num_slabs = -(-num_slabs // threads) * threads
    width = -(-num_columns // num_slabs)
    height = max(1, BLOCK_SIZE // width)

    def count_slab(left: int) -> Tensor:
        columns = slice(left, left + width)
        counts = count(values[:height, columns], columns)
        for top in range(height, num_rows, height):
            counts += count(values[top : top + height, columns], columns)
        return counts.int()

    slabs = run_in_threads(count_slab, range(0, num_columns, width), threads)
    return slabs[0] if len(slabs) == 1 else torch.cat(slabs)


def worth_threads(values: Tensor) -> int:
    """How many threads may share out the blocks of ``values``; 1 for a single block, and on another device."""
    return torch.get_num_threads() if values.device.type == "cpu" and values.numel() > BLOCK_SIZE else 1


def run_in_threads(call: Callable[[Item], Result], items: Iterable[Item], threads: int) -> list[Result]:
    """``[call(item) for item in items]``, with ``threads`` of them at a time, each on one core."""
    if threads == 1:
        return [call(item) for item in items]
    # a mode of the calling thread, and counters made in it may be changed in no other
    inference = torch.is_inference_mode_enabled()

    def run(item: Item) -> Result:
        with torch.inference_mode(inference):
            return call(item)

    return list(_pool(os.getpid(), threads).map(run, items))


@lru_cache(maxsize=1)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads that take one item after the other; a forked process makes its own.

    They beat torch's threads, which would share out each small operation and wait for one another in between.
    """
    started = Barrier(threads)

    def start() -> None:
        # of this thread, once asked for; and what threads that come later start from
        torch.set_num_threads(1)
        torch.get_num_threads()
        started.wait()

    pool = ThreadPoolExecutor(threads, "counting")
    for started_thread in [pool.submit(start) for _ in range(threads)]:
        started_thread.result()
    torch.set_num_threads(threads)
    return pool


def index_dtype(width: int, num_bins: int) -> torch.dtype:
    """The narrowest integers that number the counters of ``width`` columns."""
    return torch.int16 if width * num_bins <= SLAB_SIZE else torch.int32


def count_bins(bins: Tensor, num_bins: int, first: int = 0) -> Tensor:
    """Histogram per column.

    Args:
        bins: ``[T, E]`` int16 or int32 in ``[first, first + num_bins)``; overwritten.

    Returns:
        ``[E, num_bins]`` int64.
    """
    width = bins.shape[1]
    index = number(bins, num_bins, first).flatten()
    return torch.bincount(index, minlength=width * num_bins).view(width, num_bins)


def number(bins: Tensor, num_bins: int, first: int = 0) -> Tensor:
    """Turn bins, in place, into the numbers of their counters in ``[E, num_bins]``."""
    return bins.add_(_offsets(bins.shape[1], num_bins, first, bins.dtype, bins.device))


@lru_cache(maxsize=64)
def _offsets(width: int, num_bins: int, first: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Where the counters of each column start."""
    return torch.arange(-first, width * num_bins - first, num_bins, device=device).to(dtype)
