"""What four gloo ranks run for ``test_update.py``: ``python gloo_worker.py FOLDER`` writes ``FOLDER/<rank>.pt``."""

import multiprocessing
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
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
from equipoise.balancers.update import sum_over_shards
from equipoise.kernels import Routing, route

WORLD_SIZE = 4
E, K = 7, 2


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


def record_all_reduces() -> list[tuple[str, int]]:
    """Dtype and size of every all-reduce from now on."""
    calls: list[tuple[str, int]] = []
    original: Callable[..., Any] = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **options: Any) -> Any:
        calls.append((str(tensor.dtype), tensor.numel()))
        return original(tensor, *args, **options)

    dist.all_reduce = all_reduce
    return calls


def two_updates(rank: int, group: dist.ProcessGroup | None, calls: list[tuple[str, int]]) -> dict[str, Any]:
    """Biases after each of two steps, and the collectives of the second."""
    layers = build_layers()
    biases = []
    for step in range(2):
        feed(layers, rank, step)
        calls.clear()
        update_balancers(nn.ModuleList(layers), group)
        biases.append([layer.bias.clone() for layer in layers])
    return {"biases": biases, "calls": list(calls)}


def steered(balancer: GShard, logits: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Routing]:
    leaf = logits.clone().requires_grad_()
    routing = balancer.steer(route(leaf, None, K, valid=valid))
    routing.weights.square().sum().backward()
    assert leaf.grad is not None
    return leaf.grad, routing


def replicated_gradients(group: dist.ProcessGroup | None) -> dict[str, list[Tensor]]:
    """Router gradients by scope, with identical fp64 input on every rank of the group."""
    gradients: dict[str, list[Tensor]] = {}
    for scope in ("microbatch", "global"):
        for bound in (None, "tanh"):
            balancer = GShard(E, K, coefficient=0.3, scope=scope, bound=bound)
            balancer.token_shards = group
            for seed in (2, 4, 6):
                gradients.setdefault(scope, []).append(steered(balancer, tokens(2, seed, torch.float64))[0])
                update_balancers([balancer], group)
    return gradients


def sharded_loss(rank: int) -> dict[str, Any]:
    """One microbatch of the global loss over all ranks; rank 3 has padding only."""
    balancer = GShard(E, K, scope="global")
    logits = tokens(rank, 0, torch.float64)
    valid = torch.full((len(logits),), rank != 3)
    gradient, routing = steered(balancer, logits, valid)
    return {
        "local_load": routing.load,
        "step_load": balancer.step_load,
        "mean_shares": routing.shares[valid].detach().mean(0),
        "value": balancer.last_value,
        "finite": bool(gradient.isfinite().all()),
    }


def pooled_counts(rank: int, alone: dist.ProcessGroup) -> dict[str, int]:
    """Margins counted by a layer, with replicated tokens (a rank is its own shard) and with sharded ones."""
    replicated, sharded = HistogramQB(E, K), HistogramQB(E, K)
    for balancer, logits in ((replicated, tokens(0, 0)), (sharded, tokens(rank, 0))):
        balancer.observe(route(logits, balancer.bias, K, tally=balancer.tally))
    return {
        "replicated": int(sum_over_shards([replicated.counts], alone)[0].sum()),
        "sharded": int(sum_over_shards([sharded.counts])[0].sum()),
        "own": int(sharded.counts.sum()),
    }


def run_rank(rank: int, folder: Path) -> None:
    """All checks of one rank."""
    store = (folder / "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alone = [dist.new_group([member]) for member in range(WORLD_SIZE)]
    calls = record_all_reduces()
    results = {
        "pair": two_updates(rank, pairs[rank // 2], calls),
        "all": two_updates(rank, None, calls),
        "replicated_pair": replicated_gradients(pairs[rank // 2]),
        "replicated_all": replicated_gradients(dist.group.WORLD),
        "sharded_loss": sharded_loss(rank),
        "counts": pooled_counts(rank, alone[rank]),
    }
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path) -> None:
    # forked, so that torch is imported once for all ranks
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(rank, folder)) for rank in range(WORLD_SIZE)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    failed = [rank for rank, process in enumerate(ranks) if process.exitcode != 0]
    if failed:
        sys.exit(f"ranks {failed} failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
