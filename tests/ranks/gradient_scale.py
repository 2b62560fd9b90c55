"""One optimizer step whose microbatches are spread over ranks, accumulation and token shards in many ways.

``T`` tokens, ``D`` width, ``E`` experts, ``K`` experts a token.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from equipoise.balancers import GradientBalancer, GShard, update_balancers
from equipoise.experiments.moe import Router, z_loss
from equipoise.experiments.parallel.mesh import make_mesh, microbatch_shards, token_shards
from equipoise.kernels import Routing, route

from .contract import GRADIENT
from .topologies import Topology

D, E, K = 6, 8, 2
NUM_MICROBATCHES, NUM_SEQUENCES, LENGTH = 8, 2, 8
Z_LOSS = 0.5

# ranks x microbatches of a rank, and over what each microbatch is split; ranks along tp are replicas unless it says sp
LAYOUTS = {
    "1x8": Topology({"tp": 8}),
    "1x8_cp2": Topology({"cp": 2, "tp": 4}),
    "1x8_cp4": Topology({"cp": 4, "tp": 2}),
    "2x4": Topology({"dp_shard": 2, "tp": 4}),
    "2x4_cp2": Topology({"ep": 2, "cp": 2, "tp": 2}),
    "2x4_cp2_tp2_sp": Topology({"dp_replicate": 2, "cp": 2, "tp": 2}, sequence_parallel=True),
    "4x2": Topology({"dp_shard": 2, "ep": 2, "tp": 2}),
    "4x2_tp2_sp": Topology({"ep": 4, "tp": 2}, sequence_parallel=True),
    "8x1": Topology({"ep": 8}),
}
CASES = ("mean_permuted", "mean_padded", "token_ragged")


def microbatch(index: int, case: str) -> tuple[Tensor, Tensor]:
    """``[sequences, length, D]`` fp64 and mask ``[sequences, length]``. A case is named after the normalisation of the
    loss and the tokens.

    ``permuted``: all microbatches have the same tokens, in other orders; ``padded``: in every other microbatch, each
    shard has as much padding; ``ragged``: padding at the end of sequences, so that sequences and shards may be empty.
    """
    shape = NUM_SEQUENCES, LENGTH
    position = torch.arange(LENGTH).expand(shape)
    generator = torch.Generator().manual_seed(0 if case == "mean_permuted" else index)
    x = torch.randn(*shape, D, generator=generator, dtype=torch.float64)
    valid = torch.ones(shape, dtype=torch.bool)
    if case == "mean_permuted":
        order = torch.randperm(NUM_SEQUENCES * LENGTH, generator=torch.Generator().manual_seed(index))
        x = x.flatten(0, 1)[order].view_as(x)
    elif case == "mean_padded":
        valid = (position % 2 == 0) | (index % 2 == 0)
    elif case == "token_ragged":
        lengths = torch.tensor([2 * ((index + 3 * sequence) % 5) for sequence in range(NUM_SEQUENCES)])
        valid = position < lengths[:, None]
    return x, valid


def router_weight() -> Tensor:
    """``[E, D]`` fp64."""
    return torch.randn(E, D, generator=torch.Generator().manual_seed(100), dtype=torch.float64)


class Place:
    """Where a rank stands in a layout."""

    def __init__(self, layout: Topology, rank: int) -> None:
        mesh = make_mesh("cpu", **layout.sizes)
        self.group = token_shards(mesh, layout.sequence_parallel)
        self.microbatch_group = microbatch_shards(mesh, layout.sequence_parallel)
        self.num_ranks = dist.get_world_size(self.group)
        self.num_shards = 1 if self.microbatch_group is None else dist.get_world_size(self.microbatch_group)
        self.accumulation = NUM_MICROBATCHES * self.num_shards // self.num_ranks
        # shards of a microbatch vary faster over the ranks than what holds other microbatches
        self.row, self.shard = divmod(layout.shard(rank), self.num_shards)

    def microbatches(self, case: str) -> list[tuple[Tensor, Tensor, float]]:
        """Tokens ``[T, D]``, mask ``[T]`` and loss scale of each microbatch of this rank."""
        first = self.row * self.accumulation
        total = sum(int(microbatch(index, case)[1].sum()) for index in range(NUM_MICROBATCHES))
        found = []
        for index in range(first, first + self.accumulation):
            x, valid = (
                part.chunk(self.num_shards, dim=1)[self.shard].flatten(0, 1) for part in microbatch(index, case)
            )
            by_token = int(valid.sum()) * self.num_ranks / total
            found.append((x, valid, by_token if case.startswith("token") else 1 / self.accumulation))
        return found

    def mean(self, local: Tensor) -> Tensor:
        """Over the ranks that hold different tokens, as data parallelism averages gradients."""
        dist.all_reduce(local, group=self.group)
        return local / self.num_ranks


def steer(balancer: GradientBalancer, routing: Routing, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Gradient ``[E, D]`` of the router's weight, all of it the balancer's, and the value for the log, 0-dim."""
    balancer.loss_scale = scale
    steered = balancer.steer(routing)
    (grad_logits,) = torch.autograd.grad(steered.weights.mul(0).sum(), routing.logits)
    value = torch.zeros(()) if balancer.last_value is None else balancer.last_value
    return grad_logits.T @ x, value.double()


def penalise(x: Tensor, valid: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The same of the z-loss, in the router of the experiments, which computes in fp32."""
    router = Router(D, E, K, z_loss=Z_LOSS)
    router.loss_scale = scale
    router.weight.data = router_weight().float()
    routing = router(x, valid, NUM_SEQUENCES)
    (gradient,) = torch.autograd.grad(routing.weights.mul(0).sum(), router.weight)
    return gradient.double(), z_loss(routing).detach().double()


def run(layout: Topology, rank: int) -> dict[str, Any] | None:
    """What every balancer gives in every case; None for a replica of another rank."""
    place = Place(layout, rank)
    return {case: run_step(case, place) for case in CASES} if layout.leads(rank) else None


def rows(case: str) -> list[Any]:
    """Only a load of the step so far depends on the order of the microbatches."""
    return [row for row in GRADIENT if case != "mean_permuted" or "global" in row.name]


def run_step(case: str, place: Place) -> dict[str, Any]:
    """One step of all balancers: averaged gradients, mean values, and whether the local counts were left alone."""
    balancers = [row.build(E, K) for row in rows(case)]
    for balancer in balancers:
        balancer.token_shards, balancer.microbatch_shards = place.group, place.microbatch_group
    names = [*(row.name for row in rows(case)), "z_loss"]
    gradients, values = torch.zeros(len(names), E, D).double(), torch.zeros(len(names)).double()
    local_load, kept = torch.zeros(E, dtype=torch.int64), True
    for x, valid, scale in place.microbatches(case):
        logits = F.linear(x, router_weight()).requires_grad_()
        mask = None if valid.all() else valid
        routing = route(logits, None, K, valid=mask, num_sequences=NUM_SEQUENCES)
        steered = [steer(balancer, routing, x, scale) for balancer in balancers] + [penalise(x, valid, scale)]
        gradients += torch.stack([gradient for gradient, _value in steered])
        values += torch.stack([value for _gradient, value in steered]) / place.accumulation
        load = routing.experts[valid].flatten().bincount(minlength=E)
        local_load += load
        steps = [balancer.step_load for balancer in balancers if getattr(balancer, "scope", None) == "global"]
        kept &= torch.equal(routing.load.long(), load) and all(torch.equal(step, local_load) for step in steps)
    update_balancers(balancers, place.group)
    found = {"gradient": place.mean(gradients), "value": place.mean(values)}
    return {what: dict(zip(names, by_row, strict=True)) for what, by_row in found.items()} | {"kept": kept}


REPLICATED = {2: Topology({"dp_shard": 2, "tp": 4}), 4: Topology({"ep": 4, "tp": 2}), 8: Topology({"cp": 8})}


def run_replicated(rank: int) -> dict[int, dict[str, list[Tensor]]]:
    """Gradients by size of the group and scope, with the same tokens on every rank, over steps and both bounds."""
    found: dict[int, dict[str, list[Tensor]]] = {}
    for size, topology in REPLICATED.items():
        group = token_shards(make_mesh("cpu", **topology.sizes), topology.sequence_parallel)
        found[size] = {scope: replicated(scope, group) for scope in ("microbatch", "global")}
    return found


def replicated(scope: str, group: dist.ProcessGroup) -> list[Tensor]:
    gradients = []
    for bound in (None, "tanh"):
        balancer = GShard(E, K, coefficient=0.3, scope=scope, bound=bound)
        balancer.token_shards = group
        for index in range(2):
            x, valid = (part.flatten(0, 1) for part in microbatch(index, "token_ragged"))
            logits = F.linear(x, router_weight()).requires_grad_()
            gradients.append(steer(balancer, route(logits, None, K, valid=valid), x, 0.7)[0])
            update_balancers([balancer], group)
    return gradients
