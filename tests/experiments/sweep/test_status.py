"""What became of the planned runs of an experiment, as ``equipoise status`` tells it."""

import fcntl
import io
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from equipoise.experiments import ledger, runs
from equipoise.experiments.ledger import Entry
from equipoise.experiments.sweep import status

COMMAND = "equipoise -m balancer=eqb seed=0,1,2"


def entry(label: str, **changes: Any) -> Entry:
    return Entry(
        **{"label": label, "steps": 12, "command": COMMAND, "place": str(Path.cwd()), "host": "elsewhere"}
        | {"planned": "2026-11-30T00:00:00+00:00"}
        | changes
    )


def age(run: Path) -> Path:
    """Set back when the last step was recorded."""
    os.utime(run / "metrics.jsonl", (0, 0))
    return run


@pytest.fixture
def table(fake_runs: ModuleType, tmp_path: Path) -> Path:
    """One run of each state that needs no lock."""
    folder = tmp_path / "table"
    fake_runs.write_run(folder, "eqb", 0, values={"seconds": 0.5})
    runs.write_json(folder / "eqb-s0-0123abcd" / "summary.json", {"steps": 12, "train_s": 6.2, "val_bpb": 2.345})
    cut = age(fake_runs.write_run(folder, "eqb", 1, steps=7, planned=12, values={"seconds": 0.5, "loss": 1.5}))
    for step in (3, 6):
        (cut / "checkpoints" / f"step-{step}").mkdir(parents=True)
    fake_runs.write_run(folder, "none", 0, steps=2, planned=12, error="boom,\nloudly", values={"loss": 4.0})
    ledger.record(folder, {"eqb-s2-0123abcd": entry("eqb-s2")})
    names = ("eqb-s0", "eqb-s1", "none-s0")
    ledger.record(folder, {f"{name}-0123abcd": entry(name) for name in names})
    return folder


def by_label(folder: Path) -> dict[str, status.Line]:
    return {line.label: line for line in status.collect(folder)}


def shown(folder: Path, width: int) -> list[str]:
    out = io.StringIO()
    status.show(folder, status.collect(folder), Console(file=out, width=width))
    return [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]


def test_states(table: Path) -> None:
    lines = by_label(table)
    assert {label: line.state for label, line in lines.items()} == {
        "eqb-s2": "missing",
        "eqb-s0": "done",
        "eqb-s1": "cut",
        "none-s0": "failed",
    }
    done, cut, failed = lines["eqb-s0"], lines["eqb-s1"], lines["none-s0"]
    assert (done.step, done.val_bpb, done.seconds, done.resume_step) == (12, 2.345, 6.2, None)
    assert (cut.step, cut.steps, cut.resume_step, cut.loss, cut.seconds) == (7, 12, 6, 1.5, 3.5)
    assert (failed.reason, failed.log) == ("rank 1: boom, loudly", f"{table}/none-s0-0123abcd/log/1")
    assert failed.resume_step == 0


@pytest.mark.parametrize("width", [80, 120])
def test_table(table: Path, width: int) -> None:
    lines = shown(table, width)
    assert [line.split() for line in lines[2:6]] == [
        ["eqb-s2", "missing", "0/12"],
        ["eqb-s0", "done", "12/12", "2.345", "bpb", "6", "s"],
        ["eqb-s1", "cut", "7/12", "1.500", "nats", "4", "s", "from", "step", "6"],
        ["none-s0", "failed", "2/12", "4.000", "nats", "from", "the", "start"],
    ]
    assert max(map(len, lines[:6])) <= width
    assert lines[6:] == [
        f"none-s0 failed: rank 1: boom, loudly (log: {table}/none-s0-0123abcd/log/1)",
        "4 runs: 1 done, 1 failed, 1 cut, 1 missing",
        f"to go on: {COMMAND}",
    ]


def test_json_and_exit_status(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main([str(table), "--json"]) == status.INCOMPLETE
    found = json.loads(capsys.readouterr().out)
    assert found["counts"] == {"done": 1, "failed": 1, "cut": 1, "missing": 1}
    assert found["commands"] == [COMMAND]
    assert {run["label"]: run["resume_step"] for run in found["runs"]}["eqb-s1"] == 6


def test_all_done_is_0(fake_runs: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_runs.write_run(tmp_path / "table", "eqb", 0)
    assert status.main([str(tmp_path / "table")]) == 0
    assert f"to compare them: equipoise-report {tmp_path}/table" in capsys.readouterr().out


def test_a_held_folder_runs(table: Path) -> None:
    cut = table / "eqb-s1-0123abcd"
    with runs.claim(cut):
        line = by_label(table)["eqb-s1"]
        assert (line.state, line.resume_step) == ("running", None)
        assert line.seconds_left == pytest.approx(5 * 0.5)
        assert line.claimant == f"{platform.node()}, process {os.getpid()}"
        assert any(f"2 s left, {platform.node()}" in text for text in shown(table, 150))
        # whoever asks does not take it
        assert runs.is_claimed(cut)
    assert by_label(table)["eqb-s1"].state == "cut"


@pytest.mark.parametrize("claimed", [False, None], ids=["locks", "no locks"])
@pytest.mark.parametrize("host", ["here", None])
def test_ranks_that_no_launcher_is_known_to_have_started(
    table: Path, monkeypatch: pytest.MonkeyPatch, host: str | None, claimed: bool | None
) -> None:
    """A launcher of this machine may have begun what torchrun goes on with."""
    monkeypatch.setattr("platform.node", lambda: "here")
    monkeypatch.setattr(status, "is_claimed", lambda folder: claimed)
    ledger.record(table, {"eqb-s1-0123abcd": entry("eqb-s1", host=host)})
    run = table / "eqb-s1-0123abcd"
    assert by_label(table)["eqb-s1"].state == "cut"
    os.utime(run / "metrics.jsonl")
    assert by_label(table)["eqb-s1"].state == "running?"
    runs.write_json(run / "failed.json", {"error": "boom"})
    assert by_label(table)["eqb-s1"].state == "failed"


def test_a_run_whose_launcher_has_ended_is_cut_at_once(table: Path) -> None:
    run = table / "eqb-s1-0123abcd"
    with runs.claim(run):
        os.utime(run / "metrics.jsonl")
    assert by_label(table)["eqb-s1"].state == "cut"
    # by ranks that torchrun has started since
    later = time.time() + 1
    os.utime(run / "metrics.jsonl", (later, later))
    assert by_label(table)["eqb-s1"].state == "running?"
    # of a launcher that was killed, whose ranks end a moment later
    (run / runs.LOCK).write_text("here 1")
    os.utime(run / "metrics.jsonl")
    assert by_label(table)["eqb-s1"].state == "running?"


@pytest.mark.parametrize("text", ["[1]", "{"])
def test_a_summary_that_cannot_be_read_is_a_failure(table: Path, text: str) -> None:
    (table / "eqb-s0-0123abcd" / "summary.json").write_text(text)
    line = by_label(table)["eqb-s0"]
    assert (line.state, line.command) == ("failed", COMMAND)
    assert "summary.json" in (line.reason or "")


def test_a_folder_that_was_only_written_is_missing(table: Path) -> None:
    runs.open_run(table / "eqb-s2-0123abcd", {"optim": {"steps": 12}, "seed": 2, "balancer": {"name": "eqb"}})
    assert by_label(table)["eqb-s2"].state == "missing"
    (table / "eqb-s2-0123abcd" / "log").mkdir()
    line = by_label(table)["eqb-s2"]
    assert (line.state, line.resume_step) == ("cut", 0)


def test_forget_drops_what_never_started(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with runs.claim(table / "eqb-s1-0123abcd"):
        assert status.main([str(table), "--forget"]) == status.TROUBLE
    assert "eqb-s1 runs in" in capsys.readouterr().err
    later = time.time() + 1
    os.utime(table / "eqb-s1-0123abcd" / "metrics.jsonl", (later, later))
    assert status.main([str(table), "--forget"]) == status.TROUBLE
    assert "eqb-s1 runs in" in capsys.readouterr().err
    age(table / "eqb-s1-0123abcd")
    assert status.main([str(table), "--forget"]) == status.INCOMPLETE
    assert "forgot 1 planned runs" in capsys.readouterr().err
    assert set(by_label(table)) == {"eqb-s0", "eqb-s1", "none-s0"}
    assert "eqb-s2-0123abcd" not in ledger.read_ledger(table)


def test_runs_that_no_ledger_knows(fake_runs: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "table"
    for suffix in ("", "9"):
        age(fake_runs.write_run(folder, "eqb", 0, steps=7, planned=12, suffix=suffix))
    fake_runs.write_run(folder, "none", 0)
    (folder / "none-s0-0123abcd" / "config.yaml").write_text("a: [")
    assert sorted(by_label(folder)) == ["eqb-s0-0123abcd", "eqb-s0-0123abcd9", "none-s0-0123abcd"]
    assert (by_label(folder)["none-s0-0123abcd"].reason or "").startswith("cannot be read: ")
    assert shown(folder, 100)[-1].startswith("to go on with 3 of them: the command that started them")


def test_commands_each_once_and_from_where(table: Path) -> None:
    changed = {"none-s0": {"place": "/far"}, "eqb-s2": {"command": "torchrun it"}}
    for name, changes in changed.items():
        ledger.record(table, {f"{name}-0123abcd": entry(name, **changes)})
    assert status.commands(status.collect(table)) == ["torchrun it", COMMAND, f"{COMMAND}  # in /far"]


def test_what_is_no_experiment(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (table / "empty").mkdir()
    for folder, message in (
        (table.parent / "nowhere", "there is no folder"),
        (table.parent, f"did you mean {table}?"),
        (table / "empty", "not the folder of an experiment"),
        (table / "eqb-s0-0123abcd", "is the folder of one run; expected that of its experiment"),
    ):
        assert status.main([str(folder)]) == status.TROUBLE
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 3}', '{"a": {"label": "x"}}'])
def test_ledger_that_cannot_be_read(table: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (table / ledger.NAME).write_text(text)
    assert status.main([str(table)]) == status.TROUBLE
    assert "ledger.json cannot be read as a ledger" in capsys.readouterr().err


def test_ledger_merges_and_keeps_the_first_time(tmp_path: Path) -> None:
    ledger.record(tmp_path, {"a": entry("a")})
    # of a process that was killed as it wrote, no process having such a number
    (tmp_path / f".{ledger.NAME}.{platform.node()}.{2**22 + 1}").write_text("{")
    ledger.record(tmp_path, {"a": entry("a", planned="later", command="new"), "b": entry("b", planned="later")})
    entries = ledger.read_ledger(tmp_path)
    assert [(name, found.command, found.planned) for name, found in entries.items()] == [
        ("a", "new", "2026-11-30T00:00:00+00:00"),
        ("b", COMMAND, "later"),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [runs.LOCK, ledger.NAME]


# each of several processes
RECORD = """
import sys, time
from pathlib import Path

from equipoise.experiments import ledger

write = ledger.write_json
ledger.write_json = lambda path, value: (time.sleep(0.01), write(path, value))
for number in range(10):
    entry = ledger.Entry("x", 1, "x", "x", None, "x")
    ledger.record(Path(sys.argv[1]), {f"{sys.argv[2]}-{number}": entry})
"""


def test_jobs_that_start_at_the_same_time_all_stay_in_the_ledger(tmp_path: Path) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", RECORD, str(tmp_path), str(number)]) for number in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    assert len(ledger.read_ledger(tmp_path)) == 40


def test_a_launcher_waits_for_whoever_only_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = runs.open_lock(tmp_path)
    fcntl.flock(handle, fcntl.LOCK_SH)
    monkeypatch.setattr("time.sleep", lambda seconds: os.close(handle))
    with runs.claim(tmp_path):
        assert runs.is_claimed(tmp_path)
    assert runs.is_claimed(tmp_path) is False
