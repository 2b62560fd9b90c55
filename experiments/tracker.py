"""What a run records, by rank 0: ``metrics.jsonl`` and ``load.parquet`` are the record, W&B is a view of it."""

import json
import math
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from .runs import write_text


class Tracker:
    """Appends one row of metrics and the load of every expert per optimizer step.

    ``load.parquet`` is a folder of parts, one per ``flush``; ``pandas.read_parquet`` reads it as one table.

    Args:
        folder: the run folder.
        config: the resolved config; ``tracker.mode`` is ``offline``, ``online`` or ``none``.
        step: go on after this step: later rows and parts are dropped.
    """

    def __init__(self, folder: Path, config: dict[str, Any], step: int) -> None:
        self.metrics = folder / "metrics.jsonl"
        self.loads = folder / "load.parquet"
        self.pending: list[pa.Table] = []
        self.rows = _cut_back(self.metrics, self.loads, step)
        self.file = self.metrics.open("a", encoding="utf-8")
        self.wandb = _start_wandb(folder, config)
        for row in self.rows:
            self._show(row)

    def log(self, row: dict[str, Any], load_LE: Tensor, bias_LE: Tensor) -> None:
        """Record step ``row["step"]``: its metrics (non-finite numbers become null), load and bias ``[L, E]``."""
        clean = _finite(row)
        self.file.write(json.dumps(clean) + "\n")
        self.file.flush()
        self.rows.append(clean)
        # a dense model has no load
        if load_LE.numel():
            self.pending.append(_load_table(row["step"], load_LE.numpy(), bias_LE.numpy()))
        self._show(clean)

    def _show(self, row: dict[str, Any]) -> None:
        """Log the scalars of a row to W&B, unless its server has had that step before the run was cut."""
        if self.wandb is not None and row["step"] >= self.wandb.starting_step:
            scalars = {name: value for name, value in row.items() if isinstance(value, int | float)}
            devices = {f"device_maxvio/{count}": value for count, value in row.get("device_maxvio", {}).items()}
            self.wandb.log(scalars | devices, step=row["step"])

    def flush(self) -> None:
        """Write the loads since the last flush; the metrics are on the disk too before a checkpoint is."""
        os.fsync(self.file.fileno())
        if self.pending:
            self.loads.mkdir(exist_ok=True)
            first, last = (self.pending[index]["step"][0].as_py() for index in (0, -1))
            name = f"part-{first:08d}-{last:08d}.parquet"
            draft = self.loads / f".{name}"
            pq.write_table(pa.concat_tables(self.pending), draft)
            draft.rename(self.loads / name)
            self.pending = []

    def finish(self, summary: dict[str, Any]) -> None:
        """Close the record of a complete run."""
        self.flush()
        self.file.close()
        if self.wandb is not None:
            self.wandb.summary.update(summary)
            self.wandb.finish()


def _cut_back(metrics: Path, loads: Path, step: int) -> list[dict[str, Any]]:
    """Drop what was recorded after ``step``; a line that a crash has cut short goes with it."""
    rows: list[dict[str, Any]] = []
    if metrics.exists():
        for line in metrics.read_text(encoding="utf-8").splitlines()[:step]:
            rows.append(json.loads(line))
    if [row["step"] for row in rows] != list(range(1, step + 1)):
        raise ValueError(f"{metrics} does not hold the steps 1 to {step} that the checkpoint has behind it")
    write_text(metrics, "".join(json.dumps(row) + "\n" for row in rows))
    for part in loads.glob("*.parquet"):
        if part.name.startswith(".") or int(part.stem.split("-")[-1]) > step:
            part.unlink()
    return rows


def _load_table(step: int, load_LE: np.ndarray, bias_LE: np.ndarray) -> pa.Table:
    layers, experts = load_LE.shape
    return pa.table(
        {
            "step": np.full(load_LE.size, step, np.int32),
            "layer": np.repeat(np.arange(layers, dtype=np.int16), experts),
            "expert": np.tile(np.arange(experts, dtype=np.int16), layers),
            "count": load_LE.reshape(-1).astype(np.int32),
            # after the step's update; NaN without a bias
            "bias": bias_LE.reshape(-1).astype(np.float32),
        }
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _wandb_id(folder: Path) -> str:
    """Id of the W&B run of this folder, drawn once: a folder's name may come again in another experiment."""
    path = folder / "wandb-id"
    if not path.exists():
        write_text(path, uuid.uuid4().hex[:12])
    return path.read_text(encoding="utf-8")


def _start_wandb(folder: Path, config: dict[str, Any]) -> Any:
    """A W&B run: group = experiment, job_type = balancer, x-axis tokens; None when the tracker is off.

    An offline run that was cut cannot be continued: syncing its second part replaces the first. So the first is removed
    and the tracker logs the run anew, from the start.
    """
    tracker, balancer = config["tracker"], config["balancer"]
    if tracker["mode"] == "none":
        return None
    # a second to import, and not needed without it
    import wandb

    run_id = _wandb_id(folder)
    for part in (folder / "wandb").glob(f"offline-run-*-{run_id}"):
        shutil.rmtree(part, ignore_errors=True)
    run = wandb.init(
        mode=tracker["mode"],
        project=tracker["project"],
        entity=tracker["entity"],
        dir=folder,
        id=run_id,
        resume="allow",
        name=f"{balancer['name']}-s{config['seed']}",
        group=config["name"],
        job_type=balancer["name"],
        tags=[slot for slot in ("bias", "gradient") if balancer.get(slot)] or ["unbalanced"],
        config=config,
        settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
    )
    run.define_metric("tokens", summary="max")
    run.define_metric("*", step_metric="tokens")
    run.define_metric("val_bpb", step_metric="tokens", summary="min")
    return run
