"""Quantile Balancing by the exact pooled order statistic (EQB)."""

from typing import Any

import torch

from ..kernels import MarginTally, Routing
from .base import BiasBalancer, Solve
from .quantile import MarginStore, radix_quantile

KEYS = {"bf16": torch.bfloat16, "fp32": torch.float32}


class ExactQB(BiasBalancer):
    """The K/E quantile of every expert's margins over the global batch, exact on margins rounded to ``key``.

    Two rounds (bf16) or four (fp32) of ``E * 256`` int32, whatever the number of tokens; the same tokens split over
    any number of ranks and microbatches give the same bits. The routing kernel leaves the margins.

    Args:
        key: ``bf16`` (2 rounds; spacing 0.0039 in [.5, 1)) or ``fp32`` (4 rounds).
        order: ``q`` takes the ``ceil(T*K/E)``-th smallest margin, so that it and the histogram aim at the same
            token; ``q_plus_1`` the one after it, as Su and the EQB write-up do. Any value between the two balances
            an untied expert.
        shared: ``ema``, ``centre``, ``frozen`` of ``BiasBalancer``.

    Raises:
        ValueError: unknown ``key`` or ``order``.
    """

    needs_dropless = True

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        *,
        key: str = "bf16",
        order: str = "q",
        **shared: Any,
    ) -> None:
        super().__init__(num_experts, top_k, **shared)
        if key not in KEYS:
            raise ValueError(f"key must be 'bf16' or 'fp32', got {key!r}")
        if order not in ("q", "q_plus_1"):
            raise ValueError(f"order must be 'q' or 'q_plus_1', got {order!r}")
        self.key = key
        self.order = order
        self.store = MarginStore(num_experts, KEYS[key])

    def reserve(self, num_tokens: int) -> None:
        """Make room for the margins of ``num_tokens`` tokens."""
        self.store.reserve(num_tokens)

    def open_tally(self) -> MarginTally:
        """The margins, rounded to the key's dtype."""
        return MarginTally(self.store)

    def accumulate(self, routing: Routing) -> None:
        """Keep the margins, unless the routing pass has done so."""
        self.store.take(routing)

    def solve(self) -> Solve:
        """One round per byte of the key."""
        store = self.store
        return (yield from radix_quantile(store.buffer, self.top_k, self.order, store.filled))

    def reset(self) -> None:
        """Empty the store; addresses stay."""
        super().reset()
        self.store.reset()
