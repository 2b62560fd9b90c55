"""Check the configs of all jobs, run those that are not done one after the other, and say what came of them.

The same command again skips what is done and resumes what was cut: see ``runs.py``.
"""

import json
import math
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from ..report.statistics import tail_mean, tail_start
from ..runs import (
    COMMAND,
    RunState,
    claim,
    open_run,
    read_json,
    refuse_other_run,
    run_folder,
    run_label,
    run_state,
    write_failure,
)
from .progress import Progress, format_seconds
from .ranks import RankError, run_ranks

CPU_RANKS = 2


class Trainer(Protocol):
    """What runs a job: the module ``experiments.train``, or a stand-in in tests."""

    def validate(self, config: dict[str, Any]) -> None:
        """Raise ``ValueError`` for a config that cannot be trained."""

    def main(self, run_folder: str) -> None:
        """Run one rank. The ranks are new processes, so it must be importable by its name."""


@dataclass(frozen=True)
class Job:
    """One run: ``index`` counts from 1 within the sweep, ``config`` is resolved to the last number."""

    index: int
    config: dict[str, Any]
    folder: Path


@dataclass(frozen=True)
class Failure:
    """Why a job did not complete, in one line, and the file with the rest."""

    label: str
    cause: str
    log: Path | None = None

    @property
    def detail(self) -> str:
        return f"{self.cause} (log: {self.log})" if self.log else self.cause


def run_all(
    configs: Sequence[dict[str, Any]], sweep: bool, trainer: Trainer | None = None, console: Console | None = None
) -> int:
    """Run one job a config; one that fails does not stop the next. All configs are checked before anything is trained.

    Returns the exit status: 0 if every job, and for a sweep every row of its table, is complete, else 1.

    Raises:
        ValueError: for a config that cannot be trained, if it is the only one; in a sweep it counts as a failed job.
        KeyboardInterrupt: on Ctrl-C or SIGTERM; the ranks have been stopped.
    """
    if "RANK" in os.environ:
        raise ValueError(
            "under torchrun (RANK is set) the command cannot start ranks of its own: make the run folder with "
            "launch=false first, then expected: torchrun ... -m equipoise.experiments.train <run folder>"
        )
    # without a terminal rich takes 80 columns, too few for the table
    console = console or Console(width=None if sys.stdout.isatty() else 100)
    trainer = trainer or default_trainer()
    jobs, failures = check(configs, trainer, console) if sweep else ([prepare(1, configs[0], trainer)], [])
    if not configs[0]["launch"]:
        print_commands(jobs, console)
        return 1 if failures else 0
    with Progress(console, len(configs)) as progress:
        failures += [failure for job in jobs if (failure := run_job(job, trainer, progress))]
    if sweep:
        complete = finish_sweep(jobs, failures, len(configs), console)
    else:
        complete = not failures
        _print(console, str(jobs[0].folder))
    return 0 if complete and not failures else 1


def run_one(config: dict[str, Any], trainer: Trainer | None = None) -> float | None:
    """Run one job where a plugin of Hydra wants it; returns its ``val_bpb``.

    Raises:
        RuntimeError: if the job failed.
    """
    trainer = trainer or default_trainer()
    job = prepare(1, config, trainer)
    with Progress(Console(), 1) as progress:
        failure = run_job(job, trainer, progress)
    if failure:
        raise RuntimeError(f"{failure.label}: {failure.detail}")
    return read_json(job.folder / "summary.json").get("val_bpb")


def default_trainer() -> Trainer:
    """The module that trains."""
    from .. import train

    return cast(Trainer, train)


def check(configs: Sequence[dict[str, Any]], trainer: Trainer, console: Console) -> tuple[list[Job], list[Failure]]:
    """Prepare all jobs of a sweep and print at once which configs cannot be trained."""
    jobs, failures = [], []
    for index, config in enumerate(configs, start=1):
        try:
            jobs.append(prepare(index, config, trainer))
        except ValueError as error:
            failures.append(Failure(run_label(config), str(error)))
    # they are named again at the end, after what could run
    if failures and jobs:
        print_failures(failures, len(configs), console)
    return jobs, failures


def prepare(index: int, config: dict[str, Any], trainer: Trainer) -> Job:
    """Settle the number of ranks and the folder of a job, and check its config; nothing is written.

    Raises:
        ValueError: for a config that cannot be trained, or a folder that holds another run.
    """
    config = settle_ranks(config)
    job = Job(index, {key: value for key, value in config.items() if key not in COMMAND}, run_folder(config))
    refuse_other_run(job.folder, job.config)
    if run_state(job.folder) != RunState.DONE:
        try:
            trainer.validate(job.config)
        except (HydraException, OmegaConfBaseException) as error:
            raise ValueError(str(error)) from error
    return job


def settle_ranks(config: dict[str, Any]) -> dict[str, Any]:
    """The config with ``parallel.ranks`` as a number; ``auto`` is one rank a GPU, ``CPU_RANKS`` without one.

    ``auto`` takes fewer where ``data.microbatches`` does not divide by that, so that the defaults run on any machine.

    Raises:
        ValueError: for ranks that are not a positive number, more than the GPUs, or do not divide the microbatches.
    """
    ranks, microbatches = config["parallel"]["ranks"], config["data"]["microbatches"]
    gpus = torch.cuda.device_count()
    if not _is_positive(microbatches):
        raise ValueError(f"data.microbatches: expected a positive whole number, got {microbatches!r}")
    if ranks == "auto":
        ranks = max(number for number in range(1, (gpus or CPU_RANKS) + 1) if microbatches % number == 0)
    if not _is_positive(ranks):
        raise ValueError(f"parallel.ranks: expected auto or a positive whole number, got {ranks!r}")
    if config["launch"] and 0 < gpus < ranks:
        raise ValueError(f"parallel.ranks: expected at most {gpus}, the GPUs that are visible here, got {ranks}")
    if microbatches % ranks:
        raise ValueError(
            f"data.microbatches={microbatches} is over all ranks: expected a multiple of parallel.ranks={ranks}"
        )
    return config | {"parallel": config["parallel"] | {"ranks": ranks}}


def _is_positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def print_commands(jobs: Sequence[Job], console: Console) -> None:
    """Write the run folders that are not done and print the command that starts the ranks of each."""
    for job in jobs:
        if run_state(job.folder) != RunState.DONE:
            with claim(job.folder):
                open_run(job.folder, job.config)
            ranks = job.config["parallel"]["ranks"]
            command = ["torchrun", f"--nproc-per-node={ranks}", "-m", "equipoise.experiments.train", str(job.folder)]
            _print(console, shlex.join(command))


def run_job(job: Job, trainer: Trainer, progress: Progress) -> Failure | None:
    """Run one job unless it is done; what stops it is printed and returned."""
    label = run_label(job.config)
    if run_state(job.folder) == RunState.DONE:
        progress.end(job.index, label, "skipped", f"was done before: {describe(job)}")
        return None
    try:
        with claim(job.folder):
            open_run(job.folder, job.config)
            failure = _run_claimed(job, trainer, progress)
    except (ValueError, OSError) as error:
        failure = Failure(label, str(error))
    if failure:
        progress.end(job.index, label, "failed", f"failed: {failure.detail}", style="red")
    else:
        progress.end(job.index, label, "done", f"done in {format_seconds(progress.durations[-1])}: {describe(job)}")
    return failure


def _run_claimed(job: Job, trainer: Trainer, progress: Progress) -> Failure | None:
    """Run the ranks of a job whose folder is ready; what stops them is written to ``failed.json`` and returned."""
    label, settings = run_label(job.config), job.config
    rank, log = None, None
    try:
        with progress.job(job.index, label, job.folder / "metrics.jsonl", settings["optim"]["steps"]):
            run_ranks(trainer.main, job.folder, settings["parallel"]["ranks"])
        if run_state(job.folder) == RunState.DONE:
            return None
        cause = "the ranks ended, but wrote no summary.json"
    except RankError as error:
        cause, rank, log = str(error), error.rank, error.log
    # say a rendezvous that found no port: it ends this job, not the sweep
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
    write_failure(job.folder, cause, rank, log)
    return Failure(label, cause if rank is None else f"rank {rank}: {cause}", log)


def describe(job: Job) -> str:
    """The result of a complete run in one line: bits per byte at the end, MaxVio over the tail window."""
    lines = (job.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    steps = [row["step"] for row in rows]
    start = tail_start(job.config["optim"]["steps"], job.config["report"]["tail"])
    overall, local = (
        tail_mean(steps, [math.nan if row[key] is None else row[key] for row in rows], start)
        for key in ("global_maxvio", "local_maxvio")
    )
    bits = read_json(job.folder / "summary.json").get("val_bpb")
    return (
        f"val_bpb {bits:.3f}, " * (bits is not None)
        + f"MaxVio global {overall:.2f} local {local:.2f} from step {start}"
    )


def finish_sweep(jobs: Sequence[Job], failures: Sequence[Failure], total: int, console: Console) -> bool:
    """Build and print the table of each experiment, then what failed; True if every row is complete."""
    # matplotlib and pandas take a second to import
    from ..report.command import build_report, print_table

    complete = True
    for folder in dict.fromkeys(job.folder.parent for job in jobs if job.folder.exists()):
        try:
            report = build_report(folder)
        except ValueError as error:
            _print(console, f"no report of {folder}: {error}", style="red")
            complete = False
        else:
            print_table(report, console)
            complete = complete and report.complete
    if failures:
        print_failures(failures, total, console)
    return complete


def print_failures(failures: Sequence[Failure], total: int, console: Console) -> None:
    """List what failed, one line a cause."""
    labels: dict[str, list[str]] = {}
    for failure in failures:
        labels.setdefault(failure.detail, []).append(failure.label)
    _print(console, f"{len(failures)} of {total} jobs failed:", style="red")
    for detail, who in labels.items():
        _print(console, f"  {', '.join(who)}: {detail}", style="red")


def _print(console: Console, line: str, style: str = "") -> None:
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
