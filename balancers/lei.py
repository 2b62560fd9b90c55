"""Load-error injection (LEI): the relative load error of a microbatch, added to the gradient of the scores."""

import torch
from torch import Tensor

from ..kernels import Routing
from .base import GradientBalancer
from .metrics import residual
from .update import pool_load


class LEI(GradientBalancer):
    """``dL/ds[t, e] += eta * g * rho[e]`` for every valid token and every expert of the microbatch.

    ``rho`` is the relative load error; ``g = tanh(xi) / xi`` with ``xi = max_e |rho[e]| / tau`` is one positive
    factor, so direction and zero sum are kept and no component exceeds ``eta * tau``. After descent the scores of an
    overloaded expert fall. Where ``microbatch_shards`` share out a microbatch of ``n`` valid tokens, ``rho`` is that of
    all of it, and a rank that holds ``m`` of them injects ``n / m`` times as much (see ``GradientBalancer``).

    Args:
        eta: strength; the paper sweeps 5e-6 to 8e-5.
        tau: where the bound sets in.
        bound: ``tanh``, or None for ``g = 1``.
        units: ``raw``: ``eta`` is in the units of a loss that is a mean over the microbatch's valid tokens, as the
            sources write it; ``per_token`` divides by their number ``n``, which makes ``eta`` independent of the size
            of the microbatch. The two meet at ``eta_per_token = eta_raw * n``. The sources do not say how their loss
            was normalised.

    Raises:
        ValueError: ``eta`` or ``tau`` not positive, unknown ``bound`` or ``units``.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        *,
        eta: float = 1e-5,
        tau: float = 1.0,
        bound: str | None = "tanh",
        units: str = "raw",
    ) -> None:
        super().__init__(num_experts, top_k)
        if not (0 < eta < float("inf") and 0 < tau < float("inf")):
            raise ValueError(
                f"eta and tau must be positive (leave the slot empty to switch it off), got {eta} and {tau}"
            )
        if units not in ("raw", "per_token"):
            raise ValueError(f"units must be 'raw' or 'per_token', got {units!r}")
        bound_factor(torch.zeros(num_experts), bound, tau)
        self.eta = eta
        self.tau = tau
        self.bound = bound
        self.units = units

    def injection(self, routing: Routing) -> Tensor:
        """``[E]``: what is added to the score gradient of every valid token, fp32 (fp64 for fp64 logits)."""
        load = routing.load
        if self.microbatch_shards is not None:
            load = pool_load(self, load, self.microbatch_shards)
        error = residual(load)
        injection = self.eta * bound_factor(error, self.bound, self.tau) * error
        if self.units == "per_token":
            # eta / n, times n / m
            injection = injection / routing.num_valid.clamp(min=1)
        elif self.microbatch_shards is not None:
            injection = injection * (load.sum().double() / (self.top_k * routing.num_valid.clamp(min=1)))
        return injection.to(routing.weights.dtype)


def bound_factor(error: Tensor, bound: str | None, tau: float = 1.0) -> Tensor:
    """``tanh(xi) / xi`` with ``xi = max_e |error[..., e]| / tau``, ``[...]``; 1 at 0, and 1 everywhere without a bound.

    Raises:
        ValueError: ``bound`` is neither ``tanh`` nor None.

    >>> bound_factor(torch.tensor([[0.0, 0.0], [1.0, -1.0]]), "tanh")
    tensor([1.0000, 0.7616])
    """
    if bound not in ("tanh", None):
        raise ValueError(f"bound must be 'tanh' or null, got {bound!r}")
    if bound is None:
        return error.new_ones(error.shape[:-1])
    # the factor of the smallest number is 1
    largest = (error.abs().amax(-1) / tau).clamp_(min=torch.finfo(error.dtype).tiny)
    return largest.tanh() / largest
