"""Eight gloo ranks that run one check after another: ``python -m ranks.worker FOLDER``.

A check is a function of the rank. What it returns is written to ``FOLDER/<check>-<rank>.pt``; if it raises, the trace
is. The processes stay and the process group is made anew for each check: one that fails does not disturb the next, and
groups that a check has made end with it, whose threads would otherwise wake up a hundred times a second each.
"""

import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist

from . import checkpoints, expert_parallel, gradient_scale, topologies, updates, wrapping
from .groups import PATIENCE, member

WORLD_SIZE = 8
DEADLINE_S = 300

CHECKS: dict[str, Callable[[int], Any]] = {
    "dispatch": expert_parallel.run_dispatch,
    **{f"layout-{name}": partial(expert_parallel.run, layout) for name, layout in expert_parallel.LAYOUTS.items()},
    "updates": updates.run,
    "observed": updates.run_observed,
    "global_loss": updates.run_global_loss,
    "stages": updates.run_stages,
    "replicas": updates.run_replicas,
    "replicated": gradient_scale.run_replicated,
    "wrapping": wrapping.run,
    **{f"topology-{name}": partial(topologies.run, topology) for name, topology in topologies.TOPOLOGIES.items()},
    **{f"scale-{name}": partial(gradient_scale.run, layout) for name, layout in gradient_scale.LAYOUTS.items()},
}


def attempt(check: Callable[[], Any], path: Path) -> None:
    """Write what the check finds, or its trace."""
    try:
        result = {"found": check()}
    except Exception:
        result = {"trace": traceback.format_exc()}
    torch.save(result, path)


def in_group(store: dist.Store, name: str, rank: int) -> Any:
    """What a check finds in a process group of its own."""
    with member(store, name, WORLD_SIZE, rank):
        return CHECKS[name](rank)


def run_rank(rank: int, folder: Path) -> None:
    """All checks of one rank."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), WORLD_SIZE)
    store.set_timeout(2 * PATIENCE)
    start = time.monotonic()
    for name in CHECKS:
        if rank == 0:
            # what a run that hits the deadline was at
            print(f"{time.monotonic() - start:.0f} s: {name}", flush=True)
        attempt(partial(in_group, store, name, rank), folder / f"{name}-{rank}.pt")
    attempt(partial(checkpoints.run, folder / "checkpoints", store, rank), folder / f"checkpoints-{rank}.pt")


def main(folder: Path) -> None:
    # forked, so that torch is imported once for all ranks; with dynamo, which a dispatch mode imports on first use
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(rank, folder), daemon=True) for rank in range(WORLD_SIZE)]
    for process in ranks:
        process.start()
    end = time.monotonic() + DEADLINE_S
    for process in ranks:
        process.join(max(0.0, end - time.monotonic()))
        process.kill()
        process.join()
    failed = {rank: process.exitcode for rank, process in enumerate(ranks) if process.exitcode != 0}
    if failed:
        sys.exit(f"ranks ended with the exit codes {failed}; they are killed after {DEADLINE_S} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
