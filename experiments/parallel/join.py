"""Ranks: joining the process group that torchrun has prepared, and what a rank needs to know of itself."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Ranks:
    """This rank among all; ``token_shards`` is the group of the ranks that hold different tokens."""

    rank: int
    world_size: int
    device: torch.device
    token_shards: dist.ProcessGroup | None

    @property
    def first(self) -> bool:
        """Whether this rank writes the files."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        dist.all_reduce(values)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Maximum over ranks, in place."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        """Data parallelism: gradients are averaged over ranks."""
        devices = [self.device.index] if self.device.type == "cuda" else None
        # looking for unused parameters keeps DDP from rebuilding its buckets after the first backward of a process: a
        # resumed run then adds gradients up in the same order as one that was not cut
        return DistributedDataParallel(model, device_ids=devices, find_unused_parameters=True)


@contextmanager
def join_ranks(parallel: dict[str, Any]) -> Iterator[Ranks]:
    """Join the process group under torchrun (or the launcher, which sets the same variables) and leave it in the end.

    Raises:
        ValueError: not under torchrun, or with another number of ranks than the config says.
    """
    if "RANK" not in os.environ:
        raise ValueError("a rank is started by `equipoise` or by torchrun, which set RANK; it is not set")
    rank, world_size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if world_size != parallel["ranks"]:
        raise ValueError(f"parallel.ranks is {parallel['ranks']}, but torchrun has started {world_size} ranks")
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
        yield Ranks(rank, world_size, device, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
