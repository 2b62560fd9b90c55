"""Joining and leaving a process group of gloo ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.tensor._redistribute import _gen_transform_infos
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

# a collective that waits longer hangs
PATIENCE = timedelta(seconds=60)


@contextmanager
def member(store: dist.Store, name: str, world_size: int, rank: int) -> Iterator[None]:
    """Inside, this process is a member of the default process group, whose ranks meet under ``name``."""
    meeting = dist.PrefixStore(name, store)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world_size, timeout=PATIENCE)
    try:
        yield
        # no rank leaves while another needs it
        dist.barrier()
    finally:
        # closed connections end the collectives in which others wait for a rank that has failed
        dist.destroy_process_group()
        # what they remember of a mesh are the names of its groups, also for the next mesh of that shape
        _gen_transform_infos.cache_clear()
        _clear_sharding_prop_cache()
