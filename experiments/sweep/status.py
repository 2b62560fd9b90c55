"""``equipoise status runs/<experiment>``: what became of every planned run, and the command that goes on.

==========  ============================================================================================
done        complete
running     a launcher holds its folder
running?    nobody is known to hold it, but a step was recorded within the last ``RECENT_SECONDS``: its
            ranks were started by torchrun, or their launcher was killed a moment ago
failed      its ranks stopped with an error; the same command tries again
cut         started and stopped half-way; the same command goes on from its last checkpoint
missing     planned, never started
==========  ============================================================================================

Exit status: 0 if all are done, 3 if one is not, 2 if the folder is not that of an experiment.
"""

import argparse
import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..ledger import Entry, forget, read_ledger
from ..runs import LOCK, RunState, checkpoint_step, claimant, is_claimed, load_config, read_json, run_label, run_state
from .progress import MetricsTail, format_seconds, print_line

DONE, TROUBLE, INCOMPLETE = 0, 2, 3
RECENT_SECONDS = 180.0
STATES = ("done", "running", "running?", "failed", "cut", "missing")
STYLES = {"done": "green", "running": "cyan", "running?": "cyan", "failed": "red", "cut": "yellow", "missing": "dim"}


@dataclass(frozen=True)
class Line:
    """One run.

    Attributes:
        name: of its folder.
        label: name for people.
        state: one of ``STATES``.
        step, steps: the last that was recorded, and how many there will be; None if unknown.
        resume_step: step of the checkpoint from which it goes on, 0 for the start; None if done or running.
        loss: of the last step, in nats per token.
        val_bpb: of a complete run.
        seconds: of training, as far as it is recorded.
        seconds_left: predicted, of a run that is at work.
        claimant: which launcher is at work there.
        reason, log: why it failed, and the file with the rest.
        command, place: what goes on with it and its working directory, as the ledger has them.
    """

    name: str
    label: str
    state: str
    step: int = 0
    steps: int | None = None
    resume_step: int | None = None
    loss: float | None = None
    val_bpb: float | None = None
    seconds: float | None = None
    seconds_left: float | None = None
    claimant: str | None = None
    reason: str | None = None
    log: str | None = None
    command: str | None = None
    place: str | None = None


def main(arguments: Sequence[str]) -> int:
    """Entry of the subcommand; returns the exit status."""
    options = _parser().parse_args(arguments)
    folder: Path = options.folder
    try:
        lines = collect(folder)
        if options.forget:
            lines = _forget(folder, lines)
    except (ValueError, OSError) as error:
        print(f"equipoise status: {error}", file=sys.stderr)
        return TROUBLE
    if options.json:
        counts, runs = _counts(lines), [asdict(line) for line in lines]
        print(
            json.dumps({"folder": str(folder), "counts": counts, "commands": commands(lines), "runs": runs}, indent=2)
        )
    else:
        show(folder, lines, Console(width=None if sys.stdout.isatty() else 100))
    return DONE if all(line.state == "done" for line in lines) else INCOMPLETE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="equipoise status",
        description="Say what became of every run of an experiment, and which command goes on.",
        epilog="Exit status: 0 all are done, 3 one is not, 2 not the folder of an experiment.",
    )
    parser.add_argument("folder", type=Path, help="folder of an experiment, runs/<name>")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--forget", action="store_true", help="drop from the ledger what was planned and never started")
    return parser


def collect(folder: Path) -> list[Line]:
    """All runs of the experiment in ``folder``: those that were planned in their order, then others that lie there.

    Raises:
        ValueError: ``folder`` is not the folder of an experiment, or its ledger cannot be understood.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder} (expected that of an experiment, runs/<name>)")
    if (folder / "config.yaml").exists():
        raise ValueError(f"{folder} is the folder of one run; expected that of its experiment, {folder.parent}")
    ledger = read_ledger(folder)
    names = [*ledger, *sorted(path.parent.name for path in folder.glob("*/config.yaml"))]
    if not names:
        inside = sorted({path.relative_to(folder).parts[0] for path in folder.glob("*/*/config.yaml")})
        hint = f"; did you mean {', '.join(str(folder / name) for name in inside[:5])}?" if inside else ""
        raise ValueError(f"{folder} holds neither runs nor a ledger: not the folder of an experiment{hint}")
    return _tell_apart([look(folder / name, ledger.get(name)) for name in dict.fromkeys(names)])


def _tell_apart(lines: Sequence[Line]) -> list[Line]:
    """Runs that no ledger names, and that differ in more than balancer and seed, by the names of their folders."""
    labels = Counter(line.label for line in lines)
    return [Line(**asdict(line) | {"label": line.name if labels[line.label] > 1 else line.label}) for line in lines]


def look(folder: Path, entry: Entry | None) -> Line:
    """The run in ``folder``, which may not exist, with its ``entry`` in the ledger."""
    known: dict[str, Any] = {"name": folder.name, "label": entry.label if entry else folder.name}
    if entry:
        known |= {"steps": entry.steps, "command": entry.command, "place": entry.place}
    if run_state(folder) == RunState.NEW:
        return Line(**known, state="missing")
    try:
        config = load_config(folder)
        known |= {"steps": int(config["optim"]["steps"]), "label": entry.label if entry else run_label(config)}
        summary, failed = read_json(folder / "summary.json"), read_json(folder / "failed.json")
    except (ValueError, KeyError, TypeError) as error:
        return Line(**known, state="failed", reason=f"cannot be read: {' '.join(str(error).split())}")
    if run_state(folder) == RunState.DONE:
        result = {"step": summary.get("steps", known["steps"]), "val_bpb": summary.get("val_bpb")}
        return Line(**known, **result, state="done", seconds=summary.get("train_s"))
    return _unfinished(folder, known, failed)


def _unfinished(folder: Path, known: dict[str, Any], failed: Mapping[str, Any]) -> Line:
    tail = MetricsTail(folder / "metrics.jsonl")
    tail.poll()
    known |= {"step": tail.step, "loss": tail.row.get("loss"), "seconds": tail.seconds or None}
    state = _at_work(folder)
    if state:
        who = claimant(folder) if state == "running" else None
        return Line(**known, state=state, seconds_left=tail.seconds_left(known["steps"]), claimant=who)
    known["resume_step"] = checkpoint_step(folder)
    if failed:
        rank, log = failed.get("rank"), failed.get("log")
        reason = f"{'' if rank is None else f'rank {rank}: '}{' '.join(str(failed.get('error')).split())}"
        return Line(**known, state="failed", reason=reason, log=str(folder / log) if log else None)
    # launch=false writes the folder, and the ranks that somebody starts write the rest
    started = tail.step or (folder / "log").exists() or (folder / "environment.json").exists()
    return Line(**known, state="cut" if started else "missing")


def _at_work(folder: Path) -> str | None:
    """``running``, ``running?`` or None."""
    if is_claimed(folder):
        return "running"
    metrics, lock = folder / "metrics.jsonl", folder / LOCK
    if not metrics.exists() or (folder / "failed.json").exists():
        return None
    recorded = metrics.stat().st_mtime
    # a launcher that ends by itself empties the file that it has locked, after its ranks have ended
    let_go = lock.exists() and lock.stat().st_size == 0 and lock.stat().st_mtime >= recorded
    return "running?" if time.time() - recorded < RECENT_SECONDS and not let_go else None


def _forget(folder: Path, lines: Sequence[Line]) -> list[Line]:
    """Drop from the ledger what never made a folder.

    Raises:
        ValueError: a launcher is at work, and what it has planned may come next.
    """
    busy = [line.label for line in lines if line.state in ("running", "running?")]
    if busy:
        raise ValueError(f"{', '.join(busy)} runs in {folder}: stop it first, what is missing may come next")
    gone = [line.name for line in lines if line.state == "missing" and not (folder / line.name).exists()]
    forget(folder, gone)
    print(f"forgot {len(gone)} planned runs that never started", file=sys.stderr)
    return [line for line in lines if line.name not in gone]


def commands(lines: Sequence[Line]) -> list[str]:
    """What to run for that which is neither done nor at work, each command once; from elsewhere, with its place."""
    rest = [line for line in lines if line.state in ("failed", "cut", "missing") and line.command]
    here = str(Path.cwd())
    return list(dict.fromkeys(f"{line.command}{'' if line.place == here else f'  # in {line.place}'}" for line in rest))


def _counts(lines: Sequence[Line]) -> dict[str, int]:
    counted = Counter(line.state for line in lines)
    return {state: counted[state] for state in STATES if counted[state]}


def show(folder: Path, lines: Sequence[Line], console: Console) -> None:
    """Print the table, what failed, how many there are of each state, and what to do next."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("run", overflow="fold", min_width=20)
    table.add_column("state", no_wrap=True)
    for title in ("step", "result", "training"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("next", overflow="fold")
    for line in lines:
        cells = (line.label, Text(line.state, STYLES[line.state]), _step(line), _result(line), _time(line), _note(line))
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))
    console.print(table)
    for line in lines:
        if line.reason:
            log = f" (log: {line.log})" if line.log else ""
            print_line(console, f"{line.label} failed: {line.reason}{log}", "red")
    print_line(
        console, f"{len(lines)} runs: {', '.join(f'{number} {state}' for state, number in _counts(lines).items())}"
    )
    for command in commands(lines):
        print_line(console, f"to go on: {command}")
    unknown = sum(1 for line in lines if line.state in ("failed", "cut") and not line.command)
    if unknown:
        print_line(console, f"to go on with {unknown} of them: the command that started them, which no ledger knows")
    if all(line.state == "done" for line in lines):
        print_line(console, f"to compare them: {shlex.join(['equipoise-report', str(folder)])}")


def _step(line: Line) -> str:
    return f"{line.step}/{'?' if line.steps is None else line.steps}"


def _result(line: Line) -> str:
    if line.val_bpb is not None:
        return f"{line.val_bpb:.3f} bpb"
    return "" if line.loss is None else f"{line.loss:.3f} nats"


def _time(line: Line) -> str:
    return "" if line.seconds is None else format_seconds(line.seconds)


def _note(line: Line) -> str:
    left = f"{format_seconds(line.seconds_left)} left" if line.seconds_left else ""
    if left or line.claimant:
        return ", ".join(text for text in (left, line.claimant) if text)
    if line.resume_step is None or line.state == "missing":
        return ""
    return f"from step {line.resume_step}" if line.resume_step else "from the start"
