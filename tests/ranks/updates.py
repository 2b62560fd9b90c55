"""Updates over groups of two, four and eight ranks; the loss of a global scope; pipeline stages; ranks that differ.

``E`` experts, ``K`` experts a token.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from equipoise.balancers import (
    BiasBalancer,
    ExactQB,
    GShard,
    HistogramQB,
    RankAveragedQB,
    SignedCount,
    update_balancers,
)
from equipoise.balancers.update import check_replicas
from equipoise.kernels import route

from .collectives import Collectives
from .contract import BIAS

E, K = 7, 2
GROUPS = {size: [list(range(first, first + size)) for first in range(0, 8, size)] for size in (2, 4, 8)}
# pipeline stages: their ranks, and whether they have layers
STAGES = {"with_layers": range(5), "without_layers": range(5, 8)}


def build_layers() -> list[BiasBalancer]:
    """Layers that need 2, 1, 4, 1, 0 and 1 rounds; the last sums floats, all others integers."""
    return [
        ExactQB(E, K),
        HistogramQB(E, K, num_bins=50),
        ExactQB(E, K, key="fp32", order="q_plus_1", ema=0.25),
        SignedCount(E, K, rule="proportional", centred=True),
        HistogramQB(E, K, frozen=True),
        RankAveragedQB(E, K),
    ]


def tokens(rank: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits of a rank that differ in number and favourites from those of other ranks; rank 1 sometimes has none."""
    generator = torch.Generator().manual_seed(100 * rank + seed)
    count = 0 if rank == 1 and seed % 2 else 5 + 3 * rank
    skew = torch.linspace(-2, 2, E, dtype=dtype).roll(rank)
    return torch.randn(count, E, generator=generator, dtype=dtype) + skew


def feed(layers: list[BiasBalancer], rank: int, step: int) -> None:
    """Three microbatches of one step, the same in all layers."""
    for microbatch in range(3):
        logits = tokens(rank, 10 * step + microbatch)
        for layer in layers:
            layer.observe(route(logits, layer.bias, K, tally=layer.tally))


def run(rank: int) -> dict[int, dict[str, Any]]:
    """By size of the groups, biases after each of two steps, and the collectives of the second."""
    found = {}
    for size, members in GROUPS.items():
        group, _ = dist.new_subgroups_by_enumeration(members)
        layers = build_layers()
        biases = []
        for step in range(2):
            feed(layers, rank, step)
            with Collectives() as seen:
                update_balancers(nn.ModuleList(layers), group)
            biases.append([layer.bias.clone() for layer in layers])
        found[size] = {"biases": biases, "calls": seen.calls}
    return found


def run_observed(rank: int) -> dict[str, Any]:
    """Three steps of candidates that are observed again, beside the full selection: biases, fallbacks, forwards."""
    lean = {
        "cut": ExactQB(E, K, candidates="cut", fallback="observe"),
        "window": ExactQB(E, K, key="fixed12", candidates="window", fallback="observe"),
    }
    full = {"cut": ExactQB(E, K), "window": ExactQB(E, K, key="fixed12")}
    found: dict[str, Any] = {"lean": [], "full": [], "fallbacks": [], "forwards": []}
    for step in range(3):
        forwards = 0

        def forward(step: int = step) -> None:
            nonlocal forwards
            forwards += 1
            feed([*lean.values(), *full.values()], rank, step)

        forward()
        update_balancers([*lean.values(), *full.values()], observe_again=forward)
        for name, layers in (("lean", lean), ("full", full)):
            found[name].append([layer.bias.clone() for layer in layers.values()])
        found["fallbacks"].append([layer.diagnostics()["fallback_share"].item() for layer in lean.values()])
        found["forwards"].append(forwards)
    return found


def run_global_loss(rank: int) -> dict[str, Any]:
    """One microbatch of the global loss over all ranks; the last rank has padding only."""
    balancer = GShard(E, K, scope="global")
    logits = tokens(rank, 0, torch.float64).requires_grad_()
    valid = torch.full((len(logits),), rank != 7)
    routing = balancer.steer(route(logits, None, K, valid=valid))
    routing.weights.square().sum().backward()
    assert logits.grad is not None
    return {
        "local_load": routing.load,
        "step_load": balancer.step_load,
        "mean_shares": routing.shares[valid].detach().mean(0),
        "value": balancer.last_value,
        "finite": bool(logits.grad.isfinite().all()),
    }


def build_stage(kind: Any) -> list[BiasBalancer]:
    """Three layers of a row of the contract, the one in the middle frozen."""
    return [kind.build(E, K, frozen=frozen) for frozen in (False, True, False)]


def run_stages(rank: int) -> dict[str, list[Tensor]]:
    """Biases by row after one update; each stage updates its layers over its own ranks."""
    groups = {name: dist.new_group(list(members)) for name, members in STAGES.items()}
    if rank in STAGES["without_layers"]:
        update_balancers(nn.Linear(2, 2), groups["without_layers"])
        return {}
    stages = {row.name: build_stage(row) for row in BIAS}
    for layers in stages.values():
        feed(layers, rank, 0)
    update_balancers([layer for layers in stages.values() for layer in layers], groups["with_layers"])
    return {name: [layer.bias.clone() for layer in layers] for name, layers in stages.items()}


def differing(how: str, rank: int) -> list[Any]:
    """Layers of a rank, among which rank 3 is an exception."""
    layers: list[Any] = [*build_layers(), GShard(E, K)]
    if rank == 3:
        if how == "fewer_layers":
            layers.pop()
        elif how == "other_class":
            layers[3] = RankAveragedQB(E, K)
        elif how == "other_option":
            layers[1] = HistogramQB(E, K, num_bins=60)
        elif how == "frozen":
            layers[0].frozen = True
        elif how == "other_bias":
            layers[2].bias[4] = 1e-7
        elif how == "other_scope":
            layers[6] = GShard(E, K, scope="global")
    return layers


DIFFERENCES = ("none", "fewer_layers", "other_class", "other_option", "frozen", "other_bias", "other_scope")


def run_replicas(rank: int) -> dict[str, str | None]:
    """By how rank 3 differs, the error that each rank sees."""
    found: dict[str, str | None] = {}
    for how in DIFFERENCES:
        found[how] = None
        try:
            check_replicas(differing(how, rank))
        except ValueError as error:
            found[how] = str(error)
    return found
