"""Tallies: what the routing pass does with the margins while they are still in the cache (on a GPU: in registers).

``T`` tokens, ``E`` experts, ``B`` bins. A counting tally is an int32 buffer ``[E, B]`` and the rule that maps a
margin to its bin. Counts are int32 while they accumulate; whoever sums them over token shards widens them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .counting import add_uniform_counts, count_bins, count_blocks, index_dtype
from .fixed import FixedScale
from .radix import ordered_bits, radix_counts

# bins of a window, its keys and one bin on each side
WINDOW_BINS = 256
WINDOW_KEYS = WINDOW_BINS - 2


class Tally(Protocol):
    """Something the routing pass can hand margins to."""

    def add(self, margins: Tensor) -> None:
        """Take in ``margins [T, E]`` of valid tokens."""


@dataclass(frozen=True, eq=False)
class UniformTally:
    """Equal bins between ``lower`` and ``upper``; a margin outside is counted in the outermost bin and in ``clamped``.

    The bin is ``floor((margin - lower) * (1 / (upper - lower) * B))``: the multiply form in every backend, since the
    divide form moves the point mass at zero by one bin. **Choice:** the factor is rounded to fp32 after each operation.

    Args:
        counts: ``[E, B]`` int32.
        clamped: ``[E]`` int32, how many margins lay outside.
        lower, upper: 0-dim fp32.

    >>> tally = UniformTally.zeros(1, 1000, torch.tensor(-1.0), torch.tensor(1.0))
    >>> tally.add(torch.zeros(3, 1))
    >>> tally.counts[0, 500].item()
    3
    """

    counts: Tensor
    clamped: Tensor
    lower: Tensor
    upper: Tensor

    @classmethod
    def zeros(cls, num_experts: int, num_bins: int, lower: Tensor, upper: Tensor) -> "UniformTally":
        """An empty tally on the device of ``lower``."""
        counts = torch.zeros(num_experts, num_bins, dtype=torch.int32, device=lower.device)
        return cls(counts, torch.zeros(num_experts, dtype=torch.int32, device=lower.device), lower, upper)

    def add(self, margins: Tensor) -> None:
        """Count ``margins [T, E]`` in place."""
        add_uniform_counts(self.counts, self.clamped, margins, self.lower, self.upper)


@dataclass(frozen=True, eq=False)
class RadixTally:
    """The high byte of the order-preserving BF16 key: the first pass of the exact selection.

    Args:
        counts: ``[E, 256]`` int32.
    """

    counts: Tensor

    def add(self, margins: Tensor) -> None:
        """Count ``margins [T, E]`` in place, rounded to bf16."""
        self.counts.add_(radix_counts(margins.bfloat16(), None, 0))


class MarginRows(Protocol):
    """Where a routing pass leaves its margins for later passes."""

    def room(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """A buffer ``[capacity, E]`` with room for ``num_tokens`` more rows, and ``[1]`` int64: rows in use."""


@dataclass(frozen=True, eq=False)
class FixedRows:
    """Margins in a buffer of fixed size.

    Args:
        buffer: ``[capacity, E]`` bf16 or fp32.
        filled: ``[1]`` int64, rows in use; on the device, so that a captured graph appends at the right place.
    """

    buffer: Tensor
    filled: Tensor

    @classmethod
    def empty(cls, logits: Tensor) -> "FixedRows":
        """Room for the margins of all tokens of ``logits [T, E]``, fp32 or, of fp64 logits, fp64."""
        wide = torch.promote_types(logits.dtype, torch.float32)
        return cls(logits.new_empty(logits.shape, dtype=wide), logits.new_zeros(1, dtype=torch.int64))

    def room(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Both; whether there is room shows when the rows are written."""
        return self.buffer, self.filled


@dataclass(frozen=True, eq=False)
class MarginTally:
    """Keeps the margins, rounded to the dtype of their rows, for selections that need more than one pass.

    Args:
        rows: receives the margins of valid tokens; tokens that do not count may leave rows of NaN.
    """

    rows: MarginRows

    def add(self, margins: Tensor) -> None:
        """Keep ``margins [T, E]``.

        Raises:
            ValueError: no room.
        """
        buffer, filled = self.rows.room(margins.shape[0])
        start = int(filled)
        end = start + margins.shape[0]
        if end > buffer.shape[0]:
            raise ValueError(f"margins of {end} tokens do not fit into a buffer for {buffer.shape[0]}")
        buffer[start:end] = margins
        filled.fill_(end)


@dataclass(frozen=True, eq=False)
class CodedTally:
    """Keeps the margins in another form than their own.

    Args:
        rows: receives them.
        encode: from margins to what is kept, ``[T, E]``.
    """

    rows: MarginRows
    encode: Callable[[Tensor], Tensor]

    def add(self, margins: Tensor) -> None:
        """Keep ``margins [T, E]``.

        Raises:
            ValueError: no room.
        """
        MarginTally(self.rows).add(self.encode(margins))


@dataclass(frozen=True, eq=False)
class WindowTally:
    """Exact 16-bit keys in a window of 254 keys an expert: bin 0 is below it, bins 1 to 254 are in it, 255 is above.

    Args:
        counts: ``[E, 256]`` int32.
        first: ``[E]`` int64, the key of bin 1: a level of ``scale``, else a key as in ``to_key`` of bf16.
        scale: of fixed-point keys; None for bf16.

    >>> tally = WindowTally(torch.zeros(1, 256, dtype=torch.int32), torch.tensor([32768]))
    >>> tally.add(torch.tensor([[-0.1], [0.0], [0.1]]))
    >>> tally.counts[0, [0, 1, 255]].tolist()
    [1, 1, 1]
    """

    counts: Tensor
    first: Tensor
    scale: FixedScale | None = None

    def add(self, margins: Tensor) -> None:
        """Count ``margins [T, E]`` in place, rounded to the keys.

        Raises:
            ValueError: NaN, with bf16 keys.
        """
        scale = self.scale
        self._count(margins, lambda block: _bf16_keys(block.bfloat16()) if scale is None else scale.to_level(block))

    def add_rows(self, rows: Tensor) -> None:
        """Count margins that are rounded already, ``[T, E]`` bf16; of a scale, their codes."""
        scale = self.scale
        self._count(rows, lambda block: _bf16_keys(block) if scale is None else scale.code_level(_bf16_keys(block)))

    def _count(self, values: Tensor, to_keys: Callable[[Tensor], Tensor]) -> None:
        start = (self.first - 1).int()

        def count(block: Tensor, columns: slice) -> Tensor:
            bins = to_keys(block).sub_(start[columns]).clamp_(0, WINDOW_BINS - 1)
            return count_bins(bins.to(index_dtype(block.shape[1], WINDOW_BINS)), WINDOW_BINS)

        self.counts.add_(count_blocks(values, WINDOW_BINS, count))


def _bf16_keys(values: Tensor) -> Tensor:
    """``to_key`` in int32."""
    return ordered_bits(values).add_(0x8000)


@dataclass(frozen=True, eq=False)
class CutTally:
    """Keeps the pairs of a token and an expert whose margin is at most the expert's cut, and of which expert they are.

    Args:
        pairs: receives them.
        cut: ``[E]``, of the dtype of what is kept.
        encode: from margins fp32 to what is kept, in the same order, ``[T, E]``.
    """

    pairs: "PairRows"
    cut: Tensor
    encode: Callable[[Tensor], Tensor]

    def add(self, margins: Tensor) -> None:
        """Keep what is needed of ``margins [T, E]``."""
        self.pairs.append(*self.select(self.encode(margins)))

    def select(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The values ``[N]`` of rows ``[T, E]`` at most the cut, and their experts ``[N]`` int64; NaN is none."""
        place = (rows <= self.cut).flatten().nonzero().squeeze(1)
        return rows.flatten().index_select(0, place), place.remainder(rows.shape[1])


class PairRows(Protocol):
    """Where a routing pass leaves margins of single pairs."""

    def append(self, values: Tensor, experts: Tensor) -> None:
        """Take ``values [N]`` and their ``experts [N]`` int64."""
