"""The auxiliary loss of GShard and Switch, over a microbatch, each sequence, or the global batch."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels import Routing
from .base import GradientBalancer
from .lei import bound_factor
from .metrics import residual
from .update import sum_over_shards

SCOPES = ("microbatch", "sequence", "global")


class GShard(GradientBalancer):
    """``coefficient * sum_e f[e] * P[e]``: exactly ``coefficient`` when balanced.

    ``f[e] = c[e] * E / (K*T)`` is the load (no gradient), ``P[e]`` the mean over valid tokens of ``s / sum(s)``.
    Counts and denominators are taken over the same tokens. With ``f`` from global counts over global tokens and
    ``P`` a mean over local tokens, no further factor belongs in front, whatever the number of ranks.

    Args:
        coefficient: weight of the loss.
        scope: ``microbatch``; ``sequence``: the mean over sequences of the same expression (DeepSeek-V3);
            ``global``: ``f`` from counts summed over token shards and over the microbatches of the step so far, one
            all-reduce of ``E`` int64 per layer and microbatch, so every rank must run as many training forwards.
        bound: ``tanh`` multiplies the residual ``f - 1`` by LEI's factor ``tanh(xi) / xi``, ``xi = max |f - 1|``
            (the "normalised" pair).

    **Choice:** with ``global``, "the step so far" means that an early microbatch of a step is steered by fewer counts
    than a late one, so the gradient of the step depends on how its microbatches are spread over ranks and
    accumulation; with the other scopes it does not.

    Raises:
        ValueError: unknown ``scope`` or ``bound``, ``coefficient`` not positive.

    Reference: Lepikhin et al., arXiv 2006.16668; Fedus et al., arXiv 2101.03961. ``last_value`` is the
    coefficient-free loss.
    """

    step_load: Tensor

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        *,
        coefficient: float = 1e-2,
        scope: str = "microbatch",
        bound: str | None = None,
    ) -> None:
        super().__init__(num_experts, top_k)
        if scope not in SCOPES:
            raise ValueError(f"scope must be one of {', '.join(SCOPES)}, got {scope!r}")
        if not 0 < coefficient < float("inf"):
            raise ValueError(f"coefficient must be positive (leave the slot empty to switch it off), got {coefficient}")
        self.coefficient = coefficient
        self.scope = scope
        self.bound = bound
        bound_factor(torch.zeros(num_experts), bound)
        self.add_accumulator("step_load", num_experts, dtype=torch.int64)

    def penalty(self, routing: Routing) -> Tensor:
        """The loss of this microbatch, 0-dim."""
        num_sequences = routing.num_sequences if self.scope == "sequence" else 1
        load_NE, tokens_N = _load(routing, num_sequences)
        # a recomputation neither counts nor communicates: its value is never used, see _Excess
        first = self.counts_forward()
        if self.scope == "global" and first:
            self.step_load.add_(routing.load)
            load_NE = sum_over_shards([self.step_load], self.token_shards)[0][None]
        error_NE = residual(load_NE).to(routing.weights.dtype)
        slope_NE = error_NE if self.bound is None else bound_factor(error_NE, self.bound)[:, None] * error_NE
        mean_NE, excess_N = _Excess.apply(routing.shares, slope_NE, routing.valid, tokens_N)
        # sum_e f*P = 1 + sum_e (f - 1)*P, since P sums to 1
        if first:
            self.last_value = _mean(1 + (error_NE * mean_NE).sum(-1), tokens_N)
        return self.coefficient * _mean(1 + excess_N, tokens_N)


class _Excess(torch.autograd.Function):
    """Mean shares ``P [N, E]`` of ``N`` runs of tokens, without gradient, and ``sum_e slope[n, e] * P[n, e]``, ``[N]``.

    The slope is no saved tensor: activation checkpointing drops those and makes them again, and by then the load of the
    step so far is another one. A plain attribute stays what it was in the first forward.
    """

    @staticmethod
    def forward(
        ctx: Any, shares: Tensor, slope_NE: Tensor, valid: Tensor | None, tokens_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        counted = shares if valid is None else shares * valid[:, None]
        mean_NE = counted.unflatten(0, (len(tokens_N), -1)).sum(1) / tokens_N.clamp(min=1)[:, None]
        ctx.save_for_backward(valid, tokens_N)
        ctx.slope = slope_NE
        ctx.num_tokens = len(shares)
        ctx.mark_non_differentiable(mean_NE)
        return mean_NE, (mean_NE * slope_NE).sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        valid, tokens_N = ctx.saved_tensors
        grad_NE = grad_N[:, None] * ctx.slope / tokens_N.clamp(min=1)[:, None]
        grad_shares = grad_NE.repeat_interleave(ctx.num_tokens // len(tokens_N), dim=0)
        return grad_shares if valid is None else grad_shares * valid[:, None], None, None, None


def _load(routing: Routing, num_sequences: int) -> tuple[Tensor, Tensor]:
    """Load ``[N, E]`` and valid tokens ``[N]`` of ``N = num_sequences`` runs of tokens."""
    num_tokens = routing.logits.shape[0]
    if routing.valid is None:
        tokens = torch.full((num_sequences,), num_tokens // num_sequences, device=routing.logits.device)
    else:
        tokens = routing.valid.view(num_sequences, -1).sum(-1)
    if num_sequences == 1:
        return routing.load[None], tokens
    chosen = routing.experts.view(num_sequences, -1)
    load = torch.zeros(num_sequences, routing.num_experts, dtype=torch.int64, device=routing.logits.device)
    if routing.valid is None:
        return load.scatter_add_(1, chosen, torch.ones_like(chosen)), tokens
    weight = routing.valid.view(num_sequences, -1).repeat_interleave(routing.top_k, dim=1).long()
    return load.scatter_add_(1, chosen, weight), tokens


def _mean(values: Tensor, tokens_N: Tensor) -> Tensor:
    """Mean of the values of runs that have a token; 0 if none does."""
    counted = tokens_N > 0
    return torch.where(counted, values, 0.0).sum() / counted.sum().clamp(min=1)
