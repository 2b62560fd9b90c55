"""Gate weights of the chosen experts, from the unbiased scores, and their gradient.

``T`` tokens, ``E`` experts, ``K`` experts a token. The backward pass writes the whole gradient of the logits
``[T, E]`` at once: the gate weights' own, and a per-expert vector that a gradient balancer adds to the score
gradient of every valid token.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .backend import use_triton
from .library import define_op


@dataclass(frozen=True, eq=False)
class ShareGradient:
    """A gradient with respect to shares, and what takes it on to the logits.

    Args:
        slope: ``[N, E]``, the gradient of the shares of every valid token of each of ``N`` runs of tokens.
        shares: ``[T, E]`` from ``Gate.shares_and_saved``, without a graph.
        saved: from there too.
    """

    slope: Tensor
    shares: Tensor
    saved: Tensor | None


@dataclass(frozen=True)
class Gate:
    """How gate weights follow from logits.

    Args:
        score: ``sigmoid`` (DeepSeek-V3, Kimi K3) or ``softmax`` over all experts.
        normalise: divide the weights of a token by their sum.
        scale: factor on the weights.
    """

    score: str = "sigmoid"
    normalise: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.score not in ("sigmoid", "softmax"):
            raise ValueError(f"gate score must be 'sigmoid' or 'softmax', got {self.score!r}")

    def scores(self, logits: Tensor) -> Tensor:
        """Unbiased scores ``[T, E]`` in fp32 (fp64 for fp64 logits), differentiable."""
        wide = widen(logits)
        return sigmoid(wide) if self.score == "sigmoid" else wide.softmax(-1)

    def weights(self, logits: Tensor, experts: Tensor) -> Tensor:
        """Weights ``[T, K]`` of the chosen ``experts [T, K]``."""
        if self.normalise:
            # s_i / sum s as a softmax of log s: no epsilon, and right even where every score underflows
            return self.scale * self._log_scores(logits, experts).softmax(-1)
        if self.score == "sigmoid":
            return self.scale * sigmoid(widen(logits).gather(-1, experts))
        return self.scale * self.scores(logits).gather(-1, experts)

    def shares(self, logits: Tensor) -> Tensor:
        """Scores divided by their sum over experts, ``[T, E]``, differentiable; right if all scores underflow too."""
        wide = widen(logits)
        return (F.logsigmoid(wide) if self.score == "sigmoid" else wide).softmax(-1)

    def shares_and_saved(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Shares, and what ``shares_gradient`` needs beside them."""
        if self.score == "softmax":
            return widen(logits).softmax(-1), None
        logs, saved = torch.ops.aten.log_sigmoid_forward(widen(logits))
        return logs.softmax(-1), saved

    def shares_gradient(self, logits: Tensor, shares: Tensor, saved: Tensor | None, grad_shares: Tensor) -> Tensor:
        """Gradient ``[T, E]`` of the logits from that of the shares, as autograd computes it from ``shares``."""
        gradient = torch.ops.aten._softmax_backward_data(grad_shares, shares, -1, shares.dtype)
        if saved is not None:
            gradient = torch.ops.aten.log_sigmoid_backward(gradient, widen(logits), saved)
        return gradient.to(logits.dtype)

    def _log_scores(self, logits: Tensor, experts: Tensor) -> Tensor:
        """Logarithms of the chosen scores, up to a constant per token."""
        chosen = widen(logits).gather(-1, experts)
        return F.logsigmoid(chosen) if self.score == "sigmoid" else chosen

    def gradient(self, logits: Tensor, experts: Tensor, grad_weights: Tensor, grad_scores: Tensor | None) -> Tensor:
        """Gradient ``[T, E]`` of the logits from that of the weights ``[T, K]`` and of the scores ``[T, E]``."""
        grad_chosen = grad_weights * self.scale
        if self.normalise:
            shares = self._log_scores(logits, experts).softmax(-1)
            grad_logs = shares * (grad_chosen - (grad_chosen * shares).sum(-1, keepdim=True))
            if self.score == "sigmoid":
                # d log sigmoid(z) / dz = sigmoid(-z)
                grad_logs = grad_logs * sigmoid(-widen(logits).gather(-1, experts))
            if grad_scores is None:
                return torch.zeros_like(logits, dtype=grad_logs.dtype).scatter_(-1, experts, grad_logs)
            return self._through_scores(logits, grad_scores).scatter_add_(-1, experts, grad_logs)
        if grad_scores is None:
            grad_scores = torch.zeros_like(logits, dtype=grad_chosen.dtype)
        return self._through_scores(logits, grad_scores.scatter_add(-1, experts, grad_chosen))

    def _through_scores(self, logits: Tensor, grad_scores: Tensor) -> Tensor:
        scores = self.scores(logits)
        if self.score == "sigmoid":
            return grad_scores * (scores * (1 - scores))
        return scores * (grad_scores - (grad_scores * scores).sum(-1, keepdim=True))


def widen(logits: Tensor) -> Tensor:
    """At least fp32: bf16 and fp16 become fp32, fp64 stays."""
    return logits if logits.dtype == torch.float64 else logits.float()


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        scores = _sigmoid(logits)
        ctx.save_for_backward(scores)
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (scores,) = ctx.saved_tensors
        return grad * (scores * (1 - scores))


def sigmoid(logits: Tensor) -> Tensor:
    """``1 / (1 + exp(-z))``, the same bits for an element wherever it stands in the tensor.

    ``torch.sigmoid`` rounds the elements at the end of a tensor differently from the rest (vector code, then scalar
    code), so a token's score would depend on how the tokens are split into microbatches.
    """
    return _Sigmoid.apply(logits) if logits.requires_grad and torch.is_grad_enabled() else _sigmoid(logits)


def _sigmoid(logits: Tensor) -> Tensor:
    return logits.neg().exp_().add_(1).reciprocal_()


class GateWeights(torch.autograd.Function):
    """Identity on the weights; its backward is the gradient of the gate plus what a balancer steers.

    ``penalty`` (0-dim) receives the gradient 1, as if it had been added to the loss; ``injection [E]`` is added to
    the score gradient of every valid token; ``slope [N, E]`` is added to the gradient of the ``shares [T, E]`` of every
    valid token, with one row for each of ``N`` runs of tokens.

    Injection and slope are no saved tensors: activation checkpointing drops those and makes them again, and by then a
    load of the step so far is another one, and a load summed over ranks would need a collective. A plain attribute
    stays what it was in the first forward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        penalty: Tensor | None,
        weights: Tensor,
        experts: Tensor,
        injection: Tensor | None,
        valid: Tensor | None,
        gate: Gate,
        slope: Tensor | None = None,
        shares: Tensor | None = None,
        saved: Tensor | None = None,
    ) -> Tensor:
        ctx.save_for_backward(logits, experts, valid, shares, saved)
        ctx.gate = gate
        ctx.injection = injection
        ctx.slope = slope
        ctx.grad_penalty = None if penalty is None else torch.ones_like(penalty)
        return weights.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
        logits, experts, valid, shares, saved = ctx.saved_tensors
        grad_logits = None
        if ctx.needs_input_grad[0]:
            gate = ctx.gate
            run = _route_backward if torch.compiler.is_compiling() else _run_backward
            options = gate.score, gate.normalise, gate.scale
            grad_logits = run(logits, experts, grad_weights, ctx.injection, valid, *options)
            if ctx.slope is not None:
                grad_shares = _per_token(ctx.slope, len(logits))
                if valid is not None:
                    grad_shares = grad_shares * valid[:, None]
                grad_logits += gate.shares_gradient(logits, shares, saved, grad_shares)
        return grad_logits, ctx.grad_penalty, *[None] * 8


def _per_token(rows_NE: Tensor, num_tokens: int) -> Tensor:
    """The row of its run for every token, ``[T, E]``."""
    if len(rows_NE) == 1:
        return rows_NE.expand(num_tokens, -1)
    return rows_NE.repeat_interleave(num_tokens // len(rows_NE), dim=0)


def _run_backward(
    logits: Tensor,
    experts: Tensor,
    grad_weights: Tensor,
    injection: Tensor | None,
    valid: Tensor | None,
    gate: str,
    normalise: bool,
    scale: float,
) -> Tensor:
    """Gradient ``[T, E]`` of the logits, in their dtype."""
    unsupported = "it computes in fp32, the logits are fp64" if logits.dtype == torch.float64 else None
    if use_triton(logits, unsupported):
        from .fused.route_backward import route_backward as launch

        return launch(logits, experts, grad_weights, injection, valid, gate=gate, normalise=normalise, scale=scale)
    grad_scores = None
    if injection is not None:
        grad_scores = injection.to(grad_weights.dtype).expand(logits.shape)
        if valid is not None:
            grad_scores = grad_scores * valid[:, None]
    gradient = Gate(gate, normalise, scale).gradient(logits, experts, grad_weights, grad_scores)
    return gradient.to(logits.dtype)


def _shape_backward(logits: Tensor, *args: Any) -> Tensor:
    return logits.new_empty(logits.shape)


_route_backward = define_op(
    "route_backward(Tensor logits, Tensor experts, Tensor grad_weights, Tensor? injection, Tensor? valid, str gate, "
    "bool normalise, float scale) -> Tensor",
    _run_backward,
    _shape_backward,
)
