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
        load_NE, shares_NE, tokens_N = _per_sequence(routing, num_sequences)
        # a recomputation neither counts nor communicates: its value is never used, see _Excess
        first = self.counts_forward()
        if self.scope == "global" and first:
            self.step_load.add_(routing.load)
            load_NE = sum_over_shards([self.step_load], self.token_shards)[0][None]
        error = residual(load_NE).to(shares_NE.dtype)
        counted = tokens_N > 0
        # sum_e f*P = 1 + sum_e (f - 1)*P, since P sums to 1
        if first:
            self.last_value = _mean(1 + (error * shares_NE.detach()).sum(-1), counted)
        slope_NE = bound_factor(error, self.bound)[:, None] * error
        return self.coefficient * _mean(1 + _Excess.apply(shares_NE, slope_NE), counted)


class _Excess(torch.autograd.Function):
    """``sum_e slope[n, e] * shares[n, e]``, with a slope that activation checkpointing does not recompute.

    Saved tensors are dropped and made again; by then the load of the step so far is another one. A plain attribute
    stays what it was in the first forward.
    """

    @staticmethod
    def forward(ctx: Any, shares_NE: Tensor, slope_NE: Tensor) -> Tensor:
        ctx.slope = slope_NE
        return (shares_NE * slope_NE).sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None]:
        return grad_N[:, None] * ctx.slope, None


def _per_sequence(routing: Routing, num_sequences: int) -> tuple[Tensor, Tensor, Tensor]:
    """Load ``[N, E]``, mean shares ``[N, E]`` and valid tokens ``[N]`` of ``N = num_sequences`` runs of tokens."""
    shares = routing.shares.unflatten(0, (num_sequences, -1))
    num_tokens = routing.logits.shape[0]
    valid = (
        routing.valid if routing.valid is not None else torch.ones(num_tokens, dtype=torch.bool, device=shares.device)
    )
    rows = valid.view(num_sequences, -1)
    tokens = rows.sum(-1)
    mean = (shares * rows[..., None]).sum(1) / tokens.clamp(min=1)[:, None]
    if num_sequences == 1:
        return routing.load[None], mean, tokens
    chosen = routing.experts.view(num_sequences, -1)
    weight = rows.repeat_interleave(routing.top_k, dim=1).long()
    load = torch.zeros(num_sequences, routing.num_experts, dtype=torch.int64, device=shares.device)
    return load.scatter_add_(1, chosen, weight), mean, tokens


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """Mean of the values that count; 0 if none does."""
    return torch.where(counted, values, 0.0).sum() / counted.sum().clamp(min=1)
