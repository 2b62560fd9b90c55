"""Progress in the terminal: the launcher follows ``metrics.jsonl``, the ranks' own output goes to their log files.

On a terminal there is one live line for the job and one for the sweep; piped, there is a plain line now and then.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

POLL_SECONDS = 0.25
PLAIN_SECONDS = 10.0
# steps whose mean duration predicts the time left
WINDOW = 20


class MetricsTail:
    """The rows of a ``metrics.jsonl`` that another process appends to, and cuts back when it resumes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.row: dict[str, Any] = {}
        # of all steps that were read
        self.seconds = 0.0
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._offset = 0
        self._inode = 0

    def poll(self) -> bool:
        """Read what was added since the last call; True if there was a complete row."""
        try:
            status = self.path.stat()
            if status.st_size < self._offset or status.st_ino != self._inode:
                self._offset, self._inode, self.seconds = 0, status.st_ino, 0.0
            with self.path.open("rb") as file:
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            return False
        # a line without its end is still being written
        complete = added[: added.rfind(b"\n") + 1]
        self._offset += len(complete)
        rows = [row for line in complete.splitlines() if (row := _parse(line)) is not None]
        seconds = [row["seconds"] for row in rows if row.get("seconds") is not None]
        self._seconds.extend(seconds)
        self.seconds += sum(seconds)
        self.row = rows[-1] if rows else self.row
        return bool(rows)

    @property
    def step(self) -> int:
        """The last step that was finished, 0 before the first."""
        return int(self.row.get("step", 0))

    def seconds_left(self, steps: int) -> float | None:
        """Predicted time to step ``steps``; None before the first row."""
        if not self._seconds:
            return None
        return max(steps - self.step, 0) * sum(self._seconds) / len(self._seconds)


class Progress:
    """What the launcher shows. Used as a context manager around all jobs; ``job`` is one around each of them.

    ``total`` jobs, None if unknown. ``clock`` gives seconds.
    """

    def __init__(self, console: Console, total: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self.total = total
        self.counts = {"done": 0, "failed": 0, "skipped": 0}
        self._clock = clock
        # wall seconds of the jobs that completed
        self.durations: list[float] = []
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        # the following thread and the main thread both write
        self._lock = threading.RLock()

    def __enter__(self) -> "Progress":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._live:
            self._live.update(Text(""), refresh=True)
            self._live.stop()

    def prefix(self, index: int) -> str:
        """``[3/24]`` for the third job, ``[3]`` where their number is not known."""
        return f"[{index}/{self.total}]" if self.total is not None else f"[{index}]"

    def end(self, index: int, label: str, outcome: str, message: str, style: str = "") -> None:
        """Print the one line that stays of a job; ``outcome`` is ``done``, ``failed`` or ``skipped``."""
        self.counts[outcome] += 1
        self.print(f"{self.prefix(index)} {label} {message}", style)

    def print(self, line: str, style: str = "") -> None:
        """Print a line that stays, above the live ones."""
        with self._lock:
            print_line(self.console, line, style)

    @contextmanager
    def job(self, index: int, label: str, metrics: Path, steps: int) -> Iterator[None]:
        """Follow ``metrics`` of a job of ``steps`` optimizer steps until the block ends."""
        view = _JobView(self.prefix(index), index, label, MetricsTail(metrics), steps, self._clock())
        stop = threading.Event()
        thread = threading.Thread(target=self._follow, args=(view, stop), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        self.durations.append(self._clock() - view.started)

    def _follow(self, view: "_JobView", stop: threading.Event) -> None:
        """Poll until ``stop`` is set, and once more for what came last."""
        while not stop.wait(POLL_SECONDS):
            self._show(view)
        self._show(view)

    def _show(self, view: "_JobView") -> None:
        """Draw the live lines, or the plain one if it is due."""
        view.tail.poll()
        with self._lock:
            if self._live:
                self._live.update(Group(view.line(self.console.width), self._sweep_line(view)), refresh=True)
            elif view.due(self._clock()):
                self.print(view.plain_line())

    def _sweep_line(self, view: "_JobView") -> Text:
        if self.total == 1:
            return Text("")
        counts = ", ".join(f"{number} {what}" for what, number in self.counts.items() if number)
        left = self._seconds_left(view)
        parts = [f"job {view.index} of {self.total}" if self.total else f"job {view.index}", counts, left]
        return _one_line("  ".join(part for part in parts if part))

    def _seconds_left(self, view: "_JobView") -> str:
        """Of the sweep: this job's rest, and for each job to come the mean of those that ran."""
        elapsed = self._clock() - view.started
        job_left = view.tail.seconds_left(view.steps)
        durations = self.durations or ([] if job_left is None else [elapsed + job_left])
        if self.total is None or not durations:
            return ""
        mean = sum(durations) / len(durations)
        job_left = max(mean - elapsed, 0.0) if job_left is None else job_left
        return f"{format_seconds(job_left + (self.total - view.index) * mean)} left"


class _JobView:
    """One job that runs: its tail and the lines made of it."""

    def __init__(self, prefix: str, index: int, label: str, tail: MetricsTail, steps: int, started: float) -> None:
        self.prefix, self.index, self.label, self.tail, self.steps = prefix, index, label, tail, steps
        self.started = started
        self._shown_at = started
        self._shown_step = 0

    def due(self, now: float) -> bool:
        """Whether to print a plain line at ``now``: some time has passed since the last, or the last step is there."""
        due = self.tail.step != self._shown_step and (
            now - self._shown_at >= PLAIN_SECONDS or self.tail.step >= self.steps
        )
        if due:
            self._shown_at, self._shown_step = now, self.tail.step
        return due

    def plain_line(self) -> str:
        """``[3/24] eqb-s2 step 50/150 loss 2.41 global 0.75 local 1.49 41k tok/s 12 s left``"""
        return " ".join([self.prefix, self.label, *self._facts()])

    def line(self, width: int) -> Text:
        """The live line, cut at ``width`` columns; the name gives way first."""
        facts = "  ".join(self._facts()) if self.tail.row else "starting"
        room = max(width - len(facts) - 3, 8)
        label = self.label if len(self.label) <= room else f"{self.label[: room - 1]}…"
        return _one_line(f"{label}  {facts}")

    def _facts(self) -> list[str]:
        row = self.tail.row
        facts = [f"step {self.tail.step}/{self.steps}"]
        for name, key in (("loss", "loss"), ("global", "global_maxvio"), ("local", "local_maxvio")):
            facts.append(f"{name} {_number(row.get(key))}")
        facts.append(f"{format_count(row.get('tokens_per_s'))} tok/s")
        left = self.tail.seconds_left(self.steps)
        return [*facts, f"{format_seconds(left)} left"] if left else facts


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print ``text`` as it is; a line that is too long for the terminal is not cut into lines of its own."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _parse(line: bytes) -> dict[str, Any] | None:
    # where the file was cut back and has grown again, the first line may be a piece of one
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _one_line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def format_count(value: float | None) -> str:
    """A count in three or four characters.

    >>> [format_count(n) for n in (812, 41234, 2_500_000, None)]
    ['812', '41k', '2.5M', '-']
    """
    if value is None:
        return "-"
    if value < 1000:
        return f"{value:.0f}"
    return f"{value / 1e3:.0f}k" if value < 999_500 else f"{value / 1e6:.1f}M"


def format_seconds(seconds: float) -> str:
    """A duration, about as exact as it is known.

    >>> [format_seconds(s) for s in (12.3, 95, 5400)]
    ['12 s', '2 min', '1 h 30 min']
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
