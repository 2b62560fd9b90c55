"""A mixture-of-experts layer: router, experts, dispatch and combine.

``T`` tokens, ``D`` width, ``E`` experts, ``K`` experts a token, ``H`` hidden width of an expert.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..balancers import BiasBalancer, GradientBalancer
from ..balancers.base import FixedDtype
from ..kernels import Routing, replay, route
from .parallel.dispatch import run_sharded


class Uncounted(FixedDtype):
    """Tokens whose routing was broken since the last look, 0-dim int32 on the device: no forward waits for it."""

    tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_scratch("tokens", torch.zeros((), dtype=torch.int32))


class Router(nn.Module):
    """``z = W x`` in fp32, then ``route``, with the two balancer slots around it.

    Args:
        width: ``D``.
        num_experts: ``E``.
        top_k: ``K``.
        bias: balancer of the global scale, or None.
        gradient: balancer of the local scale, or None.
        selection: what the bias is added to, ``score`` or ``logit``.
        gate: ``sigmoid`` or ``softmax`` scores.
        normalise: gate weights of a token sum to ``scale``.
        scale: factor on the gate weights.
        z_loss: coefficient of ``mean_t logsumexp(z[t])**2`` over valid tokens; 0 is off.
        name: of the layer, for error messages.

    Attributes:
        loss_scale: see ``GradientBalancer.loss_scale``, which a forward sets to this one; holds for the z-loss too.
        last: the routing of the last forward, without its graph.
        uncounted: see ``check_routers``.
    """

    def __init__(
        self,
        width: int,
        num_experts: int,
        top_k: int,
        *,
        bias: BiasBalancer | None = None,
        gradient: GradientBalancer | None = None,
        selection: str = "score",
        gate: str = "sigmoid",
        normalise: bool = True,
        scale: float = 1.0,
        z_loss: float = 0.0,
        name: str = "router",
    ) -> None:
        super().__init__()
        if normalise and top_k == 1:
            raise ValueError(
                "with top_k=1 a normalised gate weight is always 1, so the router would get no gradient from the "
                "model's loss; set normalise=false"
            )
        if bias is not None and bias.needs_bounded_scores and selection != "score":
            raise ValueError(f"{type(bias).__name__} needs selection='score', got selection={selection!r}")
        self.weight = nn.Parameter(torch.empty(num_experts, width))
        self.top_k = top_k
        self.bias = bias
        self.gradient = gradient
        self.options: dict[str, Any] = {
            "selection": selection,
            "gate": gate,
            "normalise": normalise,
            "scale": scale,
        }
        self.z_loss = z_loss
        self.name = name
        self.loss_scale = 1.0
        self.last: Routing | None = None
        self.uncounted = Uncounted()

    def forward(
        self, x: Tensor, valid: Tensor | None = None, num_sequences: int = 1, forced: Tensor | None = None
    ) -> Routing:
        """Route ``x [T, D]``; ``valid [T]`` is True for real tokens.

        ``forced [T, K]`` int64 are the experts to take instead of the router's choice, say those of a rollout that is
        replayed; the balancers are frozen then, and say so.

        Raises:
            ValueError: what ``route`` and ``replay`` refuse, with the name of the layer.
        """
        if forced is not None and forced.shape[-1] != self.top_k:
            raise ValueError(f"{self.name}: forced must have {self.top_k} experts a token, got {tuple(forced.shape)}")
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.weight.float())
            routing = self._route(logits, valid, num_sequences, forced)
        self.last = routing.detach()
        return routing

    def _route(self, logits: Tensor, valid: Tensor | None, num_sequences: int, forced: Tensor | None) -> Routing:
        bias, tally = (None, None) if self.bias is None else (self.bias.bias, self.bias.tally)
        # a gradient balancer attaches the gradient together with its own
        steered = self.gradient is not None and self.gradient.training and forced is None
        attach = torch.is_grad_enabled() and not steered
        masked: dict[str, Any] = {"valid": valid, "num_sequences": num_sequences}
        try:
            with torch.set_grad_enabled(attach):
                if forced is None:
                    routing = route(logits, bias, self.top_k, tally=tally, **masked, **self.options)
                else:
                    routing = replay(logits, forced, **masked, **self.options)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error
        self.uncounted.tokens.add_(routing.uncounted)
        if self.bias is not None:
            self.bias.observe(routing)
        if self.gradient is not None:
            if self.gradient.loss_scale is not self.loss_scale:
                self.gradient.loss_scale = self.loss_scale
            routing = self.gradient.steer(routing)
        if self.z_loss and self.training and torch.is_grad_enabled():
            routing = routing.steered(penalty=self.z_loss * z_loss(routing), scale=self.loss_scale)
        return routing


def check_routers(routers: Sequence[Router]) -> None:
    """Refuse broken routing, once a step in one synchronisation: the Triton kernel counts what the reference refuses.

    Raises:
        ValueError: the first router with NaN or infinite logits since the last look, and in how many tokens.
    """
    if not routers:
        return
    counts = torch.stack([router.uncounted.tokens for router in routers]).tolist()
    for router, count in zip(routers, counts, strict=True):
        router.uncounted.tokens.zero_()
        if count:
            raise ValueError(
                f"{router.name}: router logits must be finite and margins need reserved room, got NaN, infinity or no "
                f"room in {count} tokens of this step"
            )


def z_loss(routing: Routing) -> Tensor:
    """``mean_t logsumexp(z[t])**2`` over valid tokens, 0-dim; 0 without a token.

    Reference: Zoph et al., arXiv 2202.08906.
    """
    squares = routing.logits.float().logsumexp(-1).square()
    if routing.valid is not None:
        squares = squares * routing.valid
    return squares.sum() / routing.num_valid.clamp(min=1)


class SwiGLU(nn.Module):
    """``W_out (silu(W_gate x) * W_up x)``, the two input matrices in one."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w_in = nn.Linear(width, 2 * hidden, bias=False)
        self.w_out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., D]`` to ``[..., D]``."""
        gate, up = self.w_in(x).chunk(2, dim=-1)
        return self.w_out(F.silu(gate) * up)


class Experts(nn.Module):
    """``E`` SwiGLU experts whose weights lie in two tensors, applied to tokens sorted by expert.

    Attributes:
        group: the ranks that share out the experts in their order; None if all are here.
    """

    def __init__(self, num_experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.group: dist.ProcessGroup | None = None
        self.w_in = nn.Parameter(torch.empty(num_experts, width, 2 * hidden))
        self.w_out = nn.Parameter(torch.empty(num_experts, hidden, width))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """``x [N, D]`` sorted by expert, ``counts [E]`` rows of each that is here, to ``[N, D]``."""
        w_in, w_out = _local(self.w_in), _local(self.w_out)
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, w_in, w_out = x.to(dtype), w_in.to(dtype), w_out.to(dtype)
        multiply = _grouped if _grouped_applies(x, w_in, w_out) else _looped
        gate, up = multiply(x, w_in, counts).chunk(2, dim=-1)
        return multiply(F.silu(gate) * up, w_out, counts)


def _local(weight: Tensor) -> Tensor:
    """Of a DTensor, whose module takes seconds to import, what is here."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def _grouped_applies(x: Tensor, *weights: Tensor) -> bool:
    """``F.grouped_mm`` wants rows of a multiple of 16 bytes, and bf16 on a GPU."""
    aligned = all(size * x.element_size() % 16 == 0 for weight in weights for size in weight.shape[1:])
    return aligned and (x.device.type == "cpu" or x.dtype == torch.bfloat16)


def _grouped(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return F.grouped_mm(x, weight, offs=counts.cumsum(0).int())


def _looped(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    parts = x.split(counts.tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, weight, strict=True)])


class MoE(nn.Module):
    """Router, experts and an optional shared expert that sees every token.

    Args:
        router, experts, shared: the parts.
        capacity_factor: an expert takes at most ``ceil(capacity_factor * T * K / E)`` choices of the ``T`` valid tokens
            of a microbatch, those of the first tokens; the others are dropped, so that their tokens lack that expert's
            output. Negative: off, nothing is dropped. Loads and losses are those of the choices before dropping.

    Attributes:
        dropped_share: 0-dim fp64, share of the valid tokens' choices that the last forward dropped; None when off.

    Raises:
        ValueError: ``capacity_factor`` with a balancer that needs dropless dispatch.
    """

    def __init__(
        self, router: Router, experts: Experts, shared: SwiGLU | None = None, capacity_factor: float = -1.0
    ) -> None:
        super().__init__()
        if capacity_factor >= 0 and router.bias is not None and router.bias.needs_dropless:
            raise ValueError(
                f"capacity_factor={capacity_factor} does not go with {type(router.bias).__name__}: a quantile of the "
                "margins balances the choices of all tokens, and an expert that drops some of them is not served that "
                "load; use capacity_factor=-1 (off) or another bias balancer"
            )
        self.router = router
        self.experts = experts
        self.shared = shared
        self.capacity_factor = capacity_factor
        self.dropped_share: Tensor | None = None

    def forward(self, x: Tensor, valid: Tensor | None = None, forced: Tensor | None = None) -> Tensor:
        """``[B, S, D]`` to ``[B, S, D]``; ``valid [B, S]`` and ``forced [B*S, K]`` as in ``Router``."""
        tokens = x.flatten(0, 1)
        routing = self.router(tokens, None if valid is None else valid.flatten(), x.shape[0], forced)
        kept = None
        if self.capacity_factor >= 0:
            kept = within_capacity(routing, self.capacity_factor)
            choices = routing.num_valid * routing.top_k
            self.dropped_share = (choices - kept.sum()).double() / choices.clamp(min=1)
        out = combine(self.experts, tokens, routing.experts, routing.weights, kept)
        if self.shared is not None:
            out = out + self.shared(tokens)
        return out.view_as(x)


def within_capacity(routing: Routing, capacity_factor: float) -> Tensor:
    """Which choices their experts have room for, ``[T, K]`` bool: first come, first served; padding takes none.

    >>> routing = route(torch.tensor([[2.0, 0.0], [3.0, 0.0], [0.0, 1.0], [1.0, 0.0]]), None, 1)
    >>> within_capacity(routing, 1.0).flatten().tolist()
    [True, True, True, False]
    """
    num_experts = routing.num_experts
    chosen = routing.experts
    if routing.valid is not None:
        # an expert of its own, which has no room
        chosen = chosen.where(routing.valid[:, None], num_experts)
    chosen = chosen.flatten()
    order = chosen.argsort(stable=True)
    counts = chosen.bincount(minlength=num_experts + 1)
    first = counts.cumsum(0) - counts
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device) - first[chosen[order]]
    # as it is written: 1.1 is 11/10, and its product with a whole number is not rounded up by mistake
    factor = Fraction(str(capacity_factor))
    choices = routing.num_valid * routing.top_k * factor.numerator
    room = -(-choices // (num_experts * factor.denominator))
    return ((place < room) & (chosen < num_experts)).view_as(routing.experts)


def combine(experts: Experts, x: Tensor, chosen: Tensor, weights: Tensor, kept: Tensor | None = None) -> Tensor:
    """Send ``x [T, D]`` to the ``chosen [T, K]`` experts and add up their outputs by ``weights [T, K]``.

    Choices that are not ``kept [T, K]`` are dropped: they are not sent and add nothing.
    """
    top_k = chosen.shape[1]
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    if kept is not None:
        order = order[kept.flatten()[order]]
        flat = flat[order]
    counts = flat.bincount(minlength=experts.num_experts)
    # copies first, then permutations: no two gradients are added in an order that is left open
    copies = x[:, None].expand(-1, top_k, -1).flatten(0, 1)
    rows = copies.index_select(0, order)
    y = experts(rows, counts) if experts.group is None else run_sharded(experts, rows, counts, experts.group)
    if kept is None:
        y_TKD = y.index_select(0, order.argsort()).unflatten(0, (-1, top_k))
    else:
        y_TKD = y.new_zeros(copies.shape).index_copy(0, order, y).unflatten(0, (-1, top_k))
    return (y_TKD * weights[..., None].to(y.dtype)).sum(1)
