"""Read the run folders of one experiment, refuse what cannot be compared, group the rest into rows.

Runs in one table may differ only in ``balancer`` and ``seed``; everything else that can change a result must be equal,
and the refusal names the key and both values. A row is one resolved ``balancer`` section, its runs are the seeds.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import pandas as pd
import yaml

from ..runs import FREE, flatten

# the order of the default experiment; presets that it does not know follow alphabetically
ORDER = (
    "none",
    "signed_count",
    "gshard",
    "gshard_global",
    "lei",
    "rank_averaged_qb",
    "histogram_qb",
    "eqb",
    "eqb_fp32",
    "eqb_gshard",
    "eqb_lei",
)
COMPARED = ("balancer", "seed")
REQUIRED = ("step", "tokens", "global_maxvio", "local_maxvio")
OPTIONAL = ("val_bpb", "tokens_per_s", "dead_share", "skipped", "clamped_share")
ABSENT = "absent"


@dataclass(frozen=True, eq=False)
class Run:
    """One run folder, read.

    ``metrics`` has one row per step, numbers only; ``layers_NL [steps, L]`` is the global MaxVio of each MoE layer
    (``[steps, 0]`` where it was not written); ``finished`` says that the run wrote its summary.
    """

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    metrics: pd.DataFrame
    layers_NL: np.ndarray
    finished: bool
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
        return f"s{self.seed} failed {where}: {self.error}" if self.error else f"s{self.seed} cut {where}"


@dataclass(frozen=True, eq=False)
class Row:
    """One balancer: its ``label`` in the table and its runs, one a seed, in the order of the seeds."""

    label: str
    name: str
    runs: tuple[Run, ...]

    @property
    def complete(self) -> list[Run]:
        return [run for run in self.runs if run.complete]


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
    finished = (folder / "summary.json").exists()
    return Run(
        folder=folder,
        config=_read_config(folder / "config.yaml"),
        environment=_read_json(folder / "environment.json"),
        metrics=_metrics_frame(records, folder / "metrics.jsonl"),
        layers_NL=np.array([(record.get("layers") or {}).get("global_maxvio", []) for record in records], dtype=float),
        finished=finished,
        error=shorten(str(failed.get("error", "unknown error")), 200) if failed and not finished else None,
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        _ = config["balancer"]["name"], int(config["seed"]), int(config["optim"]["steps"])
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the config of a run (balancer.name, seed, optim.steps): {error!r}") from error
    return config


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a JSON object: {error}") from error


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


def refuse_incomparable(runs: Sequence[Run]) -> None:
    """Check that the runs differ in nothing but what is compared.

    Raises:
        ValueError: naming every key (five at most) with two values and the runs that have them.
    """
    settings = {
        run.folder.name: flatten({k: v for k, v in run.config.items() if k not in (*COMPARED, *FREE)}) for run in runs
    }
    # a run that failed before it wrote its environment has nothing to disagree with
    machines = {run.folder.name: _machine(run) for run in runs if run.environment}
    found = [*differences(settings), *differences(machines)]
    if found:
        raise ValueError(
            f"runs in one table may differ only in {' and '.join(COMPARED)}, but these differ in more: "
            f"{'; '.join(found[:5])}{'; ...' if len(found) > 5 else ''}. Give each comparison a name= of its own"
        )


def _machine(run: Run) -> dict[str, Any]:
    return {
        "data.sha256": (run.environment.get("data") or {}).get("sha256"),
        "world_size": run.environment.get("world_size"),
    }


def differences(settings: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """For each key whose value is not the same everywhere, a line with two values and who has them.

    >>> differences({"a": {"lr": 1, "x": 0}, "b": {"lr": 2, "x": 0}})
    ['lr: 1 in a, 2 in b']
    """
    found = []
    for key in sorted({key for values in settings.values() for key in values}):
        owners: dict[str, str] = {}
        for owner, values in settings.items():
            owners.setdefault(str(values.get(key, ABSENT)), owner)
        if len(owners) > 1:
            found.append(f"{key}: " + ", ".join(f"{value} in {owner}" for value, owner in list(owners.items())[:2]))
    return found


def environment_warnings(runs: Iterable[Run]) -> list[str]:
    """What differs between the machines of the runs and may matter a little: versions of torch, commit, devices."""
    seen = {
        run.folder.name: {
            "torch": (run.environment.get("versions") or {}).get("torch"),
            "commit": run.environment.get("commit"),
            "devices": run.environment.get("devices"),
        }
        for run in runs
        if run.environment
    }
    return [f"the runs were not made alike: {line}" for line in differences(seen)]


def group_rows(runs: Sequence[Run]) -> list[Row]:
    """Group runs by their resolved ``balancer`` section, in the order of the table.

    Raises:
        ValueError: if a row has a seed twice.
    """
    groups: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        groups.setdefault(json.dumps(run.config["balancer"], sort_keys=True), []).append(run)
    rows = []
    for group in groups.values():
        _refuse_twice(group)
        balancer = group[0].config["balancer"]
        rivals = [other[0].config["balancer"] for other in groups.values()]
        rows.append(Row(label_of(balancer, rivals), str(balancer["name"]), tuple(group)))
    return sorted(rows, key=_position)


def _refuse_twice(group: Sequence[Run]) -> None:
    for first, second in pairwise(group):
        if first.seed == second.seed:
            raise ValueError(
                f"seed {first.seed} of {first.config['balancer']['name']} is there twice: "
                f"{first.folder.name} and {second.folder.name}; remove one or give it a name= of its own"
            )


def label_of(balancer: Mapping[str, Any], rivals: Iterable[Mapping[str, Any]]) -> str:
    """The balancer's name, with the options that set it apart where others have the same name.

    >>> one, two = {"name": "lei", "gradient": {"eta": 1e-05}}, {"name": "lei", "gradient": {"eta": 2e-05}}
    >>> label_of(one, [one]), label_of(two, [one, two])
    ('lei', 'lei (gradient.eta=2e-05)')
    """
    own = flatten(balancer)
    namesakes = [flatten(rival) for rival in rivals if rival["name"] == balancer["name"]]
    keys = sorted({key for rival in namesakes for key in rival if any(o.get(key) != rival[key] for o in namesakes)})
    options = ", ".join(f"{key}={own[key]}" for key in keys if key in own)
    return f"{balancer['name']} ({options})" if options else str(balancer["name"])


def _position(row: Row) -> tuple[int, str, list[tuple[float, str]]]:
    """Order of the table: the presets' own, then the name, then the options, numbers by their size."""
    rank = ORDER.index(row.name) if row.name in ORDER else len(ORDER)
    options = sorted(flatten(row.runs[0].config["balancer"]).items())
    numbers = [
        (float(v) if isinstance(v, int | float) else float("inf"), f"{k}={v}") for k, v in options if k != "name"
    ]
    return rank, row.name, numbers
