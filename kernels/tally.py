"""Tallies: what the routing pass does with the margins while they are still in the cache (on a GPU: in registers).

``T`` tokens, ``E`` experts, ``B`` bins. A counting tally is an int32 buffer ``[E, B]`` and the rule that maps a
margin to its bin. Counts are int32 while they accumulate; whoever sums them over token shards widens them.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .counting import add_uniform_counts
from .radix import radix_counts


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
