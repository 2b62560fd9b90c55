"""Kill a small sweep of two ranks at random moments, start it again each time, and compare it with one left alone.

A kill takes one rank, the launcher or the whole process group with SIGKILL, or the launcher with SIGTERM or SIGINT, a
random time after one of four events: the start, a step, the begin of a checkpoint, the end of a job. Nothing of what
was killed may be left some seconds later. What the sweep records must in the end be that of the undisturbed one, bit
for bit, times apart. A sweep that completes before all kills have hit is compared, and another one is begun.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from ..experiments.runs import LOCK, claimant, read_json, write_json
from ..experiments.sweep.progress import MetricsTail
from .timing import FOLDER, facts

WAYS = ("rank", "launcher", "group", "SIGTERM", "SIGINT")
# after which event a kill comes (what the run folders show of it), and how many seconds later at most
MOMENTS = {
    "start": ("", 8.0),
    "training": ("*/metrics.jsonl", 3.0),
    "checkpoint": ("*/checkpoints/.step-*", 0.1),
    "between": ("*/summary.json", 3.0),
}
GONE_SECONDS = 30.0
# what no two runs have in common, however they went
TIMES = ("seconds", "tokens_per_s", "train_s", "peak_memory_bytes")
OVERRIDES = (
    *("-m", "balancer=none,eqb,eqb_lei", "seed=0,1", "tracker=none", "data=text", "parallel.ranks=2"),
    *("model.width=16", "model.num_heads=2", "model.num_layers=2", "model.num_experts=8", "model.top_k=2"),
    *("model.expert_width=8", "model.shared_width=8", "data.sequence_length=32", "data.microbatches=4"),
    *("data.validation_sequences=8", "validation.every=20", "checkpoint.every=10", "optim.warmup=2"),
)


@dataclass(frozen=True)
class Kill:
    """What was killed, after which event and how many seconds after the start; in which run, after which step.

    ``gone_s``: seconds until the last of its processes had ended.
    """

    way: str
    moment: str
    seconds: float
    run: str
    step: int
    gone_s: float


class Sweep:
    """One sweep, in ``folder/runs/<name>``, and the launch of it that is under way."""

    def __init__(self, folder: Path, name: str, steps: int) -> None:
        self.folder = folder
        self.runs = folder / "runs" / name
        self.arguments = [*OVERRIDES, f"optim.steps={steps}", f"name={name}"]
        self.arguments += [f"runs='{folder / 'runs'}'", f"data.path='{folder / 'corpus.txt'}'"]
        self.launch: subprocess.Popen[bytes] | None = None
        self.started = 0.0

    def start(self) -> None:
        """Start the sweep or go on with it, in a session of its own; the output is added to ``folder/output.txt``."""
        self.started = time.time()
        with (self.folder / "output.txt").open("ab") as output:
            self.launch = subprocess.Popen(
                [sys.executable, "-m", "equipoise.experiments.launch", *self.arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # a shell starts what runs in its background with Ctrl-C ignored
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    @property
    def running(self) -> bool:
        """Whether the launcher is."""
        return self.launch is not None and self.launch.poll() is None

    def processes(self) -> dict[int, int]:
        """Those of the launch that have not ended, with their parents."""
        assert self.launch is not None
        return living(self.launch.pid)

    def ranks(self) -> list[int]:
        """The ranks that run: children of the server that the launcher forks them from."""
        assert self.launch is not None
        alive = self.processes()
        servers = {pid for pid, parent in alive.items() if parent == self.launch.pid and b"forkserver" in _command(pid)}
        return [pid for pid, parent in alive.items() if parent in servers]

    def wait_for(self, condition: Callable[[], Any]) -> bool:
        """Wait until ``condition`` holds; False if the launcher ends before."""
        while not condition():
            if not self.running:
                return False
            time.sleep(0.005)
        return self.running

    def reached(self) -> tuple[str, int]:
        """The run at work and its last step."""
        paths = sorted(self.runs.glob("*/metrics.jsonl"), key=_modified)
        if not paths:
            return "-", 0
        tail = MetricsTail(paths[-1])
        tail.poll()
        return paths[-1].parent.name, tail.step

    def clear(self) -> None:
        """Kill what is left of the launch."""
        for pid in self.processes() if self.launch is not None else ():
            _kill(pid, signal.SIGKILL)


def strike(sweep: Sweep, way: str, moment: str, generator: random.Random) -> Kill | None:
    """Wait for the moment and kill; None if the sweep came to its end before.

    Raises:
        RuntimeError: processes are left after ``GONE_SECONDS``.
    """
    pattern, longest = MOMENTS[moment]
    delay, now = generator.uniform(0, longest), time.time()
    if not sweep.wait_for(lambda: not pattern or any(_modified(path) > now for path in sweep.runs.glob(pattern))):
        return None
    due = time.time() + delay
    if not sweep.wait_for(lambda: time.time() >= due and (way != "rank" or sweep.ranks())):
        return None
    victims = sweep.ranks() if way == "rank" else list(sweep.processes())
    seconds, (run, step) = time.time() - sweep.started, sweep.reached()
    struck = time.time()
    _hit(sweep, way, victims, generator)
    while set(victims) & sweep.processes().keys():
        if time.time() - struck > GONE_SECONDS:
            raise RuntimeError(f"{way} killed, but after {GONE_SECONDS:.0f} s there still is {sweep.processes()}")
        time.sleep(0.01)
    return Kill(way, moment, round(seconds, 2), run, step, round(time.time() - struck, 2))


def _hit(sweep: Sweep, way: str, victims: list[int], generator: random.Random) -> None:
    assert sweep.launch is not None
    launcher = sweep.launch.pid
    if way == "rank":
        _kill(generator.choice(victims), signal.SIGKILL)
    elif way == "group":
        os.killpg(launcher, signal.SIGKILL)
    else:
        _kill(launcher, signal.SIGKILL if way == "launcher" else signal.Signals[way])


def torture(folder: Path, kills: int, steps: int, generator: random.Random, console: Console) -> dict[str, Any]:
    """Every kill that hit, the sweeps it took, and in what they differ from the one that was left alone.

    Raises:
        RuntimeError: processes are left after a kill, or a launch fails by itself.
    """
    # words enough for every batch to differ, and the same on every machine
    (folder / "corpus.txt").write_text(" ".join(str(number * number) for number in range(20_000)), encoding="utf-8")
    alone = Sweep(folder, "undisturbed", steps)
    run(alone, [], generator, console)
    plan = make_plan(kills, generator)
    record: list[Kill] = []
    different: list[str] = []
    count = 0
    while plan:
        count += 1
        sweep = Sweep(folder, f"tortured-{count}", steps)
        record += run(sweep, plan, generator, console)
        different += differences(alone.runs, sweep.runs)
    return {"kills": [asdict(kill) for kill in record], "sweeps": count, "differences": different}


def make_plan(kills: int, generator: random.Random) -> list[tuple[str, str]]:
    """Ways and moments of ``kills`` kills, each pair of them equally often as far as that goes, in random order."""
    pairs = [(way, moment) for moment in MOMENTS for way in WAYS]
    plan = [pair for _ in range(kills // len(pairs)) for pair in pairs]
    plan += generator.sample(pairs, kills - len(plan))
    generator.shuffle(plan)
    return plan


def run(sweep: Sweep, plan: list[tuple[str, str]], generator: random.Random, console: Console) -> list[Kill]:
    """Run a sweep to its end under the kills of ``plan``, which are taken from it as they hit.

    Raises:
        RuntimeError: processes are left after a kill, or a launch fails though no rank of it was killed.
    """
    record: list[Kill] = []
    try:
        complete = False
        while not complete:
            kills = run_launch(sweep, plan, generator, console)
            record += kills
            assert sweep.launch is not None
            complete = sweep.launch.wait() == 0
            if not complete and not kills:
                raise RuntimeError(f"a launch ended with {sweep.launch.returncode} by itself:\n{_output(sweep)}")
    finally:
        sweep.clear()
    return record


def run_launch(sweep: Sweep, plan: list[tuple[str, str]], generator: random.Random, console: Console) -> list[Kill]:
    """One launch and the kills that hit it: the first of the launcher is the last, of a rank the sweep goes on."""
    record: list[Kill] = []
    sweep.start()
    while plan and sweep.running:
        kill = strike(sweep, *plan[-1], generator)
        if kill is not None:
            plan.pop()
            record.append(kill)
            console.print(
                f"{len(plan):3} to go: {kill.way} killed {kill.seconds:.1f} s after the start ({kill.moment}), "
                f"{kill.run} after step {kill.step}, gone in {kill.gone_s:.1f} s",
                highlight=False,
                soft_wrap=True,
            )
    return record


def differences(expected: Path, actual: Path) -> list[str]:
    """In what the runs under two folders differ, times apart, and what a kill has left lying; a line each."""
    names = [sorted(path.parent.name for path in folder.glob("*/config.yaml")) for folder in (expected, actual)]
    if names[0] != names[1]:
        return [f"{actual.name}: runs {names[1]}, expected {names[0]}"]
    found: list[str] = []
    for name in names[0]:
        one, other = expected / name, actual / name
        checks = {
            "metrics.jsonl": _rows(one) == _rows(other),
            "load.parquet": pd.read_parquet(one / "load.parquet").equals(pd.read_parquet(other / "load.parquet")),
            "summary.json": _timeless(read_json(one / "summary.json")) == _timeless(read_json(other / "summary.json")),
            "leftovers": not [path for path in other.rglob(".*") if path.name not in (".metadata", LOCK)],
            "lock": claimant(other) is None,
            "failed.json": not (other / "failed.json").exists(),
        }
        found += [f"{actual.name}/{name}: {what}" for what, same in checks.items() if not same]
    return found


def _rows(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [_timeless(json.loads(line)) for line in lines]


def _timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in TIMES}


def living(session: int) -> dict[int, int]:
    """The processes of a session that have not ended, with their parents."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, _, owner = path.read_text(encoding="utf-8").rpartition(")")[2].split()[:4]
        # it has ended meanwhile
        except (OSError, ValueError):
            continue
        if int(owner) == session and state != "Z":
            found[int(path.parent.name)] = int(parent)
    return found


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _kill(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _output(sweep: Sweep) -> str:
    return "\n".join((sweep.folder / "output.txt").read_text(encoding="utf-8", errors="replace").splitlines()[-20:])


def main(arguments: Sequence[str] | None = None) -> int:
    """``scripts/torture``; the exit status is 1 if anything differs or is left."""
    parser = argparse.ArgumentParser(prog="scripts/torture", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="kills that hit a running sweep")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of each of the 6 jobs")
    parser.add_argument("--folder", type=Path, help="an empty folder, which stays; otherwise a temporary one")
    parser.add_argument("--out", type=Path, default=FOLDER / "torture.json")
    options = parser.parse_args(arguments)
    if not Path("/proc/self/stat").exists():
        parser.error("needs /proc to see what is left of a sweep")
    if options.folder is not None and options.folder.exists() and any(options.folder.iterdir()):
        parser.error(f"--folder: expected an empty folder, {options.folder} holds files")
    console, started = Console(), time.time()
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            result = torture(folder.resolve(), options.kills, options.steps, random.Random(options.seed), console)
        except RuntimeError as error:
            console.print(str(error), style="red", markup=False, highlight=False)
            return 1
    return report(result | {"seed": options.seed, "seconds": round(time.time() - started)}, options.out, console)


def report(result: dict[str, Any], out: Path, console: Console) -> int:
    """Print and write what came of it; the exit status."""
    kills, different = result.pop("kills"), result.pop("differences")
    slowest = max((kill["gone_s"] for kill in kills), default=0.0)
    for line in different:
        console.print(f"differs: {line}", style="red", markup=False, highlight=False)
    console.print(
        f"{len(kills)} kills over {result['sweeps']} sweeps of 6 jobs, {len(different)} differences; "
        f"the slowest was gone in {slowest:.1f} s; {result['seconds']} s in all",
        highlight=False,
        soft_wrap=True,
    )
    counts = {"kills": len(kills), "differences": len(different), "slowest_gone_s": slowest}
    write_json(out, counts | {"details": {**result, "kills": kills, "different": different, **facts()}})
    console.print(str(out), highlight=False)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
