"""DeepSeek's controller: nudge the bias of an expert by the sign of its load error."""

from typing import Any

import torch
from torch import Tensor

from ..kernels import Routing
from .base import BiasBalancer, Solve


class SignedCount(BiasBalancer):
    """``b += rate * sign(mean(c) - c)`` over the load ``c`` of the optimizer step.

    Sums ``E`` int32 over ranks. "DeepSeek-V3 bias" names several rules in public code; ``rule`` and ``centred`` tell
    them apart.

    Args:
        rate: step of the bias per update, in score units.
        rule: ``sign``, with ``sign(0) = 0``, or ``proportional``: ``rate * (mean(c) - c) / mean(c)``.
        centred: subtract the mean of the step over experts (torchtitan); False is the paper's and Megatron's rule.
        shared: ``ema``, ``frozen`` of ``BiasBalancer``.

    Raises:
        ValueError: unknown ``rule``, ``rate`` not positive, ``centre`` given.

    Reference: Wang et al., arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437.
    """

    load: Tensor

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        *,
        rate: float = 1e-3,
        rule: str = "sign",
        centred: bool = False,
        **shared: Any,
    ) -> None:
        if "centre" in shared:
            raise ValueError("SignedCount has a rule of its own: centred=True or False, got centre")
        super().__init__(num_experts, top_k, centre=False, **shared)
        if rule not in ("sign", "proportional"):
            raise ValueError(f"rule must be 'sign' or 'proportional', got {rule!r}")
        if not 0 < rate < float("inf"):
            raise ValueError(f"rate must be positive, got {rate}")
        self.rate = rate
        self.rule = rule
        self.centred = centred
        self.add_accumulator("load", num_experts)

    def accumulate(self, routing: Routing) -> None:
        """Add the load of a microbatch."""
        self.load.add_(routing.load)

    def solve(self) -> Solve:
        """One round: the load."""
        load = (yield self.load).long()
        total = load.sum()
        # E * (mean - c), in integers: a load of 257 against 256 keeps its sign
        error = torch.sub(total, load, alpha=self.num_experts)
        step = error.sign().double() if self.rule == "sign" else error.double() / total
        if self.centred:
            step = step - step.mean()
        return torch.where(total > 0, self.bias + self.rate * step, torch.nan)
