"""The metrics of an optimizer step, over microbatches, ranks and layers.

``M`` microbatches of a rank, ``L`` mixture-of-experts layers, ``E`` experts.
"""

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
from .moe import Router
from .parallel import Ranks


class Meter:
    """Collects losses and loads of the microbatches of one optimizer step; ``finish`` sums them over ranks."""

    def __init__(self, routers: Sequence[Router], ranks: Ranks) -> None:
        self.routers = routers
        self.ranks = ranks
        self.losses: list[Tensor] = []
        self.loads: list[Tensor] = []

    def add(self, loss: Tensor) -> None:
        """Take in a microbatch after its forward: its language-model loss (mean nats per token) and the loads."""
        self.losses.append(loss.detach().double())
        if self.routers:
            self.loads.append(torch.stack([_last(router).load for router in self.routers]))

    def finish(self) -> tuple[dict[str, Any], Tensor]:
        """The metrics of the step, equal on all ranks, and its global load ``[L, E]`` int64 on the CPU.

        The intervention rate is measured on the last microbatch of every rank.
        """
        count = len(self.losses)
        sums = [torch.stack(self.losses).sum()[None], self.losses[0].new_tensor([count])]
        worst = self.losses[0].new_zeros(len(self.routers))
        if self.routers:
            loads_MLE = torch.stack(self.loads)
            local_ML = max_violation(loads_MLE)
            worst = local_ML.amax(0)
            intervention = torch.stack([intervention_rate(_last(router)) for router in self.routers])
            sums += [local_ML.sum(0), intervention, self._balance_loss(), loads_MLE.sum(0).double().flatten()]
        # one collective for all sums: counts are exact in fp64
        total = self.ranks.sum(torch.cat(sums)).cpu()
        worst = self.ranks.max(worst).cpu()
        self.losses, self.loads = [], []
        num_layers = len(self.routers)
        sizes = [1, 1, *([num_layers] * 3 if num_layers else []), total.numel() - 2 - 3 * num_layers]
        loss, cells, *layers = total.split(sizes if num_layers else [1, 1])
        row: dict[str, Any] = {"loss": (loss / cells).item()}
        if not num_layers:
            return row | {"global_maxvio": None, "local_maxvio": None}, torch.zeros(0, 0, dtype=torch.int64)
        local, intervention, balance, load = layers
        load_LE = load.view(num_layers, -1).long()
        row |= _load_metrics(load_LE) | _local_metrics(local / cells, worst)
        row["intervention"] = (intervention.mean() / self.ranks.world_size).item()
        row["balance_loss"] = (balance.mean() / self.ranks.world_size).item() if self._has_balance_loss() else None
        row["layers"] = {"global_maxvio": max_violation(load_LE).tolist(), "local_maxvio": (local / cells).tolist()}
        return row | self._bias_metrics(), load_LE

    def _has_balance_loss(self) -> bool:
        return any(router.gradient is not None and router.gradient.last_value is not None for router in self.routers)

    def _balance_loss(self) -> Tensor:
        """Coefficient-free balance loss of the last microbatch, ``[L]``; zeros where there is none."""
        values = [None if router.gradient is None else router.gradient.last_value for router in self.routers]
        zero = self.losses[0].new_zeros(())
        return torch.stack([zero if value is None else value.double() for value in values])

    def _bias_metrics(self) -> dict[str, float | None]:
        balancers = [router.bias for router in self.routers if router.bias is not None]
        row: dict[str, float | None] = dict.fromkeys(("bias_min", "bias_max", "bias_norm", "clamped_share"))
        if balancers:
            bias_LE = torch.stack([balancer.bias for balancer in balancers])
            row |= {"bias_min": bias_LE.min().item(), "bias_max": bias_LE.max().item()}
            row["bias_norm"] = bias_LE.norm(dim=-1).mean().item()
        for balancer in balancers:
            for name, value in balancer.diagnostics().items():
                row[name] = max(row.get(name) or 0.0, value.item())
        return row


def _last(router: Router) -> Any:
    assert router.last is not None, "measured before the first forward"
    return router.last


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


def _local_metrics(local_L: Tensor, worst_L: Tensor) -> dict[str, float]:
    return {
        "local_maxvio": local_L.max().item(),
        "local_maxvio_mean": local_L.mean().item(),
        "local_maxvio_max": worst_L.max().item(),
    }
