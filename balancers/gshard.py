"""The auxiliary loss of GShard and Switch, over a microbatch, each sequence, or the global batch."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels import Routing
from ..kernels.gate import Gate
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
        shares, saved = routing.gate.shares_and_saved(routing.logits.detach())
        counted = shares if routing.valid is None else shares * routing.valid[:, None]
        mean_NE = _run_sums(counted, num_sequences).div_(_column(tokens_N))
        value = _mean_loss(mean_NE, slope_NE, tokens_N)
        if first:
            self.last_value = value if self.bound is None else _mean_loss(mean_NE, error_NE, tokens_N)
        options = routing.valid, tokens_N, self.coefficient, routing.gate
        return _Penalty.apply(routing.logits, value, slope_NE, shares, saved, *options)


class _Penalty(torch.autograd.Function):
    """``coefficient * value``, 0-dim, for ``value = mean_n (1 + sum_e slope[n, e] * P[n, e])`` over the runs of tokens
    that have one, with ``P`` their mean shares.

    The slope is no saved tensor: activation checkpointing drops those and makes them again, and by then the load of the
    step so far is another one. A plain attribute stays what it was in the first forward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        value: Tensor,
        slope_NE: Tensor,
        shares: Tensor,
        saved: Tensor | None,
        valid: Tensor | None,
        tokens_N: Tensor | int,
        coefficient: float,
        gate: Gate,
    ) -> Tensor:
        ctx.save_for_backward(logits, shares, saved, valid)
        ctx.slope, ctx.tokens, ctx.coefficient, ctx.gate = slope_NE, tokens_N, coefficient, gate
        return coefficient * value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, shares, saved, valid = ctx.saved_tensors
        num_sequences, tokens = len(ctx.slope), ctx.tokens
        grad = grad * ctx.coefficient
        if num_sequences > 1 or not isinstance(tokens, int):
            grad = _weights(grad, tokens, num_sequences)[:, None]
        grad_NE = (grad * ctx.slope).div_(_column(tokens))
        if num_sequences == 1:
            grad_shares = grad_NE.expand_as(shares)
        else:
            grad_shares = grad_NE.repeat_interleave(len(shares) // num_sequences, dim=0)
        if valid is not None:
            grad_shares = grad_shares * valid[:, None]
        return ctx.gate.shares_gradient(logits, shares, saved, grad_shares), *[None] * 8


def _load(routing: Routing, num_sequences: int) -> tuple[Tensor, Tensor | int]:
    """Load ``[N, E]`` of ``N = num_sequences`` runs of tokens, and their valid tokens: ``[N]``, or a number for all."""
    tokens: Tensor | int = routing.logits.shape[0] // num_sequences
    if routing.valid is not None:
        tokens = routing.valid.view(num_sequences, -1).sum(-1)
    if num_sequences == 1:
        return routing.load[None], tokens
    chosen = routing.experts.view(num_sequences, -1)
    if routing.valid is None:
        weight = torch.ones_like(chosen)
    else:
        weight = routing.valid.view(num_sequences, -1).repeat_interleave(routing.top_k, dim=1).long()
    load = torch.zeros(num_sequences, routing.num_experts, dtype=torch.int64, device=chosen.device)
    return load.scatter_add_(1, chosen, weight), tokens


def _run_sums(values: Tensor, num_sequences: int) -> Tensor:
    """Sums ``[N, E]`` over the tokens of each run."""
    if num_sequences == 1:
        return values.sum(0, keepdim=True)
    return values.unflatten(0, (num_sequences, -1)).sum(1)


def _column(tokens_N: Tensor | int) -> Tensor | int:
    """Divisors ``[N, 1]``."""
    return max(tokens_N, 1) if isinstance(tokens_N, int) else tokens_N.clamp(min=1)[:, None]


def _mean_loss(mean_NE: Tensor, slope_NE: Tensor, tokens_N: Tensor | int) -> Tensor:
    """``1 + sum_e slope*P``, averaged over the runs that have a token; 0 if none does. Since ``P`` sums to 1, this is
    ``sum_e f*P`` for the slope ``f - 1``.
    """
    products = mean_NE * slope_NE
    if len(products) == 1 and isinstance(tokens_N, int) and tokens_N:
        return products.sum().add_(1)
    loss_N = 1 + products.sum(-1)
    if isinstance(tokens_N, int):
        return loss_N.sum() / len(loss_N) if tokens_N else torch.zeros_like(loss_N[0])
    counted = tokens_N > 0
    return torch.where(counted, loss_N, 0.0).sum() / counted.sum().clamp(min=1)


def _weights(grad: Tensor, tokens_N: Tensor | int, num_sequences: int) -> Tensor:
    """What ``_mean_loss`` gives back to the loss of each run, ``[N]``."""
    if isinstance(tokens_N, int):
        return (grad / num_sequences if tokens_N else torch.zeros_like(grad)).expand(num_sequences)
    counted = tokens_N > 0
    return torch.where(counted, grad / counted.sum().clamp(min=1), 0.0)
