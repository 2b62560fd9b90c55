"""The device mesh, and which of its ranks hold different tokens.

Five named axes, whose sizes multiply to the number of ranks; the last one varies fastest over the ranks:

================ =================================== ========= ===================
axis             its ranks share out                 tokens    experts
================ =================================== ========= ===================
``dp_replicate`` nothing: replicas of the model      different replicas
``dp_shard``     parameters (FSDP)                   different the same, in shards
``ep``           the experts, and otherwise as above different different
``cp``           the sequences of a microbatch       different replicas
``tp``           the width of the layers             see below replicas
================ =================================== ========= ===================

With sequence parallelism every rank along ``tp`` routes its own part of the sequence. Without it they all route the
same tokens, which must be counted once.
"""

import math

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("dp_replicate", "dp_shard", "ep", "cp", "tp")


def make_mesh(
    device_type: str, *, dp_replicate: int = 1, dp_shard: int = 1, ep: int = 1, cp: int = 1, tp: int = 1
) -> DeviceMesh:
    """The mesh of all ranks, with the axes ``AXES``. Every rank must call it.

    Raises:
        ValueError: a size that is not positive, or sizes whose product is not the number of ranks.
    """
    sizes = (dp_replicate, dp_shard, ep, cp, tp)
    given = ", ".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(f"the sizes of a mesh must be positive whole numbers, got {given}")
    if math.prod(sizes) != dist.get_world_size():
        raise ValueError(
            f"the sizes of a mesh must multiply to the number of ranks, {dist.get_world_size()}, "
            f"got {given}: {math.prod(sizes)}"
        )
    return init_device_mesh(device_type, sizes, mesh_dim_names=AXES)


def token_shards(mesh: DeviceMesh, sequence_parallel: bool = True) -> dist.ProcessGroup:
    """The group of the ranks that hold different tokens of a step, with this one: what statistics are summed over.

    Ranks along ``ep`` are among them, as each brings tokens of its own; that they hold different experts is nothing to
    the statistics. Every rank must call it.
    """
    axes = ("dp_replicate", "dp_shard", "ep", "cp") + (("tp",) if sequence_parallel else ())
    return _group(mesh, axes)


def microbatch_shards(mesh: DeviceMesh, sequence_parallel: bool = True) -> dist.ProcessGroup | None:
    """The group of the ranks that share out the tokens of one microbatch; None if this rank has all of them.

    Every rank must call it.
    """
    axes = ("cp", "tp") if sequence_parallel else ("cp",)
    return _group(mesh, axes) if math.prod(mesh.size(AXES.index(axis)) for axis in axes) > 1 else None


def _group(mesh: DeviceMesh, axes: tuple[str, ...]) -> dist.ProcessGroup:
    """The ranks that differ along ``axes`` only, in their order along these."""
    inner = [AXES.index(axis) for axis in axes]
    outer = [index for index in range(len(AXES)) if index not in inner]
    size = math.prod(mesh.size(index) for index in inner)
    members = mesh.mesh.permute(*outer, *inner).reshape(-1, size)
    group, _ = dist.new_subgroups_by_enumeration(members.tolist())
    assert group is not None
    return group
