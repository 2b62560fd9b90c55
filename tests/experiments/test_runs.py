"""The run folder: hash, name, state, and that nothing is overwritten."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from equipoise.experiments import runs
from equipoise.experiments.runs import RunState

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
    (tmp_path / ".config.yaml.4711").write_text("name: tab")
    runs.open_run(tmp_path, CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_drafts_of_a_killed_process_go_when_the_run_is_resumed(tmp_path: Path) -> None:
    runs.open_run(tmp_path, CONFIG)
    for name in (".summary.json.12", ".metrics.jsonl.7", ".keep", "wandb-id"):
        (tmp_path / name).write_text("{")
    runs.open_run(tmp_path, CONFIG)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".keep", "config.yaml", "wandb-id"]


def test_folder_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds files but no config\.yaml"):
        runs.open_run(tmp_path, CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(("text", "message"), [(None, "no config.yaml"), ("- 1\n", "got list")])
def test_load_config_refuses(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        runs.load_config(tmp_path)


def test_claim_keeps_a_second_launcher_out(tmp_path: Path) -> None:
    with (
        runs.claim(tmp_path / "run"),
        pytest.raises(ValueError, match="written by another process"),
        runs.claim(tmp_path / "run"),
    ):
        pass
    with runs.claim(tmp_path / "run"):
        assert (tmp_path / "run").is_dir()


def test_environment(tmp_path: Path) -> None:
    runs.write_environment(tmp_path, world_size=2, data={"files": 3})
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["world_size"] == 2
    assert environment["data"] == {"files": 3}
    assert {"python", "torch", "equipoise", "numpy", "hydra-core"} <= environment["versions"].keys()
    assert {"commit", "dirty", "platform", "cpus", "devices", "command", "started"} <= environment.keys()
