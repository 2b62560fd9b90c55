"""How eight ranks may share out tokens: one update of every bias balancer in each topology.

``T`` tokens, ``E`` experts, ``K`` experts a token.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from equipoise.balancers import BiasBalancer, update_balancers
from equipoise.experiments.parallel.mesh import make_mesh, token_shards
from equipoise.kernels import route

from .collectives import Collectives
from .contract import BIAS, tensors

E, K = 8, 2
NUM_STEPS = 2


@dataclass(frozen=True)
class Topology:
    """Sizes of the mesh, and whether the ranks along ``tp`` hold different tokens."""

    sizes: dict[str, int] = field(default_factory=dict)
    sequence_parallel: bool = False

    def shard(self, rank: int) -> int:
        """Which tokens a rank holds: ``tp`` varies fastest over the ranks."""
        return rank if self.sequence_parallel else rank // self.sizes.get("tp", 1)

    def leads(self, rank: int) -> bool:
        """Whether it is the first of those with its tokens."""
        return rank == 0 or self.shard(rank) != self.shard(rank - 1)

    @property
    def num_shards(self) -> int:
        """Ranks that hold different tokens."""
        return self.shard(7) + 1


TOPOLOGIES = {
    "tp1_ep4": Topology({"dp_shard": 2, "ep": 4}),
    "tp1_ep8": Topology({"ep": 8}),
    "tp4_ep2_sp": Topology({"tp": 4, "ep": 2}, sequence_parallel=True),
    "tp4_ep2": Topology({"tp": 4, "ep": 2}),
    "tp8_sp": Topology({"tp": 8}, sequence_parallel=True),
    "tp8": Topology({"tp": 8}),
    "cp8": Topology({"cp": 8}),
    "tp2_cp4_sp": Topology({"tp": 2, "cp": 4}, sequence_parallel=True),
    "tp2_cp4": Topology({"tp": 2, "cp": 4}),
    "tp2_ep2_cp2_sp": Topology({"tp": 2, "ep": 2, "cp": 2}, sequence_parallel=True),
    "tp2_ep2_cp2": Topology({"tp": 2, "ep": 2, "cp": 2}),
}


def microbatches(shard: int, step: int) -> list[tuple[Tensor, Tensor]]:
    """Logits ``[T, E]`` and mask ``[T]`` of a token shard: each has its own number of tokens and its own favourites.

    Two microbatches in the first step, one in the second. Shard 1 has no token in the first. Every third token is
    padding, with logits that would be noticed.
    """
    found = []
    for index in range(2 - step):
        count = 0 if (shard, step) == (1, 0) else 4 + 3 * shard + index
        generator = torch.Generator().manual_seed(1000 * shard + 10 * step + index)
        logits = torch.randn(count, E, generator=generator) + torch.linspace(-1, 1, E).roll(shard)
        valid = torch.arange(count) % 3 != 1
        found.append((logits.where(valid[:, None], 20 * logits), valid))
    return found


def feed(layer: BiasBalancer, shard: int, step: int) -> None:
    """What a layer sees of a step on the ranks of a shard."""
    for logits, valid in microbatches(shard, step):
        layer.observe(route(logits, layer.bias, K, tally=layer.tally, valid=valid))


@torch.no_grad()
def local_statistic(layer: BiasBalancer) -> Tensor:
    """What this rank brings to the first round; the layer stays as it is."""
    return next(copy.deepcopy(layer).solve()).clone()


def run(topology: Topology, rank: int) -> dict[str, Any]:
    """Two steps of a model that has a layer for every row."""
    group = token_shards(make_mesh("cpu", **topology.sizes), topology.sequence_parallel)
    layers = {row.name: row.build(E, K) for row in BIAS}
    for layer in layers.values():
        layer.reserve(100)
    found: dict[str, Any] = {"local": [], "calls": [], "sums": [], "biases": []}
    found["addresses"] = [{name: addresses(layer) for name, layer in layers.items()}]
    for step in range(NUM_STEPS):
        for layer in layers.values():
            feed(layer, topology.shard(rank), step)
        found["local"].append({name: local_statistic(layer) for name, layer in layers.items()})
        with Collectives() as seen:
            update_balancers(list(layers.values()), group)
        found["calls"].append(seen.calls)
        found["sums"].append(unstack(seen.tensors[:2], found["local"][step]))
        found["biases"].append({name: layer.bias.clone() for name, layer in layers.items()})
        found["addresses"].append({name: addresses(layer) for name, layer in layers.items()})
    return found


def unstack(stacks: list[Tensor], local: dict[str, Tensor]) -> dict[str, Tensor]:
    """By row, what the first round of an update has summed: the layers of a dtype are stacked in their order."""
    parts = {}
    for dtype in {statistic.dtype for statistic in local.values()}:
        names = [name for name, statistic in local.items() if statistic.dtype == dtype]
        # a rank that is the only shard sums nothing
        alone = torch.cat([local[name].flatten() for name in names])
        stack = next((stack for stack in stacks if stack.dtype == dtype), alone)
        parts |= dict(zip(names, stack.split([local[name].numel() for name in names]), strict=True))
    return {name: part.view_as(local[name]).clone() for name, part in parts.items()}


def addresses(layer: BiasBalancer) -> dict[str, int]:
    """Of bias, accumulators and margins."""
    return {name: tensor.data_ptr() for name, tensor in tensors(layer).items()}
