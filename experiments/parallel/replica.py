"""What a model is wrapped in: DDP, or FSDP2 with the experts shared out over the ranks of the ``ep`` axis.

FSDP2 and its DTensor take seconds to import, and a run of replicas never needs them, so they are imported where they
are used.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from .join import Ranks

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def wrap(
    model: nn.Module, ranks: Ranks, strategy: str, units: Sequence[nn.Module], experts: Sequence[nn.Module]
) -> nn.Module:
    """Data parallelism: gradients are averaged over the ranks, whichever of them hold a parameter.

    Args:
        model: on its device, with the same weights on every rank; ``fsdp`` shards it in place.
        ranks: this rank among all.
        strategy: ``ddp`` or ``fsdp``.
        units: the parts that ``fsdp`` gathers one at a time, for example the blocks.
        experts: modules with parameters ``[E, ...]`` and an attribute ``group``.

    Raises:
        ValueError: a number of experts that the ``ep`` axis does not divide, or a width that ``dp_shard`` does not; a
            mesh with ``cp`` or ``tp``, for which a model must be written.
    """
    if strategy == "ddp":
        devices = [ranks.device.index] if ranks.device.type == "cuda" else None
        # looking for unused parameters keeps DDP from rebuilding its buckets after the first backward of a process: a
        # resumed run then adds gradients up in the same order as one that was not cut
        return DistributedDataParallel(model, device_ids=devices, find_unused_parameters=True)
    if any(ranks.mesh[axis].size() > 1 for axis in ("cp", "tp")):
        raise ValueError(f"only the axes dp_replicate, dp_shard and ep are sharded here, got a mesh of {ranks.axes}")
    from torch.distributed.fsdp import fully_shard

    for each in experts:
        _shard_experts(each, ranks)
    dense = _dense_mesh(ranks.mesh)
    for unit in (*units, model):
        fully_shard(unit, mesh=dense)
    return model


def _dense_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of what is no expert: its ranks along ``ep`` share it out as those along ``dp_shard`` do."""
    replicate, shard, ep = (mesh.size(axis) for axis in range(3))
    if replicate == 1:
        return init_device_mesh(mesh.device_type, (shard * ep,), mesh_dim_names=("dp_shard",))
    return init_device_mesh(mesh.device_type, (replicate, shard * ep), mesh_dim_names=("dp_replicate", "dp_shard"))


def _shard_experts(experts: nn.Module, ranks: Ranks) -> None:
    """Experts along ``ep``, and each expert's matrices, by their rows, along ``dp_shard``."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = ranks.mesh["ep"]
    for name, parameter in list(experts.named_parameters(recurse=False)):
        _check_divides(name, parameter, mesh.size(), ranks.mesh["dp_shard"].size())
        # every rank has drawn the same weights: nothing is sent
        local = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
        setattr(experts, name, nn.Parameter(local))
    axes = ("dp_replicate", "dp_shard") if ranks.mesh["dp_replicate"].size() > 1 else "dp_shard"
    sharded = fully_shard(experts, mesh=ranks.mesh[axes], shard_placement_fn=lambda parameter: Shard(1))
    if mesh.size() > 1:
        experts.group = mesh.get_group()  # type: ignore[assignment]
        # gradients add up along ep, as every rank of it sends its tokens: the mean is over all ranks all the same
        sharded.set_gradient_divide_factor(ranks.world_size)
        # gloo knows no other scaled reduction; with one shard there is none, and torch would divide twice
        sharded.set_force_sum_reduction_for_comms(ranks.mesh["dp_shard"].size() > 1)


def _check_divides(name: str, parameter: Tensor, ep: int, dp_shard: int) -> None:
    if parameter.shape[0] % ep:
        raise ValueError(f"parallel.ep must divide the {parameter.shape[0]} experts, got {ep}")
    if parameter.shape[1] % dp_shard:
        raise ValueError(
            f"the {dp_shard} ranks of dp_shard must divide the rows of an expert's {name}, got {parameter.shape[1]}"
        )


@contextmanager
def synchronising(replica: nn.Module, last: bool) -> Iterator[None]:
    """Average gradients over the ranks once, with the ``last`` microbatch of a step."""
    if isinstance(replica, DistributedDataParallel):
        with nullcontext() if last else replica.no_sync():
            yield
    else:
        if hasattr(replica, "set_requires_gradient_sync"):
            cast("FSDPModule", replica).set_requires_gradient_sync(last)
        yield


def reshard(replica: nn.Module) -> None:
    """Free what FSDP2 still holds gathered after a forward without a backward.

    It keeps the parameters of the root for the backward that it expects; a step of the optimizer before the next
    forward would change the shards, and that forward would run on what was gathered before.
    """
    for module in replica.modules():
        if hasattr(module, "reshard"):
            cast("FSDPModule", module).reshard()


def clip_gradients(parameters: Iterable[Tensor], clip: float) -> Tensor:
    """Scale the gradients so that their norm over all parameters is at most ``clip``; the norm before, 0-dim.

    Parameters may be sharded over different meshes of all ranks. One all-reduce then gives every rank the same bits of
    the norm, and so the same bits of what they hold replicas of.
    """
    parameters = list(parameters)
    if not any(hasattr(parameter, "to_local") for parameter in parameters):
        return clip_grad_norm_(parameters, clip)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = torch.stack([_local_share(gradient) for gradient in gradients]).sum()
    dist.all_reduce(total)
    norm = total.sqrt()
    factor = (clip / (norm + 1e-6)).clamp(max=1)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
    return norm


def _local_share(gradient: Tensor) -> Tensor:
    """What this rank adds to the square of the norm, 0-dim fp64: replicas of a shard share it."""
    from torch.distributed.tensor import DTensor

    assert isinstance(gradient, DTensor), "a parameter that is not sharded, among some that are"
    sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    replicas = math.prod(size for size, placement in sizes if placement.is_replicate())
    return gradient.to_local().norm().double().square() / replicas
