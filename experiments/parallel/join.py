"""Ranks: joining the process group that torchrun has prepared, and what a rank needs to know of itself."""

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..checks import check_choice, check_whole
from .mesh import AXES, make_mesh, token_shards

STRATEGIES = ("ddp", "fsdp")
RECOMPUTE = ("none", "selective", "full")
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class ParallelConfig:
    """How ranks share the work; the keys of the Hydra group ``parallel``.

    Raises:
        ValueError: an unknown choice, or sizes that do not fit each other.
    """

    strategy: str
    ranks: int
    precision: str = "fp32"
    recompute: str = "none"
    dp_replicate: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        check_choice("parallel.strategy", self.strategy, STRATEGIES)
        check_choice("parallel.precision", self.precision, PRECISIONS)
        check_choice("parallel.recompute", self.recompute, RECOMPUTE)
        for name in ("ranks", "dp_replicate", "ep"):
            check_whole(f"parallel.{name}", getattr(self, name))
        if self.strategy == "ddp" and (self.dp_replicate, self.ep) != (1, 1):
            raise ValueError(
                "with parallel.strategy=ddp every rank holds the whole model; for "
                f"parallel.dp_replicate={self.dp_replicate} and parallel.ep={self.ep} choose parallel=fsdp"
            )
        if self.ranks % (self.dp_replicate * self.ep):
            raise ValueError(
                f"parallel.dp_replicate * parallel.ep must divide parallel.ranks, "
                f"got {self.dp_replicate} * {self.ep} and {self.ranks} ranks"
            )

    @property
    def dtype(self) -> torch.dtype:
        """What autocast computes in."""
        return PRECISIONS[self.precision]

    @property
    def dp_shard(self) -> int:
        """Ranks over which the parameters that no other axis splits are sharded."""
        return 1 if self.strategy == "ddp" else self.ranks // (self.dp_replicate * self.ep)


@dataclass(frozen=True)
class Ranks:
    """This rank among all; ``token_shards`` is the group of the ranks that hold different tokens."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    token_shards: dist.ProcessGroup

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the mesh by axis."""
        return {axis: self.mesh.size(index) for index, axis in enumerate(AXES)}

    @property
    def first(self) -> bool:
        """Whether this rank writes the files."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        dist.all_reduce(values)
        return values

    def peak_memory(self) -> int:
        """Bytes at the peak of the rank that took most: of the device's allocator, on a CPU resident memory."""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
        else:
            # Linux counts in KiB, macOS in bytes
            unit = 1 if sys.platform == "darwin" else 1024
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return int(self.max(torch.tensor([peak], dtype=torch.int64, device=self.device)).item())

    def max(self, values: Tensor) -> Tensor:
        """Maximum over ranks, in place."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values


@contextmanager
def join_ranks(parallel: ParallelConfig) -> Iterator[Ranks]:
    """Join the process group under torchrun (or the launcher, which sets the same variables) and leave it in the end.

    Raises:
        ValueError: not under torchrun, or with another number of ranks than the config says.
    """
    if "RANK" not in os.environ:
        raise ValueError("a rank is started by `equipoise` or by torchrun, which set RANK; it is not set")
    rank, world_size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if world_size != parallel.ranks:
        raise ValueError(f"parallel.ranks is {parallel.ranks}, but torchrun has started {world_size} ranks")
    if torch.cuda.is_available():
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        # more threads than cores wait for each other in a spin
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        dist.init_process_group("gloo")
    try:
        replicas = world_size if parallel.strategy == "ddp" else parallel.dp_replicate
        mesh = make_mesh(device.type, dp_replicate=replicas, dp_shard=parallel.dp_shard, ep=parallel.ep)
        yield Ranks(rank, world_size, device, mesh, token_shards(mesh))
    finally:
        dist.destroy_process_group()
