"""Radix selection: the exact order statistic of every column from byte counts, without sorting.

``T`` tokens, ``E`` experts. A float is mapped to an unsigned key with the same order (``to_key``). One pass counts
one byte of the keys that share a prefix (``radix_counts``); the counts may be summed over any number of token
shards; then the bin that holds the wanted rank is picked (``select_rank``) and becomes the next byte of the prefix.
Two passes give an exact bf16, four an exact fp32 value: 256 counters per expert and pass, whatever ``T`` is.

On the CPU the bytes are counted as they lie in memory, in cache-sized blocks of tokens, and the 256 counters are put
into key order afterwards: no arithmetic per element for the order.
"""

import torch
from torch import Tensor

# tokens counted at a time, so that the temporaries of a block stay in the cache
BLOCK_TOKENS = 2048

_BITS_DTYPE = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
_OUTER_BINS = [0, 255]  # the only high bytes whose keys may be NaN


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
    width = 8 * num_passes(values.dtype)
    _refuse_nan(values)
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


def count_bins(bins: Tensor, num_bins: int) -> Tensor:
    """Histogram per column: ``bins [T, E]`` int32 in ``[0, num_bins)`` to counts ``[E, num_bins]`` int64."""
    num_experts = bins.shape[1]
    index = bins + torch.arange(0, num_experts * num_bins, num_bins, dtype=torch.int32, device=bins.device)
    return torch.bincount(index.flatten(), minlength=num_experts * num_bins).view(num_experts, num_bins)


def radix_counts(values: Tensor, prefix: Tensor | None, byte: int) -> Tensor:
    """Count byte ``byte`` (0 = highest) of the keys of every column among the keys that start with ``prefix``.

    Args:
        values: ``[T, E]`` bf16 or fp32, no NaN; ``T`` may be 0.
        prefix: ``[E]`` int64, the ``byte`` bytes above as ``select_rank`` gave them; None for byte 0.
        byte: which byte of the key, from the most significant.

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
    if prefix is None:
        return _count_highest(values)
    return _count_under_prefix(values, prefix, byte)


def _count_highest(values: Tensor) -> Tensor:
    raw_E256 = torch.zeros(values.shape[1], 256, dtype=torch.int64, device=values.device)
    for block in values.split(BLOCK_TOKENS):
        raw_E256 += count_bins(_raw_bytes(block, 0), 256)
    # the sign leads: negative numbers (raw 128 to 255) come first and backwards
    counts = torch.cat([raw_E256[:, 128:].flip(1), raw_E256[:, :128]], dim=1)
    if counts[:, _OUTER_BINS].any():
        _refuse_nan(values)
    return counts.int()


def _count_under_prefix(values: Tensor, prefix: Tensor, byte: int) -> Tensor:
    num_experts = values.shape[1]
    width = 8 * values.element_size()
    highest = prefix >> (8 * byte - 8)
    if ((highest == _OUTER_BINS[0]) | (highest == _OUTER_BINS[1])).any():
        _refuse_nan(values)
    above = 8 * byte
    negative = prefix < (1 << (above - 1))
    # the prefix as the sign-extended bits that lie in memory
    raw_prefix = torch.where(negative, ~prefix, prefix ^ (1 << (above - 1)))
    raw_prefix = torch.where(negative, raw_prefix | -(1 << (above - 1)), raw_prefix).to(_BITS_DTYPE[values.dtype])
    offsets = torch.arange(0, num_experts * 256, 256, dtype=torch.int32, device=values.device)
    raw = torch.zeros(num_experts * 256, dtype=torch.int64, device=values.device)
    for block in values.split(BLOCK_TOKENS):
        bits = (block + 0.0).view(_BITS_DTYPE[values.dtype])
        index = (_raw_bytes(block, byte) + offsets)[bits >> (width - above) == raw_prefix]
        raw += torch.bincount(index, minlength=num_experts * 256)
    raw_E256 = raw.view(num_experts, 256)
    # larger bits mean a smaller number below zero
    return torch.where(negative[:, None], raw_E256.flip(1), raw_E256).int()


def _refuse_nan(values: Tensor) -> None:
    if values.isnan().any():
        raise ValueError("NaN has no place in an order: got NaN among the values to select from")


def _raw_bytes(values: Tensor, byte: int) -> Tensor:
    """Byte ``byte`` of every value as it lies in memory (little-endian), int32; the sum turns -0.0 into +0.0."""
    size = values.element_size()
    bits = (values + 0.0).view(_BITS_DTYPE[values.dtype])
    return (bits >> (8 * (size - 1 - byte))).int() & 255


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
    upto = counts.long().cumsum(-1)
    chosen = (upto < rank[:, None]).sum(-1)
    before = (upto - counts).gather(-1, chosen[:, None]).squeeze(-1)
    longer = chosen if prefix is None else (prefix << 8) | chosen
    return longer, rank - before


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
