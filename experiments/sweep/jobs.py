"""Check the configs of all jobs, run those that are not done one after the other, and say what came of them.

The same command again skips what is done and resumes what was cut: see ``runs.py``.
"""

import functools
import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from ..checks import check_switch
from ..ledger import Entry, record
from ..report.statistics import tail_mean, tail_start
from ..runs import (
    COMMAND,
    RunState,
    claim,
    open_run,
    read_json,
    refuse_other_run,
    renew,
    run_folder,
    run_label,
    run_state,
    write_failure,
)
from .estimate import dry_run
from .job import Failure, Job, Trainer
from .nodes import Node, find_node, wait_for
from .plan import distinguish, print_plan
from .plugins import PluginJobError
from .progress import Progress, format_seconds, print_line
from .ranks import RankError, run_ranks, take_part

CPU_RANKS = 2


def run_all(
    configs: Sequence[dict[str, Any]], sweep: bool, trainer: Trainer | None = None, console: Console | None = None
) -> int:
    """Run one job a config; one that fails does not stop the next. All configs are checked before anything is trained.

    With ``dry_run`` nothing is run but a measurement of a few steps, and nothing stays. Returns the exit status: 0 if
    every job, and for a sweep every row of its table, is complete, else 1.

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
    for key in ("launch", "dry_run"):
        check_switch(key, configs[0][key])
    jobs, failures = check(configs, trainer, console) if sweep else ([prepare(1, configs[0], trainer)], [])
    if not jobs:
        return 1
    if configs[0]["dry_run"]:
        complete = dry_run(jobs, len(configs), trainer, console, measured=configs[0]["launch"])
        return 0 if complete and not failures else 1
    if not configs[0]["launch"]:
        print_commands(jobs, console)
        return 1 if failures else 0
    if sweep:
        print_plan(jobs, len(configs), console)
    enter_ledger(jobs, [shlex.join(["equipoise", *sys.argv[1:]])] * len(jobs), platform.node())
    with Progress(console, len(configs)) as progress:
        failures += [failure for job in jobs if (failure := run_job(job, trainer, progress))]
    if sweep:
        complete = finish_sweep(jobs, failures, len(configs), console)
    else:
        complete = not failures
        print_line(console, str(jobs[0].folder))
    return 0 if complete and not failures else 1


def run_one(config: dict[str, Any], trainer: Trainer | None = None) -> float | None:
    """Run one job where a plugin of Hydra wants it; returns its ``val_bpb``, but None on all nodes but the first.

    Raises:
        PluginJobError: if the job failed.
        ValueError: for a config that cannot be trained, or ranks that the nodes cannot share.
    """
    trainer, node = trainer or default_trainer(), find_node()
    if node.index:
        _join(config, trainer, node)
        return None
    job = prepare(1, config, trainer)
    # before anything is written
    node.local_ranks(job.config["parallel"]["ranks"])
    # a plugin runs jobs elsewhere and in an order of its own: each goes on alone
    overrides = HydraConfig.get().overrides if HydraConfig.initialized() else None
    words = [*overrides.hydra, *overrides.task] if overrides else sys.argv[1:]
    enter_ledger([job], [shlex.join(["equipoise", *words])], platform.node())
    with Progress(Console(), 1) as progress:
        failure = run_job(job, trainer, progress)
    if failure:
        raise PluginJobError(f"{failure.label}: {failure.detail}")
    return read_json(job.folder / "summary.json").get("val_bpb")


def _join(config: dict[str, Any], trainer: Trainer, node: Node) -> None:
    """Take part in a job whose folder node 0 writes: what lies in it before its config is there says nothing.

    Raises:
        PluginJobError: if a rank failed.
        TimeoutError: if node 0 writes no config in time.
        ValueError: as ``prepare`` does, or for ranks that the nodes cannot share.
    """
    job = _make_job(1, config)
    ranks = job.config["parallel"]["ranks"]
    node.local_ranks(ranks)
    _validate(job, trainer)
    wait_for(job.folder / "config.yaml")
    refuse_other_run(job.folder, job.config)
    if run_state(job.folder) != RunState.DONE:
        take_part(trainer.main, job.folder, ranks)


def enter_ledger(jobs: Sequence[Job], commands: Sequence[str], host: str | None) -> None:
    """Write down what shall run, with the command that goes on with each job; ``host`` is where a launcher runs."""
    place, now = str(Path.cwd()), datetime.now().astimezone().isoformat(timespec="seconds")
    experiments: dict[Path, dict[str, Entry]] = {}
    for job, command in zip(jobs, commands, strict=True):
        entry = Entry(job.label, job.config["optim"]["steps"], command, place, host, now)
        experiments.setdefault(job.folder.parent, {})[job.folder.name] = entry
    for experiment, entries in experiments.items():
        record(experiment, entries)


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
    settings, _ = distinguish([job.config for job in jobs])
    jobs = [replace(job, settings=text) for job, text in zip(jobs, settings, strict=True)]
    # they are named again at the end, after what could run
    if failures:
        print_failures(failures, len(configs), console)
    return jobs, failures


def prepare(index: int, config: dict[str, Any], trainer: Trainer) -> Job:
    """Settle the number of ranks and the folder of a job, and check its config; nothing is written.

    Raises:
        ValueError: for a config that cannot be trained, or a folder that holds another run.
    """
    job = _make_job(index, config)
    refuse_other_run(job.folder, job.config)
    _validate(job, trainer)
    return job


def _make_job(index: int, config: dict[str, Any]) -> Job:
    config = settle_ranks(config)
    return Job(index, {key: value for key, value in config.items() if key not in COMMAND}, run_folder(config))


def _validate(job: Job, trainer: Trainer) -> None:
    """Check that a job can be trained, unless it was."""
    if run_state(job.folder) == RunState.DONE:
        return
    try:
        trainer.validate(job.config)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(str(error)) from error


def settle_ranks(config: dict[str, Any]) -> dict[str, Any]:
    """The config with ``parallel.ranks`` as a number; ``auto`` is one rank a GPU, ``CPU_RANKS`` a node without one.

    ``auto`` takes fewer where ``data.microbatches`` does not divide by that, so that the defaults run on any machine.

    Raises:
        ValueError: for ranks that are not a positive number, more than the GPUs, or do not divide the microbatches.
    """
    ranks, microbatches = config["parallel"]["ranks"], config["data"]["microbatches"]
    nodes = find_node().count
    gpus = torch.cuda.device_count() * nodes
    if not _is_positive(microbatches):
        raise ValueError(f"data.microbatches: expected a positive whole number, got {microbatches!r}")
    if ranks == "auto":
        most = gpus or CPU_RANKS * nodes
        ranks = max((number for number in range(nodes, most + 1, nodes) if microbatches % number == 0), default=nodes)
    if not _is_positive(ranks):
        raise ValueError(f"parallel.ranks: expected auto or a positive whole number, got {ranks!r}")
    if config["launch"] and 0 < gpus < ranks:
        where = "here" if nodes == 1 else f"on {nodes} nodes"
        raise ValueError(f"parallel.ranks: expected at most {gpus}, the GPUs that are visible {where}, got {ranks}")
    if microbatches % ranks:
        raise ValueError(
            f"data.microbatches={microbatches} is over all ranks: expected a multiple of parallel.ranks={ranks}"
        )
    cores = nodes * (os.cpu_count() or 1)
    if config["launch"] and not gpus and ranks > max(cores, CPU_RANKS * nodes):
        _warn(f"parallel.ranks={ranks} on {cores} cores and no GPU: the ranks share cores, which is slow")
    return config | {"parallel": config["parallel"] | {"ranks": ranks}}


@functools.cache
def _warn(text: str) -> None:
    """Say it once, not for every job of a sweep."""
    print(f"equipoise: {text}", file=sys.stderr)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def print_commands(jobs: Sequence[Job], console: Console) -> None:
    """Write the run folders that are not done and print the command that starts the ranks of each."""
    for job in jobs:
        if run_state(job.folder) == RunState.DONE:
            renew(job.folder, job.config)
    jobs = [job for job in jobs if run_state(job.folder) != RunState.DONE]
    commands = [_torchrun(job) for job in jobs]
    enter_ledger(jobs, commands, host=None)
    for job, command in zip(jobs, commands, strict=True):
        with claim(job.folder):
            open_run(job.folder, job.config)
        print_line(console, command)


def _torchrun(job: Job) -> str:
    ranks = job.config["parallel"]["ranks"]
    return shlex.join(["torchrun", f"--nproc-per-node={ranks}", "-m", "equipoise.experiments.train", str(job.folder)])


def run_job(job: Job, trainer: Trainer, progress: Progress) -> Failure | None:
    """Run one job unless it is done; what stops it is printed and returned."""
    label = job.label
    try:
        if run_state(job.folder) == RunState.DONE:
            renew(job.folder, job.config)
            progress.end(job.index, label, "skipped", f"was done before: {describe(job)}")
            return None
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
    label, settings = job.label, job.config
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
        # submitit raises when the time of a Slurm job is up for good, whatever is under way: the run is cut
        if type(error).__module__.startswith("submitit."):
            raise
        cause = f"{type(error).__name__}: {error}"
    write_failure(job.folder, cause, rank, log)
    return Failure(label, cause if rank is None else f"rank {rank}: {cause}", log)


def describe(job: Job) -> str:
    """The result of a complete run in one line: bits per byte at the end, MaxVio over the tail window."""
    try:
        return _result(job)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its metrics cannot be read ({type(error).__name__}: {error})"


def _result(job: Job) -> str:
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
            print_line(console, f"no report of {folder}: {error}", style="red")
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
    print_line(console, f"{len(failures)} of {total} jobs failed:", style="red")
    for detail, who in labels.items():
        print_line(console, f"  {', '.join(who)}: {detail}", style="red")
