"""The metrics of an optimizer step, over microbatches, ranks and layers.

``M`` microbatches of a rank, ``L`` mixture-of-experts layers, ``E`` experts.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..balancers.metrics import (
    dead_share,
    device_max_violation,
    intervention_rate,
    load_cv,
    load_entropy,
    max_violation,
)
from ..balancers.update import sum_over_shards
from .moe import MoE, z_loss
from .parallel import Ranks


class Meter:
    """Collects what the microbatches of one optimizer step show on this rank; ``finish`` sums it over ranks."""

    def __init__(self, moe_layers: Sequence[MoE], ranks: Ranks) -> None:
        self.moe_layers = moe_layers
        self.ranks = ranks
        self.losses: list[Tensor] = []
        self.layers: list[list[dict[str, Tensor]]] = []

    def add(self, loss: Tensor) -> None:
        """Take in a microbatch after its forward: its language-model loss (mean nats per token) and what was routed."""
        self.losses.append(loss.detach().double())
        self.layers.append([_observe(layer) for layer in self.moe_layers])

    def finish(self) -> tuple[dict[str, Any], Tensor, Tensor]:
        """The metrics of the step, equal on all ranks, its global load ``[L, E]`` int64 and the bias ``[L, E]``, CPU.

        The bias is that after the step's update, fp32, NaN where a layer has none.

        What is not a load is a mean over the microbatches of all ranks.
        """
        losses_M = torch.stack(self.losses)
        names = self.layers[0][0] if self.moe_layers else {}
        by_name = {name: torch.stack([_column(layers, name) for layers in self.layers]) for name in names}
        worst = by_name["local_maxvio"].amax() if self.moe_layers else losses_M.new_zeros(())
        sums = {"count": torch.ones_like(losses_M).sum(), "loss": losses_M.sum()}
        sums |= {name: values.sum(0) for name, values in by_name.items()}
        # counts are exact in fp64, so one collective takes everything
        totals = dict(zip(sums, sum_over_shards(list(sums.values()), self.ranks.token_shards), strict=True))
        largest = self.ranks.max(worst.reshape(1)).item()
        self.losses, self.layers = [], []
        means = {name: total.cpu() / totals["count"].cpu() for name, total in totals.items()}
        row: dict[str, Any] = {"loss": means["loss"].item(), "global_maxvio": None, "local_maxvio": None}
        if not self.moe_layers:
            return row, torch.zeros(0, 0, dtype=torch.int64), torch.zeros(0, 0)
        load_LE = totals["load"].cpu().long()
        local_L = means["local_maxvio"]
        row |= _load_metrics(load_LE)
        row |= {"local_maxvio": local_L.max().item(), "local_maxvio_mean": local_L.mean().item()}
        row |= {"local_maxvio_max": largest, "intervention": means["intervention"].mean().item()}
        for name in ("balance_loss", "z_loss", "dropped_share"):
            row[name] = means[name].mean().item() if name in means else None
        row["layers"] = {"global_maxvio": max_violation(load_LE).tolist(), "local_maxvio": local_L.tolist()}
        return row | self._bias_metrics(), load_LE, self._bias(load_LE)

    def _bias(self, load_LE: Tensor) -> Tensor:
        missing = torch.full(load_LE.shape[1:], math.nan)
        biases = [layer.router.bias for layer in self.moe_layers]
        return torch.stack([missing if balancer is None else balancer.bias.detach().cpu() for balancer in biases])

    def _bias_metrics(self) -> dict[str, float | None]:
        balancers = [layer.router.bias for layer in self.moe_layers if layer.router.bias is not None]
        row: dict[str, float | None] = dict.fromkeys(("bias_min", "bias_max", "bias_norm", "clamped_share"))
        if balancers:
            bias_LE = torch.stack([balancer.bias for balancer in balancers])
            row |= {"bias_min": bias_LE.min().item(), "bias_max": bias_LE.max().item()}
            row["bias_norm"] = bias_LE.norm(dim=-1).mean().item()
        for balancer in balancers:
            for name, value in balancer.diagnostics().items():
                row[name] = max(row.get(name) or 0.0, value.item())
        return row


def _observe(layer: MoE) -> dict[str, Tensor]:
    """What one layer showed on one microbatch, fp64."""
    router = layer.router
    routing = router.last
    assert routing is not None, "measured before the first forward"
    seen = {
        "load": routing.load.double(),
        "local_maxvio": max_violation(routing.load),
        "intervention": intervention_rate(routing),
    }
    if router.gradient is not None and router.gradient.last_value is not None:
        seen["balance_loss"] = router.gradient.last_value.double()
    if router.z_loss:
        seen["z_loss"] = z_loss(routing).double()
    if layer.dropped_share is not None:
        seen["dropped_share"] = layer.dropped_share
    return seen


def _column(layers: list[dict[str, Tensor]], name: str) -> Tensor:
    """One measure of all layers, ``[L, ...]``."""
    return torch.stack([layer[name] for layer in layers])


def _load_metrics(load_LE: Tensor) -> dict[str, Any]:
    vio = max_violation(load_LE)
    num_experts = load_LE.shape[-1]
    devices = [2**power for power in range(1, num_experts.bit_length()) if num_experts % 2**power == 0]
    return {
        "global_maxvio": vio.max().item(),
        "global_maxvio_mean": vio.mean().item(),
        "dead_share": dead_share(load_LE).mean().item(),
        "load_cv": load_cv(load_LE).mean().item(),
        "load_entropy": load_entropy(load_LE).mean().item(),
        "device_maxvio": {
            str(count): device_max_violation(load_LE, count).max().item() for count in devices if count < num_experts
        },
    }
