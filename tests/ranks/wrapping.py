"""Balancers inside a model that is wrapped by DDP or sharded by FSDP2 in mixed precision."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from equipoise.balancers import update_balancers
from equipoise.experiments.moe import Router

from .contract import BIAS, tensors

D, E, K = 4, 8, 2
NUM_STEPS, NUM_MICROBATCHES, NUM_TOKENS = 2, 2, 12
WRAPPERS = ("ddp", "fsdp")


class Layers(nn.Module):
    """A router for every row of the contract."""

    def __init__(self) -> None:
        super().__init__()
        self.routers = nn.ModuleList([Router(D, E, K, bias=row.build(E, K), name=row.name) for row in BIAS])
        for index, router in enumerate(self.routers):
            weight = torch.randn(E, D, generator=torch.Generator().manual_seed(index))
            # a number of bf16 stays what it is in any precision
            router.weight.data = weight.bfloat16().float()
            router.bias.reserve(100)

    def forward(self, x: Tensor) -> Tensor:
        """A loss of ``x [T, D]``."""
        return torch.stack([router(x).weights.square().sum() for router in self.routers]).sum()

    def balancers(self) -> dict[str, Any]:
        """By row."""
        return {router.name: router.bias for router in self.routers}


def tokens(index: int) -> Tensor:
    """``[T, D]`` fp32, exact in bf16."""
    return torch.randn(NUM_TOKENS, D, generator=torch.Generator().manual_seed(1000 + index)).bfloat16().float()


def wrap(model: Layers, how: str) -> nn.Module:
    """In place, or around it."""
    if how == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    # one router is gathered on its own, the others with the model
    fully_shard(model.routers[0], mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def run(rank: int) -> dict[str, Any]:
    """By wrapper."""
    return {how: run_wrapped(how, rank) for how in WRAPPERS}


def run_wrapped(how: str, rank: int) -> dict[str, Any]:
    """Two steps, of the wrapped model and of one that is not: what the balancers hold before and after each update."""
    model, plain = Layers(), Layers()
    addresses = [pointers(model)]
    wrapped = wrap(model, how)
    addresses.append(pointers(model))
    found: dict[str, Any] = {"held": [], "plain_held": [], "bias": [], "plain_bias": [], "kind": {}}
    for step in range(NUM_STEPS):
        for index in range(NUM_MICROBATCHES):
            x = tokens(100 * rank + 10 * step + index)
            wrapped(x).backward()
            plain(x)
            addresses.append(pointers(model))
        for each, name in ((model, "held"), (plain, "plain_held")):
            found[name].append({row: held(layer) for row, layer in each.balancers().items()})
        for each, name in ((model, "bias"), (plain, "plain_bias")):
            update_balancers(each)
            found[name].append({row: layer.bias.clone() for row, layer in each.balancers().items()})
        addresses.append(pointers(model))
    for row, layer in model.balancers().items():
        found["kind"][row] = (type(layer.bias).__name__, str(layer.bias.dtype), tuple(layer.bias.shape))
    return found | {"addresses": addresses, "sharded": type(model.routers[0].weight).__name__}


def pointers(model: Layers) -> dict[str, dict[str, int]]:
    """By row and name of the tensor."""
    return {
        row: {name: tensor.data_ptr() for name, tensor in tensors(layer).items()}
        for row, layer in model.balancers().items()
    }


def held(layer: Any) -> dict[str, Tensor]:
    """What was counted on this rank; of a margin store the rows in use."""
    store = getattr(layer, "store", None)
    found = {name: tensor.clone() for name, tensor in tensors(layer).items() if not name.endswith("buffer")}
    return found if store is None else found | {"margins": store.margins.float()}
