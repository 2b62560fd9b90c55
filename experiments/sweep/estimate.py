"""``dry_run=true``: the plan as a table, with a measurement of a few steps; nothing of it stays."""

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from ..runs import checkpoint_step, open_run, read_json
from .job import Job, Trainer
from .plan import (
    FLOPS_RULE,
    Group,
    describe_jobs,
    describe_parameters,
    describe_sweep,
    distinguish,
    make_groups,
    span,
)
from .progress import Progress, format_count, format_seconds, print_line
from .ranks import run_ranks

STEPS = 20
# the first ones allocate and compile
WARM_UP_STEPS = 3
QUANTILES = (0.1, 0.9)
TIME_RULE = (
    "time: an estimate from {steps} steps of {job}: the 10 % to the 90 % quantile of their durations after the "
    f"first {WARM_UP_STEPS}, with start-up and validations, without checkpoints and W&B"
)


@dataclass(frozen=True)
class Measurement:
    """What a short run took.

    Attributes:
        boot: seconds until its ranks were there; once for all jobs, as their processes come from one server.
        start: seconds from there to the first step, and what the first steps took longer than later ones.
        steps: durations of the steps after those, in seconds.
        validation: seconds of one.
        end: seconds from the last record to the end of the ranks.
        peak_bytes: memory of the rank that took most.
    """

    boot: float
    start: float
    steps: list[float]
    validation: float
    end: float
    peak_bytes: int | None

    def run_seconds(self, steps: int, validations: int) -> tuple[float, float]:
        """From the lower to the upper quantile: a run of ``steps`` steps that are left, without ``boot``."""
        fixed = self.start + validations * self.validation + self.end
        low, high = np.quantile(self.steps, QUANTILES)
        return fixed + steps * float(low), fixed + steps * float(high)


def measure(index: int, job: Job, trainer: Trainer, progress: Progress) -> Measurement:
    """Run the first steps of a job in a folder that is removed; ``index`` counts the measurements from 1.

    Raises:
        RankError: a rank failed.
        OSError, ValueError, KeyError: the run left no record that can be read.
    """
    config = _shortened(job.config)
    with tempfile.TemporaryDirectory(prefix="equipoise-") as place:
        folder = Path(place) / "run"
        open_run(folder, config)
        began = time.time()
        with progress.job(index, f"measuring {job.label}", folder / "metrics.jsonl", config["optim"]["steps"]):
            run_ranks(trainer.main, folder, config["parallel"]["ranks"])
        return _read(folder, began, time.time())


def _shortened(config: dict[str, Any]) -> dict[str, Any]:
    steps = min(STEPS, config["optim"]["steps"])
    return config | {
        "optim": config["optim"] | {"steps": steps},
        # one in the end
        "validation": config["validation"] | {"every": steps + 1},
        "checkpoint": {"every": steps + 1, "keep": False},
        "tracker": config["tracker"] | {"mode": "none"},
    }


def _read(folder: Path, began: float, ended: float) -> Measurement:
    """The times of a run from its record and from when its files were written."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    seconds = [float(json.loads(line)["seconds"]) for line in lines]
    # a rank opens its log as it starts; the last thing before the first step is environment.json
    there, ready = (path.stat().st_mtime for path in (folder / "log" / "1", folder / "environment.json"))
    recorded = (folder / "metrics.jsonl").stat().st_mtime
    steady = seconds[WARM_UP_STEPS:] or seconds
    extra = sum(seconds) - len(seconds) * float(np.mean(steady))
    return Measurement(
        boot=there - began,
        start=ready - there + max(extra, 0.0),
        steps=steady,
        validation=max(recorded - ready - sum(seconds), 0.0),
        end=ended - recorded,
        peak_bytes=read_json(folder / "summary.json").get("peak_memory_bytes"),
    )


def dry_run(jobs: Sequence[Job], total: int, trainer: Trainer, console: Console, measured: bool) -> bool:
    """Print the plan; if ``measured``, with times. ``total`` counts the jobs that were refused too.

    Returns whether all that was to be measured could be.
    """
    groups = make_groups(jobs)
    found, failures = _measure_all([group for group in groups if group.left and measured], trainer, console)
    console.print(_grid(_counted(jobs, groups, total) | _measured(groups, found)))
    if len(groups) > 1:
        console.print(_group_table(groups, found))
    rules = [FLOPS_RULE]
    if found:
        job = "one job of each row" if len(groups) > 1 else groups[0].left[0].label
        rules.append(TIME_RULE.format(steps=span(min(STEPS, group.steps) for group in found), job=job))
    for rule in rules:
        console.print(Text(rule, style="dim"))
    for failure in failures:
        print_line(console, failure, "red")
    return not failures


def _measure_all(
    groups: Sequence[Group], trainer: Trainer, console: Console
) -> tuple[dict[Group, Measurement], list[str]]:
    """What one job of each group took, and why there is nothing for the others."""
    found, failures = {}, []
    with Progress(console, len(groups)) as progress:
        for index, group in enumerate(groups, start=1):
            try:
                found[group] = measure(index, group.left[0], trainer, progress)
            # whatever it is, there is no estimate then
            except Exception as error:
                failures.append(f"no estimate from {group.left[0].label}: {type(error).__name__}: {error}")
    return found, failures


def _counted(jobs: Sequence[Job], groups: Sequence[Group], total: int) -> dict[str, str]:
    """What follows from the configs, by name."""
    runs = [len(group.jobs) for group in groups]
    steps, tokens = [group.steps for group in groups], [group.tokens for group in groups]
    flops = [group.flops * group.tokens for group in groups]
    all_steps, all_tokens, all_flops = (
        sum(number * count for number, count in zip(numbers, runs, strict=True)) for numbers in (steps, tokens, flops)
    )
    a_token = span((group.flops for group in groups), scientific)
    return {
        "jobs": describe_jobs(jobs, total),
        "swept": describe_sweep(jobs),
        "ranks": span(group.ranks for group in groups),
        "steps": f"{span(steps)} a run, {all_steps:,} all",
        "tokens": f"{span(tokens)} a run, {all_tokens:,} all",
        "parameters": describe_parameters(groups),
        "FLOPs": f"{a_token} a token, {span(flops, scientific)} a run, {scientific(all_flops)} all",
        "memory a rank": _memory(max(groups, key=lambda group: sum(group.memory.values()))),
    }


def scientific(number: float) -> str:
    """A number that is too large to read.

    >>> scientific(1_234_567), scientific(1.5e21)
    ('1.23e6', '1.50e21')
    """
    digits, _, power = f"{number:.2e}".partition("e")
    return f"{digits}e{int(power)}"


def _memory(group: Group) -> str:
    parts = ", ".join(f"{name} {decimal(number)}" for name, number in group.memory.items())
    return f"{decimal(sum(group.memory.values()))} computed, without activations: {parts}"


def _measured(groups: Sequence[Group], found: Mapping[Group, Measurement]) -> dict[str, str]:
    """What was measured, by name."""
    left = sum(len(group.left) for group in groups)
    if not found:
        return {"time": "no estimate" if left else "nothing is left to run"}
    peaks = [measurement.peak_bytes for measurement in found.values() if measurement.peak_bytes]
    times = [_job_seconds(job, measurement) for group, measurement in found.items() for job in group.left]
    boot = max(measurement.boot for measurement in found.values())
    low, high = (boot + sum(ends) for ends in zip(*times, strict=True))
    which = f"{len(times)} of {left}" if len(times) < left else str(left)
    return {
        "peak memory": f"{span(peaks, decimal)} a rank, measured" if peaks else "not recorded",
        "time a run": f"{span((end for time in times for end in time), format_seconds)}, an estimate",
        "time in all": f"{span((low, high), format_seconds)}, an estimate, for {which} left",
    }


def _job_seconds(job: Job, measurement: Measurement) -> tuple[float, float]:
    """From the lower to the upper estimate, of what is left of a job."""
    steps, every, done = job.config["optim"]["steps"], job.config["validation"]["every"], checkpoint_step(job.folder)
    validations = steps // every - done // every + (steps % every > 0)
    return measurement.run_seconds(steps - done, validations)


def _grid(facts: Mapping[str, str]) -> Table:
    grid = Table(box=SIMPLE_HEAD, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for name, text in facts.items():
        grid.add_row(Text(name), Text(text))
    return grid


def _group_table(groups: Sequence[Group], found: Mapping[Group, Measurement]) -> Table:
    """A row for the jobs that differ in nothing but balancer and seed."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", overflow="fold", min_width=12)
    for title in ("jobs", "total", "active", "FLOPs a run", "memory", "time a run"):
        table.add_column(title, justify="right")
    same = {"balancer": {"name": ""}, "seed": 0}
    for group, settings in zip(groups, distinguish([group.config | same for group in groups])[0], strict=True):
        counts = (format_count(group.parameters.total), format_count(group.parameters.active))
        memory, flops = decimal(sum(group.memory.values())), scientific(group.flops * group.tokens)
        time = span(_job_seconds(group.left[0], found[group]), format_seconds) if group in found else "-"
        table.add_row(*(Text(cell) for cell in (settings, str(len(group.jobs)), *counts, flops, memory, time)))
    return table
