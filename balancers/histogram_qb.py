"""Quantile Balancing from a pooled histogram of margins (Kimi K3)."""

from typing import Any

import torch
from torch import Tensor

from ..kernels import Routing, UniformTally, target_rank
from .base import BiasBalancer, Solve


class HistogramQB(BiasBalancer):
    """The K/E quantile of every expert's margins, from ``num_bins`` equal bins over ``[min(b) - 1, max(b) + 1]``.

    Sums ``E * num_bins`` int32 over ranks. Scores lie in [0, 1], so no margin falls outside the range;
    ``clamped_share`` counts those that do nevertheless. The error is at most one bin width. The bounds follow from
    the bias and are not saved.

    Args:
        num_bins: ``B``.
        shared: ``ema``, ``centre``, ``frozen`` of ``BiasBalancer``.

    Raises:
        ValueError: ``num_bins`` below 1; routing with ``selection="logit"`` (margins without bounds).

    Reference: Kimi K3; torchtitan and Megatron ``global_batch``.
    """

    counts: Tensor
    clamped: Tensor
    clamped_share: Tensor
    needs_bounded_scores = True
    needs_dropless = True

    def __init__(self, num_experts: int, top_k: int, *, num_bins: int = 1000, **shared: Any) -> None:
        super().__init__(num_experts, top_k, **shared)
        if not isinstance(num_bins, int) or num_bins < 1:
            raise ValueError(f"num_bins must be at least 1, got {num_bins}")
        self.add_accumulator("counts", num_experts, num_bins)
        self.add_accumulator("clamped", num_experts)
        self.add_scratch("clamped_share", torch.zeros((), dtype=torch.float64))

    def open_tally(self) -> UniformTally:
        """The histogram under the bias that routes now."""
        return UniformTally(self.counts, self.clamped, *self._bounds())

    def _bounds(self) -> tuple[Tensor, Tensor]:
        lowest, highest = self.bias.aminmax()
        return lowest.sub_(1), highest.add_(1)

    def accumulate(self, routing: Routing) -> None:
        """Count the margins, unless the routing pass has done so."""
        if not isinstance(routing.tally, UniformTally) or routing.tally.counts is not self.counts:
            self.open_tally().add(routing.valid_margins)

    def solve(self) -> Solve:
        """One round: the histogram, with the clamped margins as one more column."""
        pooled = yield torch.cat([self.counts, self.clamped[:, None]], dim=1)
        counts, clamped = pooled[:, :-1], pooled[:, -1]
        # a token leaves one margin per expert
        margins = counts[0].sum() * self.num_experts
        self.clamped_share.copy_(clamped.sum().double() / margins.clamp_(min=1))
        return histogram_quantile(counts, self.top_k, *self._bounds())

    def reset_parameters(self) -> None:
        """Zero bias, empty accumulators."""
        super().reset_parameters()
        self.clamped_share.zero_()

    def diagnostics(self) -> dict[str, Tensor]:
        """``clamped_share``: share of the last step's margins that lay outside the range; above zero is a fault."""
        return {"clamped_share": self.clamped_share}


def histogram_quantile(counts: Tensor, top_k: int, lower: Tensor, upper: Tensor) -> Tensor:
    """The ``K/E`` quantile of every row of a histogram, linear inside the bin that holds it.

    Args:
        counts: ``[E, B]`` integer, summed over all token shards.
        top_k: ``K``.
        lower, upper: 0-dim, bounds of the bins.

    Returns:
        ``[E]`` fp64; NaN for an empty row.

    >>> counts = torch.tensor([[0, 2, 2, 0], [2, 2, 0, 0]])
    >>> histogram_quantile(counts, 1, torch.tensor(-1.0), torch.tensor(1.0)).tolist()
    [0.0, -0.5]
    """
    num_experts, num_bins = counts.shape
    upto = counts.cumsum(-1)
    tokens = upto[:, -1]
    rank = target_rank(tokens, top_k, num_experts)
    chosen = torch.searchsorted(upto, rank[:, None])
    inside = counts.gather(-1, chosen).squeeze(-1).long()
    before = upto.gather(-1, chosen).squeeze(-1) - inside
    # (q - before) / inside with q = T*K/E, from integers
    fraction = ((tokens * top_k - before * num_experts).double() / (inside * num_experts)).clamp(0, 1)
    width = (upper.double() - lower.double()) / num_bins
    quantile = lower.double() + (chosen.squeeze(-1) + fraction) * width
    return torch.where(tokens > 0, quantile, torch.nan)
