"""Radix selection: the exact order statistic of every column from byte counts, without sorting.

``T`` tokens, ``E`` experts. A float is mapped to an unsigned key with the same order (``to_key``). One pass counts
one byte of the keys that share a prefix (``radix_counts``); the counts may be summed over any number of token
shards; then the bin that holds the wanted rank is picked (``select_rank``) and becomes the next byte of the prefix.
Two passes give an exact bf16, four an exact fp32 value: 256 counters per expert and pass, whatever ``T`` is.

On the CPU the bytes are counted as they lie in memory, in cache-sized blocks (see ``counting``), and the 256 counters
are put into key order afterwards: no arithmetic per element for the order.
"""

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .backend import use_triton
from .counting import count_bins, count_blocks
from .library import define_op

# tokens that the routing reference takes at a time, so that the temporaries of a block stay in the cache
BLOCK_TOKENS = 2048

_BITS_DTYPE = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
# 256 values of a byte, and one bin on each side for what lies below and above
_NUM_BINS = 258


def num_passes(dtype: torch.dtype) -> int:
    """Number of byte passes that settle a key: 2 for bf16, 4 for fp32."""
    if dtype not in _BITS_DTYPE:
        raise ValueError(f"radix keys are made from bfloat16 or float32, not {dtype}")
    return dtype.itemsize


def to_key(values: Tensor) -> Tensor:
    """Map floats to integers of the same order: ``~bits`` if the sign is set, else ``bits | sign bit``; -0.0 counts
    as +0.0.

    Args:
        values: any shape, bf16 or fp32, no NaN.

    Returns:
        int64, in ``[0, 2**16)`` for bf16 and ``[0, 2**32)`` for fp32.

    Raises:
        ValueError: NaN, or another dtype.

    >>> to_key(torch.tensor([-1.0, -0.0, 0.0, 1.0], dtype=torch.bfloat16)).tolist()
    [16511, 32768, 32768, 49024]
    """
    num_passes(values.dtype)
    _refuse_nan(values)
    return to_key_unchecked(values)


def to_key_unchecked(values: Tensor) -> Tensor:
    """``to_key`` of what is known to hold no NaN."""
    width = 8 * num_passes(values.dtype)
    bits = (values + 0.0).view(_BITS_DTYPE[values.dtype]).long()
    return torch.where(bits < 0, ~bits, bits | (1 << (width - 1))) & ((1 << width) - 1)


def from_key(key: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of ``to_key``: int64 keys back to fp32 values (a bf16 value is exact in fp32).

    Key 0 is a NaN: what ``select_rank`` arrives at where nothing was counted.

    >>> from_key(to_key(torch.tensor([-0.24, 0.37])), torch.float32)
    tensor([-0.2400,  0.3700])
    """
    width = 8 * num_passes(dtype)
    sign = 1 << (width - 1)
    bits = torch.where(key >= sign, key ^ sign, ~key)
    return bits.to(_BITS_DTYPE[dtype]).view(dtype).float()


def radix_counts(values: Tensor, prefix: Tensor | None, byte: int, num_rows: Tensor | None = None) -> Tensor:
    """Count byte ``byte`` (0 = highest) of the keys of every column among the keys that start with ``prefix``.

    Args:
        values: ``[T, E]`` bf16 or fp32, no NaN; ``T`` may be 0.
        prefix: ``[E]`` int64, the ``byte`` bytes above as ``select_rank`` gave them; None for byte 0.
        byte: which byte of the key, from the most significant.
        num_rows: ``[1]`` int64, how many of the rows are in use; None for all.

    Returns:
        ``[E, 256]`` int32 in key order.

    Raises:
        ValueError: a dtype without keys, a byte outside the key, a prefix that does not fit the byte, NaN.

    >>> values = torch.tensor([[1.0], [-1.0], [1.0]], dtype=torch.bfloat16)
    >>> radix_counts(values, None, 0)[0].nonzero().flatten().tolist()
    [64, 191]
    """
    passes = num_passes(values.dtype)
    if values.dim() != 2:
        raise ValueError(f"values must be [tokens, experts], got shape {tuple(values.shape)}")
    if not 0 <= byte < passes:
        raise ValueError(f"a {values.dtype} key has bytes 0 to {passes - 1}, got byte {byte}")
    if (prefix is None) != (byte == 0):
        raise ValueError(
            f"byte {byte} takes {'no prefix' if byte == 0 else 'the prefix of the bytes above'}, got {prefix}"
        )
    run = _radix_counts if torch.compiler.is_compiling() else _run
    return run(values, prefix, byte, num_rows)


def _run(values: Tensor, prefix: Tensor | None, byte: int, num_rows: Tensor | None) -> Tensor:
    if use_triton(values):
        from .fused.radix import radix_counts as launch

        return launch(values, prefix, byte, num_rows)
    return _count_byte(values if num_rows is None else values[: int(num_rows)], prefix, byte)


def _shape(values: Tensor, *args: Any) -> Tensor:
    counts = values.new_empty(values.shape[1], 256, dtype=torch.int32)
    # the kernel counts bin by bin
    return counts.new_empty(256, values.shape[1]).t() if use_triton(values) else counts


_radix_counts = define_op(
    "radix_counts(Tensor values, Tensor? prefix, int byte, Tensor? num_rows) -> Tensor", _run, _shape
)


def _count_byte(values: Tensor, prefix: Tensor | None, byte: int) -> Tensor:
    """``radix_counts`` in torch; NaN and -0.0 are looked for only where the highest byte lets expect them."""
    if prefix is None:
        counts = _count_highest(values, zeros=False)
        if not counts.index_select(1, _edge_bytes(values.device)).any():
            return counts
        _refuse_nan(values)
        return _count_highest(values, zeros=True)
    highest = prefix >> (8 * byte - 8)
    # none of 0, 127, 128, 255
    if ((highest + 1) & 126).all():
        return _count_under(values, prefix, byte, zeros=False)
    if ((highest == 0) | (highest == 255)).any():
        _refuse_nan(values)
    return _count_under(values, prefix, byte, zeros=True)


@lru_cache(maxsize=8)
def _edge_bytes(device: torch.device) -> Tensor:
    """Highest bytes under which NaN or -0.0 is counted."""
    return torch.tensor([0, 127, 255], device=device)


@lru_cache(maxsize=8)
def _key_order(device: torch.device) -> Tensor:
    """Where the signed byte of each key lies in ``[E, 258]``: negative numbers come first and backwards."""
    return torch.tensor([*range(128, 0, -1), *range(129, 257)], device=device)


def _count_highest(values: Tensor, zeros: bool) -> Tensor:
    shift = 8 * values.element_size() - 8

    def count(block: Tensor, columns: slice) -> Tensor:
        return count_bins(_bits(block, zeros) >> shift, _NUM_BINS, first=-129)

    return count_blocks(values, _NUM_BINS, count).index_select(1, _key_order(values.device))


def _count_under(values: Tensor, prefix: Tensor, byte: int, zeros: bool) -> Tensor:
    shift = 8 * (values.element_size() - 1 - byte)
    sign = 1 << (8 * byte - 1)
    negative = prefix < sign
    # the smallest bits under the prefix, as they lie in memory
    start = (torch.where(negative, ~prefix, prefix - sign) << 8).to(_BITS_DTYPE[values.dtype])

    def count(block: Tensor, columns: slice) -> Tensor:
        bits = _bits(block, zeros) >> shift if shift else _bits(block, zeros)
        return count_bins((bits - start[columns]).clamp_(-1, 256), _NUM_BINS, first=-1)

    counts = count_blocks(values, _NUM_BINS, count)[:, 1:257]
    # larger bits mean a smaller number below zero
    return torch.where(negative[:, None], counts.flip(1), counts)


def _bits(values: Tensor, zeros: bool) -> Tensor:
    """Values as they lie in memory; with ``zeros``, -0.0 becomes +0.0."""
    return (values + 0.0 if zeros else values).view(_BITS_DTYPE[values.dtype])


def _refuse_nan(values: Tensor) -> None:
    # the maximum of numbers and NaN is NaN
    if values.numel() and values.max().isnan():
        raise ValueError("NaN has no place in an order: got NaN among the values to select from")


def ordered_bits(values: Tensor) -> Tensor:
    """Keys in int32, less ``2**15`` (bf16) or ``2**31`` (fp32), for more than one call of ``ordered_counts``.

    Raises:
        ValueError: NaN, or a dtype without keys.

    >>> ordered_bits(torch.tensor([-1.0, -0.0, 0.0, 1.0], dtype=torch.bfloat16)).tolist()
    [-16257, 0, 0, 16256]
    """
    width = 8 * num_passes(values.dtype)
    # NaN stays in a sum, in which numbers may overflow too
    if not math.isfinite(values.sum()):
        _refuse_nan(values)
    bits = _bits(values, zeros=True).int()
    return bits.bitwise_xor_((bits >> 31).bitwise_and_((1 << (width - 1)) - 1))


def ordered_counts(bits: Tensor, prefix: Tensor | None, byte: int, passes: int) -> Tensor:
    """``radix_counts`` of ``ordered_bits [T, E]`` with ``passes`` bytes, for few tokens: in a single block."""
    bits = bits >> 8 * (passes - 1 - byte)
    if prefix is None:
        return count_bins(bits, 256, first=-128).int()
    start = (prefix << 8).sub_(128 << 8 * byte).int()
    return count_bins(bits.sub_(start).clamp_(-1, 256), _NUM_BINS, first=-1)[:, 1:257].int()


def pair_counts(values: Tensor, experts: Tensor, num_experts: int, prefix: Tensor | None, byte: int) -> Tensor:
    """``radix_counts`` of a list of values, each with its expert.

    Args:
        values: ``[N]`` bf16 or fp32, no NaN; ``N`` may be 0.
        experts: ``[N]`` integer, the expert of each value.
        num_experts: ``E``.
        prefix, byte: as in ``radix_counts``.

    Returns:
        ``[E, 256]`` int32 in key order.

    >>> counts = pair_counts(torch.tensor([1.0, -1.0]).bfloat16(), torch.tensor([0, 1]), 2, None, 0)
    >>> counts.nonzero().tolist()
    [[0, 191], [1, 64]]
    """
    passes = num_passes(values.dtype)
    bins = ordered_bits(values).bitwise_right_shift_(8 * (passes - 1 - byte))
    owners = experts.long()
    if prefix is None:
        bins.add_(128)
    else:
        start = (prefix << 8).sub_(128 << 8 * byte).int()
        bins.sub_(start.index_select(0, owners))
        under = (bins >= 0) & (bins < 256)
        bins, owners = bins[under], owners[under]
    index = owners.mul(256).add_(bins)
    return torch.bincount(index, minlength=256 * num_experts).view(num_experts, 256).int()


def select_rank(counts: Tensor, prefix: Tensor | None, rank: Tensor) -> tuple[Tensor, Tensor]:
    """Find the bin that holds ``rank`` and the rank that is left inside it.

    Args:
        counts: ``[E, 256]`` integer, summed over all token shards.
        prefix: ``[E]`` int64 bytes above, or None.
        rank: ``[E]`` int64, from 1; 0 where nothing was counted.

    Returns:
        the prefix longer by one byte, and the rank among the keys that share it; both ``[E]`` int64.

    >>> counts = torch.zeros(1, 256, dtype=torch.int32)
    >>> counts[0, 7], counts[0, 9] = 2, 3
    >>> select_rank(counts, None, torch.tensor([3]))
    (tensor([9]), tensor([1]))
    """
    run = _select_rank if torch.compiler.is_compiling() else _run_select
    return run(counts, prefix, rank)


def _run_select(counts: Tensor, prefix: Tensor | None, rank: Tensor) -> tuple[Tensor, Tensor]:
    if use_triton(counts):
        from .fused.radix import select_rank as launch

        return launch(counts, prefix, rank)
    upto = counts.cumsum(-1)
    at = torch.searchsorted(upto, rank[:, None])
    before = (upto.gather(-1, at) - counts.gather(-1, at)).squeeze(-1)
    chosen = at.squeeze(-1)
    longer = chosen if prefix is None else (prefix << 8) | chosen
    return longer, rank - before


def _shape_select(counts: Tensor, prefix: Tensor | None, rank: Tensor) -> tuple[Tensor, Tensor]:
    return rank.new_empty(counts.shape[0], dtype=torch.int64), rank.new_empty(counts.shape[0], dtype=torch.int64)


_select_rank = define_op(
    "select_rank(Tensor counts, Tensor? prefix, Tensor rank) -> (Tensor, Tensor)", _run_select, _shape_select
)


def target_rank(num_tokens: Tensor, top_k: int, num_experts: int, order: str = "q") -> Tensor:
    """Rank (from 1) of the ``K/E`` quantile of ``num_tokens`` values, in integer arithmetic; 0 where there is no token.

    ``order="q"`` takes the ``ceil(T*K/E)``-th smallest (Kimi K3), ``"q_plus_1"`` the one after it (Su, EQB), at most
    ``T``.

    >>> target_rank(torch.tensor(168), 16, 896)
    tensor(3)
    >>> target_rank(torch.tensor([10, 0]), 2, 8, order="q_plus_1")
    tensor([4, 0])
    """
    if order not in ("q", "q_plus_1"):
        raise ValueError(f"order must be 'q' or 'q_plus_1', got {order!r}")
    tokens = num_tokens.long()
    rank = (tokens * top_k + num_experts - 1) // num_experts
    return rank if order == "q" else torch.minimum(rank + 1, tokens)
