"""The two base classes: a bias balancer acts once per optimizer step, a gradient balancer on every microbatch.

``T`` tokens, ``E`` experts, ``K`` experts a token.
"""

import copy
import warnings
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..kernels import Routing, ShareGradient, Tally

# yields a local statistic, receives its sum over all token shards, returns the next bias [E]
Solve = Generator[Tensor, Tensor, Tensor]


class FixedDtype(nn.Module):
    """A module whose tensors keep their dtype whatever the model is cast to; they do move between devices."""

    def __init__(self) -> None:
        super().__init__()
        self._scratch: list[str] = []

    def add_scratch(self, name: str, tensor: Tensor) -> None:
        """An attribute that follows the module's device and is nobody else's business.

        Not a buffer: it is not saved, and DDP, which by default overwrites the buffers of all ranks with those of
        rank 0 before a forward, leaves it alone.
        """
        setattr(self, name, tensor)
        self._scratch.append(name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FixedDtype":
        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        super()._apply(keep_dtype, recurse)
        for name in self._scratch:
            setattr(self, name, keep_dtype(getattr(self, name)))
        return self


class Balancer(FixedDtype):
    """What both kinds share: the sizes, and accumulators over one optimizer step.

    Attributes:
        accumulators: names of the attributes that ``add_accumulator`` has made.
    """

    def __init__(self, num_experts: int, top_k: int) -> None:
        super().__init__()
        if not (isinstance(num_experts, int) and isinstance(top_k, int) and 1 <= top_k < num_experts):
            raise ValueError(
                f"top_k must be a whole number from 1 to num_experts - 1 (there is no cutoff otherwise), "
                f"got top_k={top_k} and num_experts={num_experts}"
            )
        self.num_experts = num_experts
        self.top_k = top_k
        self.accumulators: list[str] = []
        self._counted = False
        self._awaited = 0
        self._open_task = -1
        self._again = False
        self._warned = False

    def add_accumulator(self, name: str, *shape: int, dtype: torch.dtype = torch.int32) -> None:
        """A zeroed tensor attribute (see ``add_scratch``) that ``reset`` clears in place."""
        self.add_scratch(name, torch.zeros(shape, dtype=dtype))
        self.accumulators.append(name)

    def reset(self) -> None:
        """Drop what was observed since the last update; all addresses stay."""
        for name in self.accumulators:
            getattr(self, name).zero_()
        self._counted = False
        self._awaited = 0
        self._open_task = -1
        self._again = False

    def counts_forward(self) -> bool:
        """Whether the forward at hand counts: training, with gradients, and not the recomputation of one that counted.

        A forward inside a backward pass is a recomputation (activation checkpointing). The non-reentrant kind has
        counted in its first forward; the re-entrant kind ran that one without gradients, and counts in its first
        recomputation with gradients. However they are nested, and however often ``backward`` runs, each counts once.
        The limits of re-entrant checkpointing: a layer must not run both under it and without it in one step, else
        what is under it is not counted; a second ``backward`` through it must follow the first before that of another
        microbatch; and it counts twice after a forward of the same step in training mode without gradients.
        """
        if self._again:
            return self.training
        if not (self.training and torch.is_grad_enabled()):
            return False
        if not _in_backward():
            return True
        # a backward inside one in which a forward counted: non-reentrant inside re-entrant checkpointing
        nested = self._open_task not in (-1, _backward_id())
        return self._awaited > 0 and not self._counted and not nested

    def close_forward(self) -> None:
        """Note that the forward at hand is over, so that its recomputation is known when it comes."""
        if torch.compiler.is_compiling() or not self.training:
            return
        if _in_backward():
            if self.counts_forward():
                self._awaited -= 1
                self._open_task = _backward_id()
                torch.autograd.Variable._execution_engine.queue_callback(self._close_task)
        elif torch.is_grad_enabled():
            self._counted = True
        else:
            self._awaited += 1

    def _close_task(self) -> None:
        self._open_task = -1

    def warn_forced(self) -> None:
        """Say once that a routing was forced, so that nothing is to be learnt from it."""
        if not (self._warned or torch.compiler.is_compiling()):
            self._warned = True
            warnings.warn(
                f"{type(self).__name__} is frozen while routing is forced or replayed: such a forward is neither "
                "observed nor steered",
                stacklevel=3,
            )

    def check_sizes(self, routing: Routing) -> None:
        """Refuse a routing of other sizes.

        Raises:
            ValueError: with both pairs of numbers.
        """
        if (routing.num_experts, routing.top_k) != (self.num_experts, self.top_k):
            raise ValueError(
                f"{type(self).__name__} is made for num_experts={self.num_experts} and top_k={self.top_k}, "
                f"got a routing over num_experts={routing.num_experts} with top_k={routing.top_k}"
            )

    def reset_parameters(self) -> None:
        """Initial state, for a module that was built on the meta device and moved by ``to_empty``."""
        self.reset()


class BiasBalancer(Balancer):
    """Finds the selection bias of one MoE layer, once per optimizer step, from what all token shards saw.

    =============== =========================================== ======================== ===================
    hook            when                                        by whom                  default
    =============== =========================================== ======================== ===================
    ``reserve``     once, before training                       the trainer              nothing
    ``open_tally``  before a forward that counts                the router, ``tally``    None
    ``accumulate``  after a forward that counts                 the router, ``observe``  (required)
    ``solve``       once per optimizer step, layers in lockstep ``update_balancers``     (required)
    ``reset``       after the update; when a step is aborted    ``update_balancers``     clear accumulators
    ``reopen``      when the last ``solve`` was incomplete       ``update_balancers``     observe again
    ``diagnostics`` after the update                            the trainer              nothing
    =============== =========================================== ======================== ===================

    A forward counts when the module is in training mode, gradients are enabled, it is not frozen, its routing is not
    forced (see ``kernels.replay``), and it is not the recomputation of one that has been counted (activation
    checkpointing, see ``counts_forward``). A compiled forward inside an eager checkpoint is not known as a
    recomputation. ``solve`` is a coroutine: it yields a local statistic and receives the sum over all token shards;
    whoever drives it decides what that means. Where no token was counted it returns NaN and the bias stays. An
    estimator that keeps less than it may need sets ``incomplete`` in ``solve``, alike on all ranks: it is then
    reopened, the forwards of the step come once more (``observe_again`` of ``update_balancers``), and ``solve`` runs
    again.

    Args:
        num_experts: ``E``.
        top_k: ``K``, below ``E``.
        ema: in [0, 1); ``b = ema * b + (1 - ema) * b_next``.
        centre: subtract the mean over experts from ``b_next``.
        frozen: neither observes nor updates; may be set at any time.

    Attributes:
        bias: ``[E]`` fp32, added for selection only (``s + b``); the only saved state.
        incomplete: whether the last ``solve`` lacked what it needed; its solution counts for nothing then.
        may_observe_again: of the class or object; whether ``solve`` may leave it ``incomplete``.
        needs_bounded_scores: of the class; whether margins must come from scores in [0, 1].
        needs_dropless: of the class; whether the load that it balances must be what the experts serve. A quantile of
            margins balances the load that is chosen; an expert that drops what is beyond its capacity serves another
            one, and the tokens that it drops still stand in the quantile.

    Raises:
        ValueError: ``top_k`` outside ``[1, num_experts)``, ``ema`` outside ``[0, 1)``, a switch that is no bool.
    """

    bias: Tensor
    may_observe_again = False
    needs_bounded_scores = False
    needs_dropless = False

    def __init__(
        self, num_experts: int, top_k: int, *, ema: float = 0.0, centre: bool = True, frozen: bool = False
    ) -> None:
        super().__init__(num_experts, top_k)
        if not 0.0 <= ema < 1.0:
            raise ValueError(f"ema must be in [0, 1), got {ema}")
        for name, value in {"centre": centre, "frozen": frozen}.items():
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be true or false, got {value!r}")
        self.ema = ema
        self.centre = centre
        self.frozen = frozen
        self.incomplete = False
        self.register_buffer("bias", torch.zeros(num_experts, dtype=torch.float32))

    def reserve(self, num_tokens: int) -> None:
        """Hook: make room for the valid tokens of one optimizer step on this rank, so that no address moves later."""

    def open_tally(self) -> Tally | None:
        """Hook: what the routing pass shall count, or None."""
        return None

    def accumulate(self, routing: Routing) -> None:
        """Hook: take what is needed from the routing of one microbatch."""
        raise NotImplementedError

    def solve(self) -> Solve:
        """Hook: coroutine from local statistics to the next bias ``[E]``, before ``ema`` and centring."""
        raise NotImplementedError

    def reopen(self) -> None:
        """Hook: forget the step, and count the forwards that come until the next ``reset``, also without gradients."""
        self.reset()
        self._again = True

    def diagnostics(self) -> dict[str, Tensor]:
        """Hook: numbers of the last update to log, by name, 0-dim and equal on all ranks."""
        return {}

    @property
    def tally(self) -> Tally | None:
        """What to hand to ``route``: None whenever this forward must not be counted."""
        return None if self.frozen or not self.counts_forward() else self.open_tally()

    def observe(self, routing: Routing) -> None:
        """Take in the routing of one microbatch, if this forward counts; of a forced routing nothing, with a warning.

        Raises:
            ValueError: a routing of other sizes, or of unbounded scores where bounded ones are needed.
        """
        if self.needs_bounded_scores and routing.selection != "score":
            raise ValueError(
                f"{type(self).__name__} bins margins of bounded scores; "
                f"it needs selection='score', got selection={routing.selection!r}"
            )
        self.check_sizes(routing)
        if self.frozen:
            return
        if self.counts_forward():
            if routing.forced:
                self.warn_forced()
            else:
                self.accumulate(routing)
        self.close_forward()

    def adopt(self, solution: Tensor) -> None:
        """Move the bias to what ``solve`` returned, in place; unless all of it is finite the bias stays."""
        target = solution.double()
        if self.centre:
            target = target - target.mean()
        bias = self.bias
        if self.ema:
            target = self.ema * bias + (1 - self.ema) * target
        moved = target.float()
        # a number times 0 is 0, infinity and NaN times 0 are NaN
        torch.where((moved * 0).sum() == 0, moved, bias, out=bias)

    def reset_parameters(self) -> None:
        """Zero bias, empty accumulators."""
        super().reset_parameters()
        self.bias.zero_()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        # load_state_dict(assign=True) puts the stored tensor here, whatever its dtype
        self.bias = self.bias.float()
        error_messages = args[-1]
        if f"{prefix}bias" not in state_dict:
            # also with strict=False: a router that silently starts from a zero bias picks other experts
            error_messages.append(f"the checkpoint has no selection bias {prefix}bias")


class GradientBalancer(Balancer):
    """Shapes the router's gradient on one microbatch; the forward pass stays as it is, bit for bit.

    ================== =================================== ======================== =====================
    hook               when                                by whom                  default
    ================== =================================== ======================== =====================
    ``injection``      in a forward with gradients         the router, ``steer``    None
    ``share_gradient`` in a forward with gradients         the router, ``steer``    None
    ``penalty``        in a forward with gradients         the router, ``steer``    None
    ``reset``          after the optimizer step            ``update_balancers``     clears accumulators
    ================== =================================== ======================== =====================

    **The scale of the gradient.** Let ``n`` be the valid tokens of a microbatch and ``m`` those that this rank holds of
    it, ``m = n`` unless ``microbatch_shards`` share it out. What a token's balancing gradient would be with the whole
    microbatch on one rank (a mean over ``n``), it gets times ``n / m * loss_scale``, as its language-model loss does
    where that is a mean over ``m``. The gradient of a step, averaged over ranks as data parallelism does, then does not
    depend on how its microbatches are spread over ranks and accumulation, nor one microbatch over shards, under

    - mean losses: ``loss_scale = 1 / (microbatches of a rank)``, every rank holds as many valid tokens;
    - token-normalised losses: ``loss_scale = m * (number of ranks) / (valid tokens of the step on all ranks)``, any
      numbers of valid tokens; set for every microbatch.

    Attributes:
        loss_scale: the factor by which the mean loss over this rank's valid tokens of the microbatch enters the scalar
            that ``backward()`` is called on, times a gradient scaler's scale. Set it before the forward; what a
            balancer adds then scales as the language-model loss does.
        token_shards: process group of the ranks that hold different tokens; None is the default group.
        microbatch_shards: process group of the ranks that share out the tokens of one microbatch (context parallel,
            tensor parallel with sequence parallelism); None: this rank holds all of it. Its ranks run the same
            training forwards, and their load is summed in each.
        last_value: coefficient-free value of the last microbatch for the log, or None. A mean over tokens: where ranks
            hold different numbers of valid tokens, its mean over them is weighed by these.
    """

    def __init__(self, num_experts: int, top_k: int) -> None:
        super().__init__(num_experts, top_k)
        self.loss_scale: float | Tensor = 1.0
        self.token_shards: dist.ProcessGroup | None = None
        self.microbatch_shards: dist.ProcessGroup | None = None
        self.last_value: Tensor | None = None
        self.pooled_load: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "GradientBalancer":
        """A copy, for a teacher or an average of weights, in the same process groups, which cannot be copied."""
        memo |= {id(group): group for group in (self.token_shards, self.microbatch_shards)}
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def reset(self) -> None:
        """Drop what was seen since the last update; all addresses stay."""
        super().reset()
        self.pooled_load = None

    def injection(self, routing: Routing) -> Tensor | None:
        """Hook: ``[E]``, added to the loss gradient of every valid token's unbiased score."""
        return None

    def share_gradient(self, routing: Routing) -> ShareGradient | None:
        """Hook: added to the gradient of the mean loss with respect to every valid token's shares."""
        return None

    def penalty(self, routing: Routing) -> Tensor | None:
        """Hook: 0-dim differentiable, acts as if it were added to the microbatch's mean loss."""
        return None

    def steer(self, routing: Routing) -> Routing:
        """The same routing with this balancer's gradient attached; as it is in eval mode and without gradients, and if
        it is forced, then with a warning.

        Raises:
            ValueError: a routing of other sizes.
        """
        self.check_sizes(routing)
        steered = routing
        if self.training and torch.is_grad_enabled():
            if routing.forced:
                self.warn_forced()
            else:
                steered = self._attach(routing)
        self.close_forward()
        return steered

    def _attach(self, routing: Routing) -> Routing:
        steering: dict[str, Any] = {
            "injection": self.injection(routing),
            "share_gradient": self.share_gradient(routing),
            "penalty": self.penalty(routing),
        }
        return routing.steered(**steering, scale=self.loss_scale)


def _in_backward() -> bool:
    """Whether the autograd engine is running a backward pass: a forward inside it is a recomputation.

    Not asked in code that is being compiled: a compiler that recomputes does so without running this again.
    """
    return not torch.compiler.is_compiling() and _backward_id() != -1


def _backward_id() -> int:
    """Number of the backward pass that is running, -1 outside."""
    return torch._C._current_graph_task_id()
