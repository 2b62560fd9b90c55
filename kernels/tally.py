"""Tallies: what the routing pass counts while the margins are still in the cache (on a GPU: in registers).

``T`` tokens, ``E`` experts, ``B`` bins. A tally is an int32 buffer ``[E, B]`` and the rule that maps a margin to its
bin. Counts are int32 while they accumulate; whoever sums them over token shards widens them.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .radix import count_bins, radix_counts


class Tally(Protocol):
    """Something the routing pass can count margins into."""

    @property
    def counts(self) -> Tensor:
        """``[E, B]`` int32, added to in place."""

    def add(self, margins: Tensor) -> None:
        """Count ``margins [T, E]`` of valid tokens."""


@dataclass(frozen=True, eq=False)
class UniformTally:
    """Equal bins between ``lower`` and ``upper``; a margin outside is counted in the outermost bin and in ``clamped``.

    The bin is ``floor((margin - lower) * (B / (upper - lower)))``: the multiply form in every backend, since the
    divide form moves the point mass at zero by one bin.

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
        num_bins = self.counts.shape[1]
        scale = num_bins / (self.upper - self.lower)
        bins = ((margins - self.lower) * scale).clamp_(0, num_bins - 1).int()
        self.counts.add_(count_bins(bins, num_bins))
        self.clamped.add_(((margins < self.lower) | (margins > self.upper)).sum(0))


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
