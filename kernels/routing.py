"""Routing: scores, the top K of score + bias, gate weights, cutoff, load and tally in one pass over the logits.

``T`` tokens, ``E`` experts, ``K`` experts a token. The bias decides only which experts are picked; weights come from
the unbiased scores. Ties go to the lowest expert id. This file is the definition and the CPU path, in cache-sized
blocks of tokens; the Triton kernel is in ``fused/route.py``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .backend import use_triton
from .gate import Gate, GateWeights, ShareGradient, widen
from .library import define_op
from .passing import BY_THE_OP, close_tally, open_tally, refuse_other_tally, with_room
from .radix import BLOCK_TOKENS
from .tally import FixedRows, MarginTally, Tally

# what the Triton kernel holds in registers
MAX_EXPERTS = 1024
MAX_TOP_K = 16


@dataclass(frozen=True, eq=False)
class Routing:
    """Where the tokens of one microbatch go. What is fp32 here is fp64 for fp64 logits.

    Args:
        experts: ``[T, K]`` int64, by falling biased score.
        weights: ``[T, K]`` fp32 gate weights from the unbiased scores; carries the gradient to the logits.
        cutoff: ``[T]`` fp32, the (K+1)-th largest biased score.
        load: ``[E]`` int32, assignments of valid tokens.
        valid: ``[T]`` bool, True for a real token and False for padding; None if all are real.
        logits: ``[T, E]`` as given.
        selection: what the bias was added to, ``score`` or ``logit``.
        gate: how scores and weights follow from the logits.
        num_sequences: the tokens are this many sequences of equal length, one after the other.
        tally: the tally that this pass has filled, if any.
        injection, share_gradient, penalty: what gradient balancers have steered so far, see ``steered``.
        forced: the experts were given, see ``replay``; the cutoff is NaN then, and no balancer learns from it.
        uncounted: 0-dim int32, tokens that the Triton kernel could not count: NaN or infinite logits, or no room
            for their margins. Read it once per step. The reference raises instead.
    """

    experts: Tensor
    weights: Tensor
    cutoff: Tensor
    load: Tensor
    valid: Tensor | None
    logits: Tensor = field(repr=False)
    selection: str
    gate: Gate
    num_sequences: int = 1
    tally: Tally | None = field(default=None, repr=False)
    injection: Tensor | None = field(default=None, repr=False)
    share_gradient: ShareGradient | None = field(default=None, repr=False)
    penalty: Tensor | None = field(default=None, repr=False)
    uncounted: Tensor | int = field(default=0, repr=False)
    forced: bool = False

    @property
    def top_k(self) -> int:
        """Experts per token, ``K``."""
        return self.experts.shape[1]

    @property
    def num_experts(self) -> int:
        """Number of experts, ``E``."""
        return self.logits.shape[1]

    @property
    def scores(self) -> Tensor:
        """Unbiased gate scores ``[T, E]`` fp32, recomputed and differentiable."""
        return self.gate.scores(self.logits)

    @property
    def shares(self) -> Tensor:
        """Unbiased scores of a token divided by their sum, ``[T, E]`` fp32, recomputed and differentiable."""
        return self.gate.shares(self.logits)

    @property
    def margins(self) -> Tensor:
        """``cutoff - (what the bias is added to)``, ``[T, E]`` fp32, recomputed, no gradient."""
        return self.cutoff[:, None] - _selection_scores(self.logits.detach(), self.selection, self.gate)

    @property
    def valid_margins(self) -> Tensor:
        """The margins of valid tokens, ``[N, E]`` fp32."""
        return self.margins if self.valid is None else self.margins[self.valid]

    @property
    def num_valid(self) -> Tensor:
        """Number of tokens that count, 0-dim int64."""
        if self.valid is None:
            return torch.tensor(self.logits.shape[0], device=self.logits.device)
        return self.valid.sum()

    def detach(self) -> "Routing":
        """The same numbers without the graph, to look at after the step."""
        weights, logits = self.weights.detach(), self.logits.detach()
        return replace(self, weights=weights, logits=logits, share_gradient=None, penalty=None)

    def steered(
        self,
        *,
        injection: Tensor | None = None,
        share_gradient: ShareGradient | None = None,
        penalty: Tensor | None = None,
        scale: float | Tensor = 1.0,
    ) -> "Routing":
        """The same routing whose backward also carries a balancer's gradient; what was steered before is kept.

        Args:
            injection: ``[E]``, added to the loss gradient of every valid token's unbiased score.
            share_gradient: added to the loss gradient of every valid token's shares.
            penalty: 0-dim, acts as if it were added to the loss.
            scale: the factor by which the mean loss of this microbatch enters the scalar that ``backward()`` is
                called on.

        Raises:
            ValueError: an injection of another size.
        """
        if injection is not None:
            if tuple(injection.shape) != (self.num_experts,):
                raise ValueError(f"injection must be [{self.num_experts}], got {tuple(injection.shape)}")
            injection = injection * scale
            if self.injection is not None:
                injection = injection + self.injection
        else:
            injection = self.injection
        if share_gradient is not None:
            slope = share_gradient.slope * scale
            if self.share_gradient is not None:
                # one row for all tokens is one for each run of tokens
                slope = slope + self.share_gradient.slope
            share_gradient = replace(share_gradient, slope=slope)
        else:
            share_gradient = self.share_gradient
        if penalty is not None:
            penalty = penalty * scale
            if self.penalty is not None:
                penalty = penalty + self.penalty
        else:
            penalty = self.penalty
        args = [self.logits, penalty, self.weights.detach(), self.experts, injection, self.valid, self.gate]
        if share_gradient is not None:
            args += [share_gradient.slope, share_gradient.shares, share_gradient.saved]
        weights = GateWeights.apply(*args)
        return replace(self, weights=weights, injection=injection, share_gradient=share_gradient, penalty=penalty)


def route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    *,
    selection: str = "score",
    tally: Tally | None = None,
    valid: Tensor | None = None,
    gate: str = "sigmoid",
    normalise: bool = False,
    scale: float = 1.0,
    num_sequences: int = 1,
    exact: bool = False,
) -> Routing:
    """Pick the ``top_k`` experts of every token by score + bias and weigh them by their unbiased scores.

    Args:
        logits: ``[T, E]`` router logits, bf16, fp16, fp32 or fp64 (scores are fp32, for fp64 logits fp64); ``T`` may
            be 0.
        bias: ``[E]`` fp32 selection bias, or None for zeros. It gets no gradient.
        top_k: experts per token, ``1 <= top_k < E``.
        selection: add the bias to the ``score`` (Kimi K3, DeepSeek-V3) or to the ``logit`` (Marin, Megatron
            micro_batch).
        tally: counts or keeps the margins of valid tokens in place (``UniformTally``, ``RadixTally``,
            ``MarginTally``).
        valid: ``[T]`` bool, True for real tokens. Padding is routed (so its logits must be finite too), but
            is neither in ``load`` nor in ``tally``.
        gate: ``sigmoid`` or ``softmax`` scores.
        normalise: gate weights of a token sum to ``scale``.
        scale: factor on the gate weights.
        num_sequences: the tokens are this many sequences of equal length, one after the other.
        exact: compare biased scores in fp32 on a GPU too. Without it the Triton kernel compares scores in fixed point,
            to ``(1 + max(b) - min(b)) * 2**-23`` (``2**-22`` for more than 512 experts): it may pick another expert
            where two biased scores at the cut are closer than that. The reference and ``selection="logit"`` are
            always exact.

    Raises:
        ValueError: wrong shapes, ``top_k`` outside ``[1, E)``, an unknown option. On the CPU also logits or a bias
            that are NaN or infinite; nothing has been counted then. The Triton kernel cannot raise without a
            synchronisation: such a token gets the experts 0 to K-1 with weights and cutoff NaN, is left out of every
            counter, and is counted in ``Routing.uncounted``.

    >>> routing = route(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([0.0, 0.0, 0.3, 0.0]), 2)
    >>> routing.experts.tolist(), routing.load.tolist()
    ([[0, 2]], [1, 0, 1, 0])
    """
    options = Gate(gate, normalise, scale)
    _check(logits, bias, top_k, selection, valid, num_sequences)
    fixed = None if bias is None else bias.detach()
    compiling = torch.compiler.is_compiling()
    by_op = compiling or use_triton(logits, _unsupported(logits, top_k))
    refuse_other_tally(tally, logits.shape[1])
    given = (logits.detach(), fixed, valid)
    if by_op:
        run: Callable[..., Any] = _route if compiling else _run
        # what a tally that the op does not know counts must be the margins that the pass has, not others like them
        kept = None if tally is None or isinstance(tally, BY_THE_OP) else FixedRows.empty(logits)
        writes = open_tally(tally if kept is None else MarginTally(kept), len(logits))
        found = run(*given, *writes, top_k, selection, gate, normalise, scale, exact)
        if tally is not None and kept is not None:
            # rows of NaN are tokens that do not count
            tally.add(kept.buffer[~kept.buffer[:, 0].isnan()])
    else:
        # before a tally makes room
        _refuse_infinite(logits.detach(), fixed)
        found = _refer(*given, with_room(tally, len(logits)), top_k, selection, options)
    experts, weights, cutoff, counters = found
    if torch.is_grad_enabled() and logits.requires_grad:
        weights = GateWeights.apply(logits, None, weights, experts, None, valid, options)
    load, uncounted = counters[:-1], counters[-1]
    return Routing(
        experts, weights, cutoff, load, valid, logits, selection, options, num_sequences, tally, uncounted=uncounted
    )


def replay(
    logits: Tensor,
    experts: Tensor,
    *,
    selection: str = "score",
    valid: Tensor | None = None,
    gate: str = "sigmoid",
    normalise: bool = False,
    scale: float = 1.0,
    num_sequences: int = 1,
) -> Routing:
    """Routing to given experts: those of a rollout, say, or of a round for timing.

    Weights and their gradient are those of ``route`` when it picks the same experts. There is no cutoff, so balancers
    are frozen for this forward, and say so; every rank must force the same forwards.

    Args:
        logits: ``[T, E]`` as in ``route``.
        experts: ``[T, K]`` int64, distinct for a token; their order is kept, padding has experts too.
        selection, valid, gate, normalise, scale, num_sequences: as in ``route``.

    Raises:
        ValueError: as ``route``, which on a GPU leaves NaN to ``uncounted``; ``experts`` of another shape or dtype,
            outside ``[0, E)``, or with one twice for a token. Reading the values on a GPU is a synchronisation;
            compiled code does not.

    >>> routing = replay(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([[3, 0]]))
    >>> routing.load.tolist(), routing.forced
    ([1, 0, 0, 1], True)
    """
    options = Gate(gate, normalise, scale)
    if experts.dim() != 2 or experts.dtype != torch.int64:
        raise ValueError(f"experts must be int64 [tokens, experts a token], got {experts.dtype} {tuple(experts.shape)}")
    _check(logits, None, experts.shape[1], selection, valid, num_sequences)
    if len(experts) != len(logits):
        raise ValueError(f"experts must be [{len(logits)}, K], one row for each row of logits, got {len(experts)} rows")
    if not torch.compiler.is_compiling():
        _check_experts(experts, logits.shape[1])
        if not use_triton(logits, _unsupported(logits, experts.shape[1])):
            _refuse_infinite(logits.detach(), None)
    weights = options.weights(logits.detach(), experts)
    if torch.is_grad_enabled() and logits.requires_grad:
        weights = GateWeights.apply(logits, None, weights, experts, None, valid, options)
    counted = torch.ones_like(experts) if valid is None else valid[:, None].expand_as(experts)
    load = torch.zeros(logits.shape[1], dtype=torch.int32, device=logits.device)
    load.scatter_add_(0, experts.flatten(), counted.flatten().int())
    cutoff = weights.detach().new_full((len(logits),), math.nan)
    # where nothing was refused above, whoever looks at the routing later will see it
    uncounted = (~logits.detach().isfinite()).any(-1).sum(dtype=torch.int32)
    return Routing(
        experts,
        weights,
        cutoff,
        load,
        valid,
        logits,
        selection,
        options,
        num_sequences,
        uncounted=uncounted,
        forced=True,
    )


def _check_experts(experts: Tensor, num_experts: int) -> None:
    outside = ((experts < 0) | (experts >= num_experts)).any(-1)
    ordered = experts.sort(-1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(-1)
    for rows, fault in ((outside, f"an expert outside [0, {num_experts})"), (twice, "an expert twice")):
        if rows.any():
            token = int(rows.nonzero()[0])
            raise ValueError(f"experts must be distinct and in [0, {num_experts}), got {fault} in token {token}")


def _check(
    logits: Tensor, bias: Tensor | None, top_k: int, selection: str, valid: Tensor | None, num_sequences: int
) -> None:
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"logits must be floating point [tokens, experts], got {logits.dtype} {tuple(logits.shape)}")
    num_tokens, num_experts = logits.shape
    if not 1 <= top_k < num_experts:
        raise ValueError(
            f"top_k must be at least 1 and below the number of experts (there is no cutoff otherwise), "
            f"got top_k={top_k} and {num_experts} experts"
        )
    if selection not in ("score", "logit"):
        raise ValueError(f"selection must be 'score' or 'logit', got {selection!r}")
    if bias is not None and tuple(bias.shape) != (num_experts,):
        raise ValueError(f"bias must be [{num_experts}], got {tuple(bias.shape)}")
    if valid is not None and (valid.dtype != torch.bool or tuple(valid.shape) != (num_tokens,)):
        raise ValueError(
            f"valid must be bool [{num_tokens}], True for real tokens, got {valid.dtype} {tuple(valid.shape)}"
        )
    if num_sequences < 1 or num_tokens % num_sequences:
        raise ValueError(f"num_sequences must divide the {num_tokens} tokens, got {num_sequences}")


def _refer(
    logits: Tensor,
    bias: Tensor | None,
    valid: Tensor | None,
    tally: Tally | None,
    top_k: int,
    selection: str,
    gate: Gate,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The reference: experts and weights ``[T, K]``, cutoff ``[T]``, counters ``[E+1]``: the load, then uncounted."""
    experts, cutoff = _select(logits, bias, top_k, selection, gate, tally, valid)
    counted = experts if valid is None else experts[valid]
    counters = torch.bincount(counted.flatten(), minlength=logits.shape[1] + 1).int()
    return experts, gate.weights(logits, experts), cutoff, counters


def _run(
    logits: Tensor,
    bias: Tensor | None,
    valid: Tensor | None,
    counts: Tensor | None,
    clamped: Tensor | None,
    lower: Tensor | None,
    upper: Tensor | None,
    kept: Tensor | None,
    filled: Tensor | None,
    first: Tensor | None,
    levels: int,
    top_k: int,
    selection: str,
    gate: str,
    normalise: bool,
    scale: float,
    exact: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The op: as the reference, by the kernel where there is one for the device."""
    writes = counts, clamped, lower, upper, kept, filled, first, levels
    if not use_triton(logits, _unsupported(logits, top_k)):
        options = Gate(gate, normalise, scale)
        return _refer(logits, bias, valid, close_tally(*writes), top_k, selection, options)
    from .fused.route import route as launch

    return launch(
        logits,
        bias,
        valid,
        *writes,
        top_k=top_k,
        selection=selection,
        gate=gate,
        normalise=normalise,
        scale=scale,
        exact=exact,
    )


def _run_checked(logits: Tensor, bias: Tensor | None, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In compiled code the values are there only when the op runs."""
    top_k = args[9]
    if not use_triton(logits, _unsupported(logits, top_k)):
        _refuse_infinite(logits, bias)
    return _run(logits, bias, *args)


def _shape(logits: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    top_k = args[10]
    wide = torch.promote_types(logits.dtype, torch.float32)
    return (
        logits.new_empty(num_tokens, top_k, dtype=torch.int64),
        logits.new_empty(num_tokens, top_k, dtype=wide),
        logits.new_empty(num_tokens, dtype=wide),
        logits.new_empty(num_experts + 1, dtype=torch.int32),
    )


_route = define_op(
    "route(Tensor logits, Tensor? bias, Tensor? valid, Tensor(a!)? counts, Tensor(b!)? clamped, Tensor? lower, "
    "Tensor? upper, Tensor(c!)? kept, Tensor(d!)? filled, Tensor? first, int levels, int top_k, str selection, "
    "str gate, bool normalise, float scale, bool exact) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_checked,
    _shape,
)


def _unsupported(logits: Tensor, top_k: int) -> str | None:
    """What the kernel has not been made for, in words."""
    if logits.dtype == torch.float64:
        return "it computes in fp32, the logits are fp64"
    if logits.shape[1] > MAX_EXPERTS or top_k > MAX_TOP_K:
        return f"it takes up to {MAX_EXPERTS} experts and top-{MAX_TOP_K}, got {logits.shape[1]} and top-{top_k}"
    return None


def _refuse_infinite(logits: Tensor, bias: Tensor | None) -> None:
    if bias is not None and not _is_finite(bias):
        raise ValueError(f"bias must be finite, got {int((~bias.isfinite()).sum())} of {len(bias)} that are not")
    if not _is_finite(logits):
        rows = int((~logits.isfinite().all(-1)).sum())
        raise ValueError(f"router logits must be finite, got NaN or infinity in {rows} of {len(logits)} tokens")


def _is_finite(values: Tensor) -> bool:
    # NaN and infinity stay in a sum, in which numbers may overflow too
    return math.isfinite(values.sum()) or bool(values.isfinite().all())


def _selection_scores(logits: Tensor, selection: str, gate: Gate) -> Tensor:
    """What the bias is added to, ``[T, E]``."""
    return gate.scores(logits) if selection == "score" else widen(logits)


def _select(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    selection: str,
    gate: Gate,
    tally: Tally | None,
    valid: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Experts ``[T, K]`` and cutoff ``[T]``; fills the tally while a block's scores are in the cache."""
    experts, cutoff = [], []
    start = 0
    for block in logits.split(BLOCK_TOKENS):
        scores = _selection_scores(block, selection, gate)
        values, order = top_experts(scores if bias is None else scores + bias.detach(), top_k + 1)
        experts.append(order[:, :top_k])
        cutoff.append(values[:, top_k])
        if tally is not None:
            margins = cutoff[-1][:, None] - scores
            tally.add(margins if valid is None else margins[valid[start : start + len(block)]])
        start += len(block)
    return torch.cat(experts), torch.cat(cutoff)


def top_experts(biased: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of every row and their experts, falling; equal values in the order of the expert ids.

    ``torch.topk`` leaves the order of ties open, so rows that have one among their values are sorted again, stably.

    >>> top_experts(torch.tensor([[0.5, 0.7, 0.5, 0.5]]), 3)[1].tolist()
    [[1, 0, 2]]
    """
    values, experts = biased.topk(count, dim=-1)
    tied = (values[:, 1:] == values[:, :-1]).any(-1)
    if tied.any():
        experts[tied] = biased[tied].sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return values, experts
