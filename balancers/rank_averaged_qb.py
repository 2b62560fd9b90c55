"""Quantile Balancing with each rank's own quantile, averaged over ranks (Su, MARIN, Megatron ``micro_batch``)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import MarginTally, Routing
from .base import BiasBalancer, Solve
from .quantile import MarginStore, local_quantile


class RankAveragedQB(BiasBalancer):
    """The mean over ranks of each rank's exact K/E quantile of its own margins.

    Sums ``E + 1`` fp32 over ranks. The result depends on how the batch is sharded: the mean of quantiles is not the
    quantile of the pool. Any number of tokens; the target ``T*K/E`` is rounded up, as in the pooled estimators.

    Args:
        per: ``microbatch``: one quantile for each microbatch of a rank, and the mean over all of them (Marin,
            Megatron); ``step``: one quantile over all microbatches of a rank. A rank or microbatch without a valid
            token contributes and counts nothing.
        shared: ``ema``, ``centre``, ``frozen`` of ``BiasBalancer``.

    Raises:
        ValueError: unknown ``per``.

    Reference: Su, "Quantile Balancing" (blog); MARIN; Megatron-LM ``micro_batch``. They take the ``(q+1)``-th
    smallest; here it is the ``q``-th, so that every estimator in a table aims at the same token.
    """

    total: Tensor
    needs_dropless = True

    def __init__(self, num_experts: int, top_k: int, *, per: str = "microbatch", **shared: Any) -> None:
        super().__init__(num_experts, top_k, **shared)
        if per not in ("step", "microbatch"):
            raise ValueError(f"per must be 'step' or 'microbatch', got {per!r}")
        self.per = per
        self.store = MarginStore(num_experts, torch.float32)
        # sum of quantiles, and behind them how many there are
        self.add_accumulator("total", num_experts + 1, dtype=torch.float32)

    def reserve(self, num_tokens: int) -> None:
        """Make room for the margins of ``num_tokens`` tokens."""
        self.store.reserve(num_tokens)

    def open_tally(self) -> MarginTally:
        """The margins in fp32."""
        return MarginTally(self.store)

    def accumulate(self, routing: Routing) -> None:
        """Keep the margins, unless the routing pass has done so; per microbatch, take their quantile at once."""
        self.store.take(routing)
        if self.per == "microbatch":
            self._close()

    def _close(self) -> None:
        """Turn the stored margins into one quantile."""
        closed = F.pad(local_quantile(self.store, self.top_k), (0, 1), value=1.0)
        first = closed[0]
        # NaN: no token, and then it does not count
        self.total.add_(torch.where(first == first, closed, 0.0))
        self.store.reset()

    def solve(self) -> Solve:
        """One round: the sum of quantiles and their number."""
        if self.per == "step":
            self._close()
        total = yield self.total
        # 0 / 0 is NaN: no rank had a token
        return total[:-1] / total[-1]

    def reset(self) -> None:
        """Drop quantiles and margins; addresses stay."""
        super().reset()
        self.store.reset()
