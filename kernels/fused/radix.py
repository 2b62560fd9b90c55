"""Radix counting of float keys and the selection of a bin. ``R`` rows, ``E`` experts, ``W`` bits of a key (16 or 32).

**Highest byte.** It holds the sign and seven bits of the exponent, so the margins of an expert fall into a dozen of
the 256 bins: atomics would queue at a few addresses. So the 16 bins of magnitudes from 2**-13 to 8 are counted in
registers: eight fields of four bits in a word for each sign, 15 rows to a word, then widened to eight bits; only the
rest goes to memory as it comes. The bytes are counted as they lie in memory and put into key order when a program
writes its counts.

**Lower bytes.** Only keys under the prefix count, spread over 256 bins: one atomic each.

Counters are ``[E, 256]`` of any strides; lanes hold neighbouring experts, so ``[256, E]`` in memory is the layout that
lets one memory sector serve several lanes. Integer additions: the counts do not depend on the order. NaN is not
counted.

Cost on a GPU: ``R*E*W/8`` bytes read per pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .numerics import INTERPRETED, launch, to_key

# rows that fit the four-bit fields, and how often those fit the eight-bit ones that a program keeps (at most 17)
ROWS_PER_WORD = 15
WORDS_PER_PROGRAM = 2
KEYS_PER_TILE = 1 << 13 if INTERPRETED else 256
EXPERTS_PER_PROGRAM = 1024 if INTERPRETED else 64
EXPERTS_PER_SELECTION = 256 if INTERPRETED else 4
KEYS_PER_PROGRAM = 1 << 15 if INTERPRETED else 1024
# the seven exponent bits of the first bin that is counted in registers: magnitudes from 2**-13
WINDOW = 0x39


@triton.jit
def _load_bits(values_ptr, rows, offs_e, mask, E: tl.constexpr, WIDTH: tl.constexpr):
    """Bits of the values, uint32 (bf16 in the low half); NaN where there is none."""
    if WIDTH == 16:
        return tl.load(values_ptr + rows * E + offs_e, mask=mask, other=0x7FFF).to(tl.uint32) & 0xFFFF
    else:
        return tl.load(values_ptr + rows * E + offs_e, mask=mask, other=0x7FFFFFFF).to(tl.uint32, bitcast=True)


@triton.jit
def _is_number(bits, WIDTH: tl.constexpr):
    """True for all bits but those of NaN."""
    if WIDTH == 16:
        return (bits & 0x7FFF) <= 0x7F80
    else:
        return (bits & 0x7FFFFFFF) <= 0x7F800000


@triton.jit(do_not_specialize=["num_rows"])
def _count_highest_kernel(
    values_ptr,
    limit_ptr,
    counts_ptr,
    num_rows,
    stride_expert,
    stride_bin,
    E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    offs_e = (tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E))[None, :]
    mask_e = offs_e < E
    end = tl.minimum(tl.load(limit_ptr), num_rows) if limit_ptr is not None else num_rows
    zeros = tl.zeros([BLOCK_R, BLOCK_E], tl.uint32)
    positive_even, positive_odd, negative_even, negative_odd = zeros, zeros, zeros, zeros
    for word in range(WORDS):
        both = zeros
        negative = zeros
        first = (tl.program_id(0) * WORDS + word).to(tl.int64) * (ROWS * BLOCK_R)
        num_tiles = tl.minimum(tl.cdiv(tl.maximum(end - first, 0), BLOCK_R), ROWS)
        for tile in range(num_tiles):
            rows = (first + tile * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
            bits = _load_bits(values_ptr, rows, offs_e, (rows < end) & mask_e, E, WIDTH)
            exponent = ((bits >> (WIDTH - 8)) & 127) - WINDOW
            # below the window the difference wraps to a large number
            inside = exponent < 8
            one = tl.where(inside, (zeros + 1) << ((exponent & 7) * 4), 0).to(tl.uint32)
            both += one
            negative += tl.where(bits >> (WIDTH - 1) != 0, one, 0).to(tl.uint32)
            if tl.max((inside == 0).to(tl.int32)) > 0:
                bin = (to_key(bits, WIDTH) >> (WIDTH - 8)).to(tl.int32)
                address = counts_ptr + offs_e * stride_expert + bin * stride_bin
                tl.atomic_add(address, 1, mask=(inside == 0) & _is_number(bits, WIDTH), sem="relaxed")
        positive = both - negative
        positive_even += positive & 0x0F0F0F0F
        positive_odd += (positive >> 4) & 0x0F0F0F0F
        negative_even += negative & 0x0F0F0F0F
        negative_odd += (negative >> 4) & 0x0F0F0F0F
    address = counts_ptr + (tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)) * stride_expert
    for field in tl.static_range(8):
        positive = positive_odd if field % 2 else positive_even
        negative = negative_odd if field % 2 else negative_even
        count = tl.sum(((positive >> (8 * (field // 2))) & 255).to(tl.int32), axis=0)
        tl.atomic_add(address + (128 + WINDOW + field) * stride_bin, count, mask=count > 0, sem="relaxed")
        count = tl.sum(((negative >> (8 * (field // 2))) & 255).to(tl.int32), axis=0)
        tl.atomic_add(address + (127 - WINDOW - field) * stride_bin, count, mask=count > 0, sem="relaxed")


@triton.jit(do_not_specialize=["num_rows"])
def _count_lower_kernel(
    values_ptr,
    limit_ptr,
    prefix_ptr,
    counts_ptr,
    num_rows,
    stride_expert,
    stride_bin,
    E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    WIDTH: tl.constexpr,
    BYTE: tl.constexpr,
):
    offs_e = (tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E))[None, :]
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    end = tl.minimum(tl.load(limit_ptr), num_rows) if limit_ptr is not None else num_rows
    mask = (rows < end) & (offs_e < E)
    bits = _load_bits(values_ptr, rows, offs_e, mask, E, WIDTH)
    key = to_key(bits, WIDTH)
    SHIFT: tl.constexpr = WIDTH - 8 * BYTE
    prefix = tl.load(prefix_ptr + offs_e, mask=offs_e < E, other=0).to(tl.uint32)
    under = ((key >> SHIFT) == prefix) & _is_number(bits, WIDTH)
    bin = ((key >> (SHIFT - 8)) & 255).to(tl.int32)
    tl.atomic_add(counts_ptr + offs_e * stride_expert + bin * stride_bin, 1, mask=under, sem="relaxed")


@triton.jit
def _select_kernel(
    counts_ptr,
    prefix_ptr,
    rank_ptr,
    longer_ptr,
    left_ptr,
    stride_expert,
    stride_bin,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    offs_e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    mask_e = offs_e < E
    bins = tl.arange(0, 256)[None, :]
    address = counts_ptr + offs_e[:, None] * stride_expert + bins * stride_bin
    counts = tl.load(address, mask=mask_e[:, None], other=0).to(tl.int64)
    rank = tl.load(rank_ptr + offs_e, mask=mask_e, other=0)
    below = tl.cumsum(counts, axis=1) < rank[:, None]
    chosen = tl.sum(below.to(tl.int64), axis=1)
    before = tl.sum(tl.where(below, counts, 0), axis=1)
    if prefix_ptr is not None:
        chosen += tl.load(prefix_ptr + offs_e, mask=mask_e, other=0) << 8
    tl.store(longer_ptr + offs_e, chosen, mask=mask_e)
    tl.store(left_ptr + offs_e, rank - before, mask=mask_e)


def count_highest(values: Tensor, counts: Tensor, num_rows: int, limit: Tensor | None = None) -> None:
    """Add the counts of the highest key byte to ``counts [E, 256]`` int32.

    Args:
        values: ``[num_rows, E]`` bf16 or fp32, contiguous.
        counts: any strides.
        num_rows: rows to read.
        limit: ``[1]`` int64, how many of them are in use; None for all.
    """
    num_experts = values.shape[1]
    block_experts = min(EXPERTS_PER_PROGRAM, triton.next_power_of_2(num_experts))
    block_rows = KEYS_PER_TILE // block_experts
    rows_per_program = block_rows * ROWS_PER_WORD * WORDS_PER_PROGRAM
    launch(
        _count_highest_kernel,
        # of the second dimension there may be 65,535 only
        (triton.cdiv(num_rows, rows_per_program), triton.cdiv(num_experts, block_experts)),
        values,
        _as_bits(values),
        limit,
        counts,
        num_rows,
        counts.stride(0),
        counts.stride(1),
        E=num_experts,
        BLOCK_R=block_rows,
        BLOCK_E=block_experts,
        WIDTH=8 * values.dtype.itemsize,
        WINDOW=WINDOW,
        ROWS=ROWS_PER_WORD,
        WORDS=WORDS_PER_PROGRAM,
        num_warps=1,
    )


def radix_counts(values: Tensor, prefix: Tensor | None, byte: int, num_rows: Tensor | None) -> Tensor:
    """Launch the pass; arguments and result are those of the op ``equipoise::radix_counts``."""
    capacity, num_experts = values.shape
    values = values.contiguous()
    counts = torch.zeros(256, num_experts, dtype=torch.int32, device=values.device).t()
    if prefix is None:
        count_highest(values, counts, capacity, num_rows)
        return counts
    block_experts = min(256, triton.next_power_of_2(num_experts))
    block_rows = KEYS_PER_PROGRAM // block_experts
    launch(
        _count_lower_kernel,
        (triton.cdiv(capacity, block_rows), triton.cdiv(num_experts, block_experts)),
        values,
        _as_bits(values),
        num_rows,
        prefix.contiguous(),
        counts,
        capacity,
        counts.stride(0),
        counts.stride(1),
        E=num_experts,
        BLOCK_R=block_rows,
        BLOCK_E=block_experts,
        WIDTH=8 * values.dtype.itemsize,
        BYTE=byte,
        num_warps=4,
    )
    return counts


def select_rank(counts: Tensor, prefix: Tensor | None, rank: Tensor) -> tuple[Tensor, Tensor]:
    """Launch the selection; arguments and results are those of ``kernels.select_rank``."""
    num_experts = counts.shape[0]
    longer = torch.empty(num_experts, dtype=torch.int64, device=counts.device)
    left = torch.empty_like(longer)
    launch(
        _select_kernel,
        (triton.cdiv(num_experts, EXPERTS_PER_SELECTION),),
        counts,
        counts,
        None if prefix is None else prefix.contiguous(),
        rank.long().contiguous(),
        longer,
        left,
        counts.stride(0),
        counts.stride(1),
        E=num_experts,
        BLOCK_E=EXPERTS_PER_SELECTION,
        num_warps=4,
    )
    return longer, left


def _as_bits(values: Tensor) -> Tensor:
    return values.view(torch.int16 if values.dtype == torch.bfloat16 else torch.int32)
