"""What the launcher shows while the metrics file of a job grows."""

import io
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from equipoise.experiments.sweep.progress import MetricsTail, Progress

DEADLINE_SECONDS = 10.0


def row(step: int, **values: Any) -> str:
    facts = {"loss": 2.411, "global_maxvio": 0.754, "local_maxvio": 1.494, "tokens_per_s": 41_234.0, "seconds": 0.5}
    return json.dumps({"step": step, **facts, **values}) + "\n"


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "gave up waiting"


def test_tail_reads_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert not tail.poll()
    assert (tail.step, tail.seconds_left(10)) == (0, None)
    append(path, row(1) + row(2)[:20])
    assert tail.poll()
    assert tail.step == 1
    assert not tail.poll()
    append(path, row(2)[20:])
    assert tail.poll()
    assert tail.step == 2
    assert tail.seconds_left(10) == pytest.approx(8 * 0.5)


@pytest.mark.parametrize("replaced", [False, True], ids=["truncated", "replaced"])
def test_tail_follows_a_file_that_is_cut_back(tmp_path: Path, replaced: bool) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, row(1) + row(2) + row(3))
    tail = MetricsTail(path)
    tail.poll()
    if replaced:
        draft = tmp_path / "draft"
        draft.write_text(row(1) + row(2) + row(7))
        draft.replace(path)
    else:
        path.write_text(row(1) + row(7))
    assert tail.poll()
    assert tail.step == 7


def test_tail_survives_lines_that_are_not_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, row(1) + '0.5, "loss": 1}\n' + "7\n")
    tail = MetricsTail(path)
    assert tail.poll()
    assert tail.step == 1


def test_plain_lines_at_intervals_and_at_the_end(tmp_path: Path) -> None:
    out, now, path = io.StringIO(), [0.0], tmp_path / "metrics.jsonl"
    with Progress(Console(file=out, width=40), 24, clock=lambda: now[0]) as progress:
        append(path, row(1))
        with progress.job(3, "eqb-s2", path, steps=3):
            # nothing is due yet
            now[0] = 11.0
            wait_for(lambda: "step 1/3" in out.getvalue())
            append(path, row(2, loss=None))
            append(path, row(3))
        progress.end(3, "eqb-s2", "done", "done in 12 s")
    assert out.getvalue().splitlines() == [
        "[3/24] eqb-s2 step 1/3 loss 2.41 global 0.75 local 1.49 41k tok/s 1 s left",
        "[3/24] eqb-s2 step 3/3 loss 2.41 global 0.75 local 1.49 41k tok/s",
        "[3/24] eqb-s2 done in 12 s",
    ]


def test_no_plain_line_before_it_is_due(tmp_path: Path) -> None:
    out, path = io.StringIO(), tmp_path / "metrics.jsonl"
    append(path, row(1, loss=None))
    with Progress(Console(file=out), None, clock=lambda: 0.0) as progress, progress.job(1, "eqb-s2", path, steps=3):
        pass
    assert out.getvalue() == ""


@pytest.mark.parametrize("label", ["eqb-s0", "a_very_long_name_of_a_balancer_of_somebody_else_indeed-s12345"])
@pytest.mark.parametrize("width", [80, 40])
def test_live_lines_fit_the_terminal(tmp_path: Path, label: str, width: int) -> None:
    out, path = io.StringIO(), tmp_path / "metrics.jsonl"
    console = Console(file=out, force_terminal=True, width=width, legacy_windows=False)
    append(path, row(12_345, local_maxvio=None))
    with Progress(console, 24) as progress:
        with progress.job(1, label, path, steps=100_000):
            wait_for(lambda: "job 1 of 24" in out.getvalue())
        progress.end(1, label, "failed", "failed: [red]boom", style="red")
        with progress.job(2, label, path, steps=100_000):
            wait_for(lambda: "job 2 of 24" in out.getvalue())
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    live = [line for line in re.split(r"[\r\n]+", shown) if "failed:" not in line]
    assert max(len(line) for line in live) <= width
    assert "1 failed" in shown
    assert "failed: [red]boom" in shown
    assert "12345/100000" in shown or width == 40
