"""Read the run folders of one experiment."""

import json
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import pandas as pd

from ..runs import load_config, read_json

REQUIRED = ("step", "tokens", "global_maxvio", "local_maxvio")
OPTIONAL = ("loss", "val_bpb", "tokens_per_s", "dead_share", "skipped", "clamped_share")
# the parts of a config and of an environment that are asked for keys of their own
SECTIONS = ("balancer", "optim", "report", "data", "versions")


@dataclass(frozen=True, eq=False)
class Run:
    """One run folder, read.

    ``metrics`` has one row per step, numbers only; ``layers_NL [steps, L]`` is the global MaxVio of each MoE layer
    (``[steps, 0]`` where it was not written); ``devices`` the MaxVio of so many devices, one value a step; ``finished``
    says that the run wrote its summary and that it can be read, ``unreadable`` that it cannot; ``recorded`` are the
    keys that its rows have.
    """

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    metrics: pd.DataFrame
    layers_NL: np.ndarray
    devices: dict[int, np.ndarray]
    recorded: frozenset[str]
    finished: bool
    unreadable: bool
    error: str | None

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def steps(self) -> int:
        """The steps that the config asks for."""
        return int(self.config["optim"]["steps"])

    @property
    def last_step(self) -> int:
        return int(self.metrics["step"].max()) if len(self.metrics) else 0

    @property
    def complete(self) -> bool:
        return self.finished and self.last_step == self.steps

    def describe(self) -> str:
        """What became of it, for the note of its row: ``s1 cut at step 80/150``."""
        where = f"at step {self.last_step}/{self.steps}"
        if self.unreadable:
            return f"s{self.seed} not finished {where}: its summary cannot be read"
        return f"s{self.seed} failed {where}: {self.error}" if self.error else f"s{self.seed} cut {where}"


def load_runs(folder: Path) -> list[Run]:
    """Every run of the experiment in ``folder``, sorted by folder name.

    Raises:
        ValueError: if ``folder`` is not an experiment's folder or a file in it cannot be understood.
    """
    if not folder.is_dir():
        raise ValueError(f"no such folder: {folder} (expected the folder of an experiment, <runs>/<name>)")
    if (folder / "config.yaml").exists():
        raise ValueError(f"{folder} is the folder of one run; expected that of its experiment, {folder.parent}")
    configs = sorted(folder.glob("*/config.yaml"))
    if not configs:
        raise ValueError(f"{folder} holds no run (expected <run>/config.yaml in it): not the folder of an experiment")
    return [load_run(path.parent) for path in configs]


def load_run(folder: Path) -> Run:
    """Read one run folder; a run that has not written a file yet lacks what is in it.

    Raises:
        ValueError: if the config is not one of a run, or the metrics have a gap or lack a key.
    """
    records = _read_records(folder / "metrics.jsonl")
    failed = _read_json(folder / "failed.json")
    written = (folder / "summary.json").exists()
    finished = written and _can_be_read(folder / "summary.json")
    return Run(
        folder=folder,
        config=_read_config(folder),
        environment=_read_json(folder / "environment.json"),
        metrics=_metrics_frame(records, folder / "metrics.jsonl"),
        layers_NL=np.array([(record.get("layers") or {}).get("global_maxvio", []) for record in records], dtype=float),
        devices=_devices(records),
        recorded=frozenset(records[0] if records else ()),
        finished=finished,
        unreadable=written and not finished,
        error=shorten(str(failed.get("error", "unknown error")), 200) if failed and not finished else None,
    )


def _read_config(folder: Path) -> dict[str, Any]:
    config, path = load_config(folder), folder / "config.yaml"
    _refuse_other_sections(config, path)
    try:
        _ = config["balancer"]["name"], int(config["seed"]), int(config["optim"]["steps"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the config of a run (balancer.name, seed, optim.steps): {error!r}") from error
    return config


def _read_json(path: Path) -> dict[str, Any]:
    found = read_json(path)
    _refuse_other_sections(found, path)
    return found


def _can_be_read(path: Path) -> bool:
    try:
        read_json(path)
    except ValueError:
        return False
    return True


def _refuse_other_sections(found: dict[str, Any], path: Path) -> None:
    for key in SECTIONS:
        if not isinstance(found.get(key) or {}, dict):
            raise ValueError(f"{path}: expected a mapping in {key}, got {found[key]!r}")


def _read_records(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            # a run that was killed while it wrote leaves half a line at the end
            if number < len(lines):
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
    return records


def _metrics_frame(records: list[dict[str, Any]], path: Path) -> pd.DataFrame:
    for number, record in enumerate(records, start=1):
        missing = [key for key in REQUIRED if key not in record]
        if missing:
            raise ValueError(f"{path}, line {number} lacks {', '.join(missing)}")
        if record["step"] != number:
            raise ValueError(f"{path}, line {number} is of step {record['step']}: expected every step once, in order")
    return pd.DataFrame.from_records(records).reindex(columns=[*REQUIRED, *OPTIONAL]).astype(float)


def _devices(records: list[dict[str, Any]]) -> dict[int, np.ndarray]:
    by_step = [record.get("device_maxvio") or {} for record in records]
    counts = sorted({int(count) for values in by_step for count in values})
    return {count: np.array([values.get(str(count), np.nan) for values in by_step], dtype=float) for count in counts}
