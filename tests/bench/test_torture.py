"""What the torture script draws and compares; the kills themselves are in ``tests/experiments/test_robustness.py``."""

import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from equipoise.bench import torture

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """A sweep of two runs of three steps."""
    for name in ("none-s0", "eqb-s0"):
        run = tmp_path / "alone" / name
        (run / "checkpoints" / "step-3").mkdir(parents=True)
        (run / "checkpoints" / "step-3" / ".metadata").touch()
        (run / "config.yaml").touch()
        rows = [{"step": step, "loss": 1 / step, "seconds": 0.1, "tokens_per_s": 9.0} for step in (1, 2, 3)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (run / "summary.json").write_text(json.dumps({"steps": 3, "train_s": 0.3}))
        pd.DataFrame({"step": [1, 2, 3], "count": [4, 5, 6]}).to_parquet(run / "load.parquet")
    return tmp_path / "alone"


def test_twenty_kills_are_every_way_at_every_moment() -> None:
    plan = torture.make_plan(20, random.Random(0))
    assert Counter(plan) == {(way, moment): 1 for way in torture.WAYS for moment in torture.MOMENTS}
    assert plan == torture.make_plan(20, random.Random(0)) != torture.make_plan(20, random.Random(1))
    assert len(torture.make_plan(27, random.Random(0))) == 27
    assert len(set(torture.make_plan(7, random.Random(0)))) == 7


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_only_times_may_differ(alone: Path, tmp_path: Path) -> None:
    other = shutil.copytree(alone, tmp_path / "other") / "eqb-s0"
    edit(other / "metrics.jsonl", '"seconds": 0.1, "tokens_per_s": 9.0', '"seconds": 0.2, "tokens_per_s": 4.5')
    edit(other / "summary.json", '"train_s": 0.3', '"train_s": 0.6')
    assert torture.differences(alone, other.parent) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda run: edit(run / "metrics.jsonl", "0.3333333333333333", "0.33333333333333337"), "metrics.jsonl"),
        (lambda run: edit(run / "summary.json", '"steps": 3', '"steps": 4'), "summary.json"),
        (lambda run: pd.DataFrame({"step": [1, 2, 3], "count": [4, 5, 7]}).to_parquet(run / "load.parquet"), "load"),
        (lambda run: (run / "checkpoints" / ".step-2").mkdir(), "leftovers"),
        (lambda run: (run / ".summary.json.12").touch(), "leftovers"),
        (lambda run: (run / "failed.json").touch(), "failed.json"),
        (lambda run: shutil.rmtree(run), r"runs \['none-s0'\], expected \['eqb-s0', 'none-s0'\]"),
    ],
)
def test_every_other_difference_is_named(alone: Path, tmp_path: Path, change, expected: str) -> None:
    other = shutil.copytree(alone, tmp_path / "other")
    change(other / "eqb-s0")
    with pytest.raises(AssertionError, match=expected):
        assert torture.differences(alone, other) == []


@needs_proc
def test_processes_of_a_session_are_seen_until_they_end() -> None:
    command = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    leader = subprocess.Popen(
        [sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert leader.stdout is not None
    leader.stdout.readline()
    alive = torture.living(leader.pid)
    assert len(alive) == 2
    (child,) = alive.keys() - {leader.pid}
    assert alive[child] == leader.pid
    leader.communicate(b"\n")
    assert torture.living(leader.pid) == {}


@needs_proc
def test_a_folder_that_holds_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(SystemExit):
        torture.main(["--folder", str(tmp_path)])
    assert "expected an empty folder" in capsys.readouterr().err
