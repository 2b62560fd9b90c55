"""One rank of a run, from top to bottom: set up, build, loop, finish.

Started by `equipoise`, or on several machines by `torchrun ... -m equipoise.experiments.train <run folder>`.
"""

import math
import shutil
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..balancers import check_replicas, reset_balancers, update_balancers
from . import build
from .capture import Capture
from .checkpoint import load_checkpoint, save_checkpoint
from .environment import write_environment
from .measure import Meter
from .moe import check_routers
from .parallel import ParallelConfig, Ranks, clip_gradients, join_ranks, reshard, synchronising, wrap
from .runs import METRIC_SCHEMA, flatten, load_config, same, write_json
from .tracker import Tracker

validate = build.check


def main(run_folder: str) -> None:
    """Train the run whose ``config.yaml`` lies in ``run_folder``, or go on where it was cut.

    Raises:
        ValueError: a config that cannot be trained, a checkpoint that does not fit, router logits that are not finite.
    """
    folder = Path(run_folder)
    config = load_config(folder)
    parallel = build.make_parallel(config)
    with join_ranks(parallel) as ranks:
        refuse_other_configs(config, ranks)
        train(folder, config, parallel, ranks)


def refuse_other_configs(config: dict[str, Any], ranks: Ranks) -> None:
    """Check that all ranks have read the same config: under torchrun each machine names a run folder of its own.

    Raises:
        ValueError: on every rank, with a key and two values.
    """
    found: list[dict[str, Any]] = [{}] * ranks.world_size
    torch.distributed.all_gather_object(found, config)
    first = flatten(found[0])
    for rank, other in enumerate(map(flatten, found)):
        for key in sorted(first.keys() | other.keys()):
            one, two = first.get(key), other.get(key)
            if not same(one, two):
                raise ValueError(
                    f"ranks 0 and {rank} read different configs: {key} is {one!r} and {two!r}; start all of them on "
                    "the same run folder"
                )


def train(folder: Path, config: dict[str, Any], parallel: ParallelConfig, ranks: Ranks) -> None:
    """The run, on this rank."""
    data, optim = config["data"], config["optim"]
    accumulation = data["microbatches"] // ranks.world_size
    tokens_per_step = data["microbatches"] * data["microbatch_sequences"] * data["sequence_length"]

    corpus, batches, held_out = build.make_data(config)
    model = build.make_model(config)
    model.init_weights(torch.Generator().manual_seed(config["seed"]))
    model.to(ranks.device)
    moe_layers, routers = list(model.layers()), list(model.routers())
    for router in routers:
        router.loss_scale = 1 / accumulation
        if router.bias is not None:
            router.bias.reserve(tokens_per_step // ranks.world_size)
        if router.gradient is not None:
            router.gradient.token_shards = ranks.token_shards
    model.set_recompute(parallel.recompute)
    experts = [layer.experts for layer in moe_layers]
    replica = wrap(model, ranks, parallel.strategy, units=list(model.blocks), experts=experts)
    optimizer = build.make_optimizer(config, model)
    position = load_checkpoint(folder / "checkpoints", model, optimizer) or {"step": 0, "tokens": 0, "skipped": 0}
    check_replicas(model, ranks.token_shards)
    autocast = torch.autocast(ranks.device.type, dtype=parallel.dtype, enabled=parallel.dtype != torch.float32)

    tracker = Tracker(folder, config, position["step"]) if ranks.first else None
    if ranks.first:
        parameters = model.count_parameters()
        facts = {"world_size": ranks.world_size, "mesh": ranks.axes, "backend": torch.distributed.get_backend()}
        facts |= {"data": corpus.facts, "metric_schema": METRIC_SCHEMA}
        write_environment(folder, **facts, parameters=parameters)
        print(f"{parameters['total']:,} parameters, {parameters['active']:,} active for a token")
    meter = Meter(moe_layers, ranks)
    capture = Capture(folder, routers, ranks.rank, config["capture_every"] if config["capture"] else 0)

    while position["step"] < optim["steps"]:
        started = time.perf_counter()
        step = position["step"]
        rate = build.learning_rate(optim, step + 1)
        for group in optimizer.param_groups:
            group["lr"] = rate
        first = ranks.rank * accumulation
        microbatches = [batches.microbatch(step, first + index).to(ranks.device) for index in range(accumulation)]
        for index, tokens in enumerate(microbatches):
            with synchronising(replica, last=index + 1 == accumulation):
                with autocast:
                    loss = language_loss(replica(tokens[:, :-1]), tokens)
                (loss / accumulation).backward()
            meter.add(loss)
            capture.add(step + 1)
        check_routers(routers)
        capture.write(step + 1)
        norm = clip_gradients(model.parameters(), optim["clip"])
        if torch.isfinite(norm):
            observe_again = partial(run_forwards, replica, microbatches, autocast)
            update_balancers(model, ranks.token_shards, observe_again=observe_again)
            optimizer.step()
        else:
            position["skipped"] += 1
            reset_balancers(model)
        optimizer.zero_grad()
        position["step"] += 1
        position["tokens"] += tokens_per_step

        metrics, load_LE, bias_LE = meter.finish()
        seconds = time.perf_counter() - started
        row = position | metrics | {"learning_rate": rate, "grad_norm": norm.item()}
        row |= {"seconds": seconds, "tokens_per_s": tokens_per_step / seconds}
        last = position["step"] == optim["steps"]
        row |= {"val_loss": None, "val_bpb": None}
        if last or position["step"] % config["validation"]["every"] == 0:
            row["val_loss"] = validation_loss(model, held_out, data["microbatch_sequences"], ranks, autocast)
            row["val_bpb"] = row["val_loss"] / math.log(2)
        if tracker is not None:
            tracker.log(row, load_LE, bias_LE)
        keep = config["checkpoint"]["keep"]
        if (last and keep) or (not last and position["step"] % config["checkpoint"]["every"] == 0):
            if tracker is not None:
                tracker.flush()
            save_checkpoint(folder / "checkpoints", model, optimizer, position)

    peak_bytes = ranks.peak_memory()
    if tracker is not None:
        summary = {"steps": position["step"], "tokens": position["tokens"], "skipped": position["skipped"]}
        summary |= {"peak_memory_bytes": peak_bytes}
        summary |= {"train_s": sum(row["seconds"] for row in tracker.rows), "val_bpb": tracker.rows[-1]["val_bpb"]}
        tracker.finish(summary | {f"{name}_parameters": count for name, count in parameters.items()})
        write_json(folder / "summary.json", summary)
        if not config["checkpoint"]["keep"]:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def run_forwards(replica: nn.Module, microbatches: Sequence[Tensor], autocast: torch.autocast) -> None:
    """The forwards of a step, for balancers that observe it again; ``microbatches`` are tokens ``[B, S+1]``."""
    for tokens in microbatches:
        with autocast:
            replica(tokens[:, :-1])
    reshard(replica)


def language_loss(logits: Tensor, tokens: Tensor, valid: Tensor | None = None) -> Tensor:
    """Mean nats per token: ``logits [B, S, V]`` against ``tokens [B, S+1]`` shifted by one.

    Over the positions that are ``valid [B, S]``: True where both the token and its target are real. 0 if there is none.

    Raises:
        ValueError: ``valid`` of another shape.
    """
    if valid is not None and valid.shape != logits.shape[:2]:
        raise ValueError(f"valid must be {list(logits.shape[:2])} as the inputs are, got {list(valid.shape)}")
    if valid is None:
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    losses = F.cross_entropy(logits[valid].float(), tokens[:, 1:][valid], reduction="sum")
    return losses / valid.sum().clamp(min=1)


@torch.no_grad()
def validation_loss(replica: nn.Module, sequences: Tensor, batch: int, ranks: Ranks, autocast: torch.autocast) -> float:
    """Mean nats per token over the validation ``sequences [N, S+1]``, which are shared out over ranks."""
    replica.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    mine = sequences[ranks.rank :: ranks.world_size]
    # the ranks gather parameters and exchange tokens together, so each makes as many forwards
    for start in range(0, -(-len(sequences) // ranks.world_size), batch):
        part = mine[start : start + batch]
        tokens = (part if len(part) else sequences[:1]).to(ranks.device)
        with autocast:
            loss = language_loss(replica(tokens[:, :-1]), tokens)
        count = part[:, 1:].numel()
        totals += torch.stack([loss.double() * count, totals.new_tensor(count)])
    replica.train()
    ranks.sum(totals)
    return (totals[0] / totals[1]).item()


if __name__ == "__main__":
    main(sys.argv[1])
