"""A checkpoint of sharded routers: written by two ranks, read by one and by four, in a process group each."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from equipoise.balancers import simulate_ranks, update_balancers
from equipoise.experiments.checkpoint import load_checkpoint, save_checkpoint
from equipoise.kernels import route

from .contract import BIAS
from .groups import member
from .wrapping import E, K, Layers, tokens

NUM_MICROBATCHES = 4
POSITION = {"step": 1, "tokens": 48, "skipped": 0}
# which of the eight ranks, by number of ranks
WRITERS = range(2)
READERS = {1: range(1), 4: range(1, 5)}


def build() -> tuple[Layers, torch.optim.Optimizer]:
    model = Layers()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def next_biases(model: Layers, step: int) -> dict[str, Tensor]:
    """By row, after a step of four microbatches that the ranks share out."""
    share = NUM_MICROBATCHES // dist.get_world_size()
    for index in range(dist.get_rank() * share, (dist.get_rank() + 1) * share):
        model(tokens(10 * step + index)).backward()
    update_balancers(model)
    return biases(model)


def biases(model: Layers) -> dict[str, Tensor]:
    return {row: layer.bias.clone() for row, layer in model.balancers().items()}


def write(folder: Path) -> dict[str, Any]:
    """Two steps without a cut, and a checkpoint between them."""
    model, optimizer = build()
    saved = next_biases(model, 0)
    optimizer.step()
    save_checkpoint(folder, model, optimizer, POSITION)
    return {"saved": saved, "next": next_biases(model, 1)}


def read(folder: Path) -> dict[str, Any]:
    """The second step, after loading; of one rank also what virtual ranks would give."""
    model, optimizer = build()
    position = load_checkpoint(folder, model, optimizer)
    found = {"position": position, "loaded": biases(model), "next": next_biases(model, 1)}
    if dist.get_world_size() == 1:
        weights = [router.weight.full_tensor().detach() for router in model.routers]
        found["virtual"] = {size: virtual(size, weights, found["loaded"]) for size in (1, 2, 4)}
    return found


def virtual(num_ranks: int, weights: list[Tensor], loaded: dict[str, Tensor]) -> dict[str, Tensor]:
    """By row, the next bias of as many virtual ranks."""
    found = {}
    for row, weight in zip(BIAS, weights, strict=True):
        ranks = [[row.build(E, K)] for _ in range(num_ranks)]
        for rank, (layer,) in enumerate(ranks):
            layer.bias.copy_(loaded[row.name])
            share = NUM_MICROBATCHES // num_ranks
            for index in range(rank * share, (rank + 1) * share):
                logits = F.linear(tokens(10 + index), weight)
                layer.observe(route(logits, layer.bias, K, tally=layer.tally))
        simulate_ranks(ranks)
        found[row.name] = ranks[0][0].bias
    return found


def run(folder: Path, store: dist.Store, rank: int) -> dict[str, Any]:
    """What this rank found as a writer, and as a reader; it is in no process group before and after."""
    found: dict[str, Any] = {}
    if rank in WRITERS:
        try:
            with member(store, "write", len(WRITERS), rank):
                found["writer"] = write(folder)
        finally:
            store.set(f"written-{rank}", b"")
    store.wait([f"written-{writer}" for writer in WRITERS])
    for size, members in READERS.items():
        if rank in members:
            with member(store, f"read-{size}", size, rank - members[0]):
                found[size] = read(folder)
    return found
