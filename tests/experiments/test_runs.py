"""The run folder: hash, name, state, and that nothing is overwritten."""

import copy
import errno
import fcntl
import json
import math
import os
import platform
import stat
from pathlib import Path
from typing import Any

import pytest

from equipoise.experiments import environment, ledger, runs
from equipoise.experiments.runs import RunState

HERE = platform.node()
# above what Linux gives to a process
GONE = 2**22 + 1

CONFIG: dict[str, Any] = {
    "name": "table",
    "runs": "runs",
    "seed": 0,
    "balancer": {"name": "eqb", "bias": {"ema": 0.0}, "gradient": None},
    "optim": {"steps": 3, "learning_rate": 1e-05},
    "parallel": {"ranks": 2},
    "tracker": {"mode": "offline"},
    "checkpoint": {"every": 50},
    "report": {"tail": 0.333},
}


def changed(key: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(CONFIG)
    *path, last = key.split(".")
    section = config
    for name in path:
        section = section[name]
    section[last] = value
    return config


def test_hash_is_stable_across_order_and_versions() -> None:
    assert runs.config_hash(dict(reversed(CONFIG.items()))) == runs.config_hash(CONFIG)
    # a change here orphans every run folder of every user
    assert runs.config_hash(CONFIG) == "8aa72976"


@pytest.mark.parametrize(
    ("key", "value"),
    [("seed", 1), ("balancer.bias.ema", 0.1), ("balancer.gradient", {"eta": 1}), ("parallel.ranks", 1), ("new", 1)],
)
def test_hash_sees_what_can_change_a_result(key: str, value: Any) -> None:
    assert runs.config_hash(changed(key, value)) != runs.config_hash(CONFIG)


@pytest.mark.parametrize(
    ("key", "value"),
    [("name", "x"), ("runs", "x"), ("tracker.mode", "none"), ("report.tail", 1.0), ("checkpoint.every", 1)],
)
def test_hash_ignores_what_cannot(key: str, value: Any) -> None:
    assert runs.config_hash(changed(key, value)) == runs.config_hash(CONFIG)


def test_folder_name() -> None:
    assert runs.run_folder(CONFIG) == Path("runs/table") / f"eqb-s0-{runs.config_hash(CONFIG)}"


@pytest.mark.parametrize(
    ("key", "value"),
    [("name", "../up"), ("name", None), ("balancer.name", "a/b"), ("balancer.name", ""), ("seed", -1), ("seed", "a")],
)
def test_what_cannot_name_a_folder_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{key}.*{value!r}"):
        runs.run_folder(changed(key, value))


def test_states_from_new_to_done(tmp_path: Path) -> None:
    folder = tmp_path / "table" / "run"
    assert runs.run_state(folder) == RunState.NEW
    runs.open_run(folder, CONFIG)
    assert runs.run_state(folder) == RunState.CUT
    runs.write_failure(folder, "RuntimeError: boom", 1, folder / "log/1/rank1.err")
    assert runs.read_json(folder / "failed.json") == {
        "error": "RuntimeError: boom",
        "rank": 1,
        "log": "log/1/rank1.err",
    }
    assert runs.run_state(folder) == RunState.CUT
    runs.open_run(folder, CONFIG)
    assert not (folder / "failed.json").exists()
    runs.write_json(folder / "summary.json", {"val_bpb": 2.5})
    assert runs.run_state(folder) == RunState.DONE


def test_failure_takes_back_a_summary(tmp_path: Path) -> None:
    runs.open_run(tmp_path / "run", CONFIG)
    runs.write_json(tmp_path / "run" / "summary.json", {})
    runs.write_failure(tmp_path / "run", "killed by signal 9", 1)
    assert runs.run_state(tmp_path / "run") == RunState.CUT


def test_config_comes_back_as_it_was(tmp_path: Path) -> None:
    runs.open_run(tmp_path / "run", CONFIG)
    assert runs.load_config(tmp_path / "run") == CONFIG
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["config.yaml"]


def test_run_of_another_config_is_never_overwritten(tmp_path: Path) -> None:
    runs.open_run(tmp_path / "run", CONFIG)
    with pytest.raises(ValueError, match=r"balancer\.bias\.ema is 0\.0 there and 0\.5 here"):
        runs.open_run(tmp_path / "run", changed("balancer.bias.ema", 0.5))
    assert runs.load_config(tmp_path / "run") == CONFIG


def test_key_that_cannot_change_a_result_takes_its_new_value(tmp_path: Path) -> None:
    runs.open_run(tmp_path / "run", CONFIG)
    runs.open_run(tmp_path / "run", changed("tracker.mode", "online"))
    assert runs.load_config(tmp_path / "run")["tracker"]["mode"] == "online"


def test_a_kill_while_the_config_was_written_is_no_other_run(tmp_path: Path) -> None:
    (tmp_path / f".config.yaml.{HERE}.{GONE}").write_text("name: tab")
    with runs.claim(tmp_path):
        runs.open_run(tmp_path, CONFIG)
    assert sorted(path.name for path in tmp_path.iterdir()) == [runs.LOCK, "config.yaml"]


def test_drafts_of_a_killed_process_go_when_the_run_is_resumed(tmp_path: Path) -> None:
    left = [f".summary.json.{HERE}.{GONE}", ".metrics.jsonl.elsewhere.7"]
    at_work = [f".summary.json.{HERE}.{os.getppid()}", ".summary.json.elsewhere.8"]
    for name in (*left, *at_work, ".keep", "wandb-id"):
        (tmp_path / name).write_text("{")
    os.utime(tmp_path / left[1], (0, 0))
    with runs.claim(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {*at_work, ".keep", "wandb-id", runs.LOCK}


def test_drafts_stay_where_nobody_can_tell_who_is_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(handle: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / f".summary.json.{HERE}.{GONE}").write_text("{")
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with runs.claim(tmp_path):
        assert runs.is_claimed(tmp_path) is None
        assert len(list(tmp_path.iterdir())) == 2
        assert runs.claimant(tmp_path) is None


def test_complete_run_takes_new_values_of_what_cannot_change_its_result(tmp_path: Path) -> None:
    runs.open_run(tmp_path, CONFIG)
    before = (tmp_path / "config.yaml").stat().st_mtime_ns
    runs.renew(tmp_path, CONFIG)
    assert (tmp_path / "config.yaml").stat().st_mtime_ns == before
    new = changed("report.tail", 1.0)
    with runs.claim(tmp_path):
        runs.renew(tmp_path, new)
    assert runs.load_config(tmp_path) == CONFIG
    runs.renew(tmp_path, new)
    assert runs.load_config(tmp_path) == new
    with pytest.raises(ValueError, match="optim"):
        runs.renew(tmp_path, changed("optim.steps", 4))


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_summary_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    runs.open_run(tmp_path, CONFIG)
    (tmp_path / "summary.json").write_text(text, encoding="latin-1")
    assert runs.run_state(tmp_path) == RunState.CUT
    with pytest.raises(ValueError, match=r"summary\.json"):
        runs.read_json(tmp_path / "summary.json")


def test_nan_is_the_value_that_it_was(tmp_path: Path) -> None:
    runs.open_run(tmp_path, changed("balancer.bias.ema", math.nan))
    # not refused as the run of another config
    runs.open_run(tmp_path, changed("balancer.bias.ema", math.nan))
    assert math.isnan(runs.load_config(tmp_path)["balancer"]["bias"]["ema"])


def test_folder_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds files but no config\.yaml"):
        runs.open_run(tmp_path, CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no config.yaml"),
        ("- 1\n", "got list"),
        ("a: [", r"config\.yaml is not YAML"),
        ("\xff", r"config\.yaml is not YAML"),
    ],
)
def test_load_config_refuses(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.yaml").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message):
        runs.load_config(tmp_path)


def test_claim_keeps_a_second_launcher_out(tmp_path: Path) -> None:
    with (
        runs.claim(tmp_path / "run"),
        pytest.raises(ValueError, match=rf"written by another process \({HERE}, process {os.getpid()}\)"),
        runs.claim(tmp_path / "run"),
    ):
        pass
    assert (tmp_path / "run" / runs.LOCK).read_text() == ""
    with runs.claim(tmp_path / "run"):
        runs.open_run(tmp_path / "run", CONFIG)


def test_claim_locks_a_file_that_is_open_for_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS needs it: what is locked there by way of a folder is locked on this machine only."""
    locked = []

    def flock(handle: int, kind: int) -> None:
        writes = fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        locked.append(stat.S_ISREG(os.fstat(handle).st_mode) and (writes or kind & fcntl.LOCK_SH > 0))

    monkeypatch.setattr(fcntl, "flock", flock)
    with runs.claim(tmp_path):
        runs.is_claimed(tmp_path)
    ledger.record(tmp_path, {})
    assert locked == [True] * 3


def test_environment(tmp_path: Path) -> None:
    environment.write_environment(tmp_path, world_size=2, data={"files": 3})
    facts = json.loads((tmp_path / "environment.json").read_text())
    assert facts["world_size"] == 2
    assert facts["data"] == {"files": 3}
    assert {"python", "torch", "equipoise", "numpy", "hydra-core"} <= facts["versions"].keys()
    assert {"commit", "dirty", "platform", "cpus", "devices", "command", "started"} <= facts.keys()
