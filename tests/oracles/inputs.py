"""What both sides are given, and what this project makes of it.

``T`` tokens, ``E`` experts, ``K`` experts a token.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.balancers import GShard
from equipoise.kernels import Routing, route


@dataclass(frozen=True)
class Inputs:
    """Logits ``[T, E]`` fp32, a bias ``[E]`` of sum 0, ``K``, and which tokens ``[T]`` are real, or None for all."""

    name: str
    logits: Tensor
    bias: Tensor
    top_k: int
    valid: Tensor | None

    @property
    def padding(self) -> Tensor | None:
        """True for padding, ``[T]``."""
        return None if self.valid is None else ~self.valid

    @property
    def num_valid(self) -> int:
        """Real tokens."""
        return len(self.logits) if self.valid is None else int(self.valid.sum())

    def leaf(self) -> Tensor:
        """The logits as a leaf that takes a gradient."""
        return self.logits.clone().requires_grad_()

    def route(self, logits: Tensor, gate: str, **options: Any) -> Routing:
        """Our routing of them; softmax scores go without a bias, as Megatron and transformers have them."""
        bias = self.bias if gate == "sigmoid" else None
        return route(logits, bias, self.top_k, gate=gate, valid=self.valid, **options)


def _draw(
    name: str,
    *,
    shape: tuple[int, int],
    top_k: int,
    spread: float = 1.0,
    expert: int = 0,
    lift: float = 0.0,
    real: float = 1.0,
) -> Inputs:
    """Normal logits; ``lift`` is added to those of one expert, and a share ``real`` of the tokens is no padding."""
    generator = torch.Generator().manual_seed(0)
    logits = spread * torch.randn(shape, generator=generator)
    logits[:, expert] += lift
    bias = 0.1 * torch.randn(shape[1], generator=generator)
    valid = None if real == 1.0 else torch.randperm(shape[0], generator=generator) < max(1, real * shape[0])
    for biased in (logits.sigmoid() + bias, logits + bias, logits.softmax(-1)):
        kept = biased.topk(top_k + 1).values
        # nobody says who wins a tie, and OLMo adds 1e-7
        assert (kept[:, :-1] - kept[:, 1:] > 2e-7).all(), name
    return Inputs(name, logits, bias - bias.mean(), top_k, valid)


UNMASKED = [
    _draw("64x8 K=2", shape=(64, 8), top_k=2),
    _draw("48x6 K=1", shape=(48, 6), top_k=1),
    _draw("256x64 K=8, wide logits", shape=(256, 64), top_k=8, spread=3.0),
    _draw("96x16 K=2, an expert without a token", shape=(96, 16), top_k=2, lift=-30.0),
    _draw("96x16 K=2, nearly every token to one expert", shape=(96, 16), top_k=2, expert=5, lift=8.0),
]
MASKED = [
    _draw("37x12 K=3, a third is padding", shape=(37, 12), top_k=3, real=0.67),
    _draw("40x8 K=2, one real token", shape=(40, 8), top_k=2, real=0.0),
]


def gshard(inputs: Inputs, gate: str) -> tuple[Tensor, Tensor]:
    """Our loss without its coefficient, 0-dim, and its gradient ``[T, E]``."""
    logits = inputs.leaf()
    balancer = GShard(logits.shape[1], inputs.top_k, coefficient=1.0)
    steered = balancer.steer(inputs.route(logits, gate))
    steered.weights.mul(0).sum().backward()
    assert balancer.last_value is not None
    assert logits.grad is not None
    return balancer.last_value, logits.grad
