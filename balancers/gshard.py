"""The auxiliary loss of GShard and Switch, over a microbatch, each sequence, or the global batch."""

import torch
from torch import Tensor

from ..kernels import Routing, ShareGradient
from .base import GradientBalancer
from .lei import bound_factor
from .metrics import residual
from .update import pool_load

SCOPES = ("microbatch", "sequence", "global")


class GShard(GradientBalancer):
    """``coefficient * sum_e f[e] * P[e]``: exactly ``coefficient`` when balanced.

    ``f[e] = c[e] * E / (K*T)`` is the load (no gradient), ``P[e]`` the mean over valid tokens of ``s / sum(s)``.
    Counts and denominators are taken over the same tokens. With ``f`` from global counts over global tokens and
    ``P`` a mean over local tokens, no further factor belongs in front, whatever the number of ranks. Where
    ``microbatch_shards`` share out a microbatch, ``f`` is that of all of it, or of each whole sequence.

    Args:
        coefficient: weight of the loss.
        scope: ``microbatch``; ``sequence``: the mean over sequences of the same expression (DeepSeek-V3), which may be
            spread over ``microbatch_shards`` if every rank holds a part, also an empty one, of the same sequences;
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

    def share_gradient(self, routing: Routing) -> ShareGradient:
        """``coefficient`` times the gradient of the loss with respect to the shares."""
        num_sequences = routing.num_sequences if self.scope == "sequence" else 1
        load_NE, tokens_N = _load(routing, num_sequences)
        first = self.counts_forward()
        if self.scope == "global":
            if first:
                self.step_load.add_(routing.load)
            load_NE = pool_load(self, self.step_load, self.token_shards)[None]
        elif self.microbatch_shards is not None:
            load_NE = pool_load(self, load_NE, self.microbatch_shards)
            tokens_N = _shard_tokens(load_NE, routing)
        error_NE = residual(load_NE).to(routing.weights.dtype)
        shares, saved = routing.gate.shares_and_saved(routing.logits.detach())
        if first:
            counted = shares if routing.valid is None else shares * routing.valid[:, None]
            mean_NE = _run_sums(counted, num_sequences).div_(_column(tokens_N))
            self.last_value = _mean_loss(mean_NE, error_NE, tokens_N)
        slope_NE = error_NE if self.bound is None else bound_factor(error_NE, self.bound)[:, None] * error_NE
        return ShareGradient(slope_NE * self._weight(slope_NE, tokens_N), shares, saved)

    def _weight(self, slope_NE: Tensor, tokens_N: Tensor | int) -> Tensor | float:
        """What one token of a run weighs, ``[N, 1]`` or one number for all: the mean is over runs that have a token."""
        if isinstance(tokens_N, int):
            return self.coefficient / (len(slope_NE) * max(tokens_N, 1))
        counted = (tokens_N > 0)[:, None]
        weight = slope_NE.new_tensor(self.coefficient) / (counted.sum().clamp(min=1) * _column(tokens_N))
        return torch.where(counted, weight, 0.0)


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


def _shard_tokens(load_NE: Tensor, routing: Routing) -> Tensor:
    """Valid tokens ``[N]`` that this shard would have of every run, were each spread over the shards as the microbatch
    is: as divisors they weigh every token of a run alike, whichever shard holds it.

    Args:
        load_NE: summed over the shards.
        routing: of this shard.
    """
    tokens_N = load_NE.sum(-1).double() / routing.top_k
    shard_N = tokens_N * routing.num_valid / tokens_N.sum().clamp(min=1)
    return shard_N.to(routing.weights.dtype)


def _run_sums(values: Tensor, num_sequences: int) -> Tensor:
    """Sums ``[N, E]`` over the tokens of each run."""
    if num_sequences == 1:
        return values.sum(0, keepdim=True)
    return values.unflatten(0, (num_sequences, -1)).sum(1)


def _column(tokens_N: Tensor | int) -> Tensor | int:
    """Divisors ``[N, 1]``."""
    return max(tokens_N, 1) if isinstance(tokens_N, int) else tokens_N.where(tokens_N > 0, 1)[:, None]


def _mean_loss(mean_NE: Tensor, error_NE: Tensor, tokens_N: Tensor | int) -> Tensor:
    """``sum_e f*P``, averaged over the runs that have a token; 0 if none does. As ``P`` sums to 1, this is 1 plus
    the sum of ``(f - 1)*P``.
    """
    products = mean_NE * error_NE
    if len(products) == 1 and isinstance(tokens_N, int) and tokens_N:
        return products.sum().add_(1)
    loss_N = 1 + products.sum(-1)
    if isinstance(tokens_N, int):
        return loss_N.sum() / len(loss_N) if tokens_N else torch.zeros_like(loss_N[0])
    counted = tokens_N > 0
    return torch.where(counted, loss_N, 0.0).sum() / counted.sum().clamp(min=1)
