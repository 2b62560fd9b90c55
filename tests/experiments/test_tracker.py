"""What W&B is given of a run: names and tags, how many keys, one history whatever happens, and no run without a key."""

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
import wandb

from equipoise.balancers import HistogramQB
from equipoise.experiments import measure, runs, tracker
from equipoise.experiments.tracker import Tracker
from equipoise.kernels import route

KEY = 40 * "a"


def config_of(metrics: str = "full", mode: str = "offline", name: str = "eqb", seed: int = 0, **slots: Any) -> Any:
    return {
        "name": "table",
        "seed": seed,
        "balancer": {"name": name, "bias": None, "gradient": None} | slots,
        "model": {"num_experts": 32, "top_k": 4},
        "tracker": {"mode": mode, "project": "equipoise", "entity": None, "metrics": metrics},
    }


# tags


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ({}, ["none"]),
        ({"bias": {"_target_": "equipoise.balancers.ExactQB"}}, ["ExactQB", "global"]),
        ({"gradient": {"_target_": "equipoise.balancers.LEI"}}, ["none", "LEI", "local"]),
        ({"gradient": {"_target_": "own.GShard", "scope": "global"}}, ["none", "GShard", "global"]),
        ({"bias": {"_target_": "a.B"}, "gradient": {"_target_": "a.G"}}, ["B", "G", "global", "local"]),
        ({"bias": {"_target_": f"own.{80 * 'x'}"}}, [64 * "x", "global"]),
    ],
)
def test_tags_name_classes_and_scales(slots: dict[str, Any], expected: list[str]) -> None:
    commit = {"commit": "0123456789abcdef", "dirty": False}
    assert tracker._tags(config_of(**slots), commit) == [*expected, "E=32", "K=4", "git=0123456789ab"]


def test_tags_say_whether_the_commit_is_all_there_is() -> None:
    assert tracker._tags(config_of(), {"commit": 12 * "a", "dirty": True})[-1] == "git=aaaaaaaaaaaa-dirty"
    assert tracker._tags(config_of(), {"commit": None, "dirty": None}) == ["none", "E=32", "K=4"]


# how much


def row_of(moe_layers: int) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """A row as the trainer logs it, with no number missing, and its loads and biases, of layers of 256 experts."""
    routing = route(torch.randn(64, 256, generator=torch.Generator().manual_seed(0)), torch.zeros(256), 8)
    router = SimpleNamespace(last=routing, gradient=None, bias=HistogramQB(256, 8), z_loss=0.0)
    layers: Any = [SimpleNamespace(router=router, dropped_share=None)] * moe_layers
    shards: Any = SimpleNamespace(token_shards=None, max=lambda values: values)
    meter = measure.Meter(layers, shards)
    meter.add(torch.tensor(2.0))
    metrics, load_LE, bias_LE = meter.finish()
    row = dict.fromkeys(("tokens", "skipped", "learning_rate", "grad_norm", "seconds", "tokens_per_s"), 1.0)
    row |= {"step": 1, "val_loss": 2.0, "val_bpb": 3.0}
    return row | {name: 0.0 if value is None else value for name, value in metrics.items()}, load_LE, bias_LE


@pytest.mark.parametrize("layers", [1, 48, 200])
@pytest.mark.parametrize("num_experts", [256, 4096, 16384])
@pytest.mark.parametrize("diagnostics", [0, 40, 200])
def test_r7_keys_are_bounded_at_any_size_and_the_same_at_each_step(
    layers: int, num_experts: int, diagnostics: int
) -> None:
    row, *_ = row_of(2)
    devices = {str(2**power): 1.0 for power in range(1, num_experts.bit_length() - 1)}
    row |= {"device_maxvio": devices, **{f"own/{n}": 1.0 for n in range(diagnostics)}}
    row["layers"] = {name: layers * [1.0] for name in ("global_maxvio", "local_maxvio")}
    full, brief = (tracker.wandb_scalars(row, metrics) for metrics in ("full", "brief"))
    assert len(full) <= 99
    assert len(brief) <= 16 + 13
    assert set(tracker.BRIEF) | {f"device_maxvio/{count}" for count in devices} == set(brief)
    # these come first, then the numbers in their order, then the layers that there is room for
    assert list(full)[: len(brief)] == list(brief)
    own = [name for name in full if name.startswith("own/")]
    assert own == [f"own/{n}" for n in range(len(own))]
    shown = [name for name in full if name.startswith("layer/")]
    if diagnostics == 200:
        assert (len(full), shown) == (99, [])
    else:
        assert len(own) == diagnostics
        most = 24 if not diagnostics else (99 - len(full) + len(shown)) // 2
        assert len(shown) == 2 * min(layers, most) > 0
        assert (f"layer/{layers - 1:02d}/global_maxvio" in shown) == (f"layer/{layers - 1:02d}/local_maxvio" in shown)
    # no validation at this step: nothing takes its place
    missing = tracker.wandb_scalars(row | {"val_bpb": None, "val_loss": None}, "full")
    assert full.keys() - missing.keys() == {"val_bpb", "val_loss"}
    assert missing.keys() <= full.keys()


@pytest.mark.parametrize(("metrics", "most"), [("brief", 25), ("full", 99)])
def test_r7_keys_of_48_layers_of_256_experts_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metrics: str, most: int
) -> None:
    """Per-expert data goes to parquet, and what W&B is given is one number a key."""
    logged: list[dict[str, float]] = []
    view = SimpleNamespace(starting_step=0, log=lambda values, step: logged.append(values))
    monkeypatch.setattr(tracker, "_start_wandb", lambda folder, config: view)
    row, load_LE, bias_LE = row_of(48)
    record = Tracker(tmp_path, config_of(metrics), 0)
    record.log(row, load_LE, bias_LE)
    record.flush()
    (values,) = logged
    assert len(values) <= most
    assert all(isinstance(value, int | float) for value in values.values())
    assert {f"device_maxvio/{count}" for count in (2, 4, 8, 16, 32, 64, 128)} <= values.keys()
    assert set(tracker.BRIEF) <= values.keys()
    # what it keeps for the summary does not grow with the layers
    assert [kept for kept in record.rows[0].values() if not isinstance(kept, int | float)] == []
    assert record.rows[0]["val_bpb"] == 3.0
    assert (
        json.loads((tmp_path / "metrics.jsonl").read_text())["layers"]["local_maxvio"] == row["layers"]["local_maxvio"]
    )
    loads = pd.read_parquet(tmp_path / "load.parquet")
    assert torch.equal(torch.tensor(loads["count"].to_numpy()).reshape(48, 256), load_LE.int())
    assert torch.equal(torch.tensor(loads["bias"].to_numpy()).reshape(48, 256), bias_LE)


def test_full_shows_layers_from_the_first_to_the_last() -> None:
    row = {"layers": {"global_maxvio": list(range(48)), "local_maxvio": 48 * [None]}}
    shown = tracker.wandb_scalars(row, "full")
    assert len(shown) == tracker.SHOWN_LAYERS
    assert all(int(name.split("/")[1]) == value for name, value in shown.items())
    assert {"layer/00/global_maxvio", "layer/47/global_maxvio"} <= shown.keys()
    assert tracker.wandb_scalars(row, "brief") == {}


# keys of W&B


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home without a W&B key."""
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    # reads the environment once
    wandb.teardown()
    yield tmp_path
    wandb.teardown()


def test_online_without_a_key_is_refused(nobody: Path) -> None:
    with pytest.raises(ValueError, match=r"tracker\.mode=online: no W&B key .*wandb login.*WANDB_API_KEY.*offline"):
        tracker.check_login(config_of(mode="online"))
    for mode in ("offline", "none"):
        tracker.check_login(config_of(mode=mode))


def test_online_with_a_key_passes(nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example")
    wandb.teardown()
    (nobody / "netrc").write_text(f"machine wandb.example login user password {KEY}\n")
    tracker.check_login(config_of(mode="online"))
    (nobody / "netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    tracker.check_login(config_of(mode="online"))


def test_a_key_that_cannot_be_one_is_refused(nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "abc")
    with pytest.raises(ValueError, match="WANDB_API_KEY invalid"):
        tracker.check_login(config_of(mode="online"))


def test_where_wandb_has_other_insides_nothing_is_refused(nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wbauth = importlib.import_module("wandb.sdk.lib.wbauth")
    assert tracker.login_problem() is not None
    with monkeypatch.context() as other:
        other.delattr(wbauth, "authenticate_session")
        tracker.check_login(config_of(mode="online"))
    with monkeypatch.context() as other:
        other.setitem(sys.modules, "wandb.sdk.lib.wbauth", None)
        other.delattr(wandb.sdk.lib, "wbauth", raising=False)
        assert tracker.login_problem() is None


# resuming


@pytest.mark.parametrize(
    ("environment", "stored"),
    [
        (None, None),
        ({"metric_schema": runs.METRIC_SCHEMA}, None),
        ({"metric_schema": runs.METRIC_SCHEMA + 1}, runs.METRIC_SCHEMA + 1),
        ({"commit": "from before schemas were numbered"}, 1),
    ],
)
def test_a_run_goes_on_only_in_the_metric_schema_that_it_was_begun_in(
    tmp_path: Path, environment: dict[str, Any] | None, stored: int | None
) -> None:
    Tracker(tmp_path, config_of(mode="none"), 0).log({"step": 1}, torch.zeros(0, 0), torch.zeros(0, 0))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    if environment is not None:
        runs.write_json(tmp_path / "environment.json", environment)
    if stored is None:
        assert Tracker(tmp_path, config_of(mode="none"), 1).rows == [{"step": 1}]
    else:
        with pytest.raises(ValueError, match=rf"metric schema {stored}, and this version writes {runs.METRIC_SCHEMA}"):
            Tracker(tmp_path, config_of(mode="none"), 1)
        assert (tmp_path / "metrics.jsonl").read_bytes() == before
        # from the start it may be written anew
        assert Tracker(tmp_path, config_of(mode="none"), 0).rows == []


# offline runs, read back with W&B's own reader

# logs runs one after the other: (folder, config, after which step, to which, whether it is cut there)
LOGGING = """
import json, os, signal, sys
from pathlib import Path

import torch
from equipoise.experiments.tracker import Tracker

for folder, config, first, last, cut in json.loads(sys.argv[1]):
    tracker = Tracker(Path(folder), config, first)
    for step in range(first + 1, last + 1):
        row = {"step": step, "tokens": 64 * step, "loss": 1 / step, "val_bpb": 2.0 + step % 2, "global_maxvio": step}
        tracker.log(row, torch.zeros(0, 0), torch.zeros(0, 0))
    if cut:
        os.kill(os.getpid(), signal.SIGKILL)
    tracker.finish({"val_bpb": 2.5, "train_s": 1.5})
"""


def log_offline(*logs: tuple[Path, Any, int, int, bool]) -> None:
    for folder, *_ in logs:
        folder.mkdir(exist_ok=True)
    command = [sys.executable, "-c", LOGGING, json.dumps(logs, default=str)]
    *_, cut = logs[-1]
    assert subprocess.run(command, check=False).returncode == (-signal.SIGKILL if cut else 0)


def inspect(folder: Path, *options: str) -> str:
    """What W&B's own reader says of the only offline run of a run folder."""
    (part,) = folder.glob("wandb/offline-run-*")
    command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", *options, str(part)]
    return subprocess.check_output(command, text=True)


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = map(json.loads, inspect(folder).splitlines())
    return [record[kind] for record in found if record["type"] == kind]


@pytest.mark.slow
def test_r3_three_jobs_of_a_sweep_are_three_wandb_runs(tmp_path: Path) -> None:
    """Also where one process logs them all."""
    slots = {"gradient": {"_target_": "equipoise.balancers.LEI"}}
    configs = [config_of(name=name, seed=seed, **slots) for name, seed in (("lei", 0), ("lei", 1), ("own", 0))]
    log_offline(*((tmp_path / str(index), config, 0, 3, False) for index, config in enumerate(configs)))
    runs = [records(tmp_path / str(index), "run")[0] for index in range(3)]
    assert len({run["run_id"] for run in runs}) == 3
    assert [run["display_name"] for run in runs] == ["lei-s0", "lei-s1", "own-s0"]
    assert [run["job_type"] for run in runs] == ["lei", "lei", "own"]
    assert {run["run_group"] for run in runs} == {"table"}
    assert {tuple(run["tags"][:5]) for run in runs} == {("none", "LEI", "local", "E=32", "K=4")}
    axes = {
        metric.get("glob_name", metric.get("name")): metric.get("step_metric")
        for metric in records(tmp_path / "0", "metric")
    }
    assert axes["*"] == "tokens"
    summary = json.loads(inspect(tmp_path / "0", "--summary"))["summary"]
    assert summary["val_bpb"] == {"min": 2.0}
    assert (summary["global_maxvio"], summary["train_s"]) == (3, 1.5)


@pytest.mark.slow
def test_r3_a_run_that_was_cut_has_one_history_without_a_gap(tmp_path: Path) -> None:
    log_offline((tmp_path, config_of("brief"), 0, 212, True))
    log_offline((tmp_path, config_of("brief"), 200, 220, False))
    history = [record["item"] for record in records(tmp_path, "history")]
    assert [item["step"] for item in history] == list(range(1, 221))
    assert [item["_step"] for item in history] == list(range(1, 221))
    assert [item["tokens"] for item in history] == [64 * step for step in range(1, 221)]


def test_r3_steps_that_an_online_run_has_are_not_logged_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server is at step 6 when the run goes on from 4, or at 3 if what came after was lost on the way."""

    def log(record: Tracker, *steps: int) -> None:
        for step in steps:
            record.log({"step": step}, torch.zeros(0, 0), torch.zeros(0, 0))

    log(Tracker(tmp_path, config_of(mode="none"), 0), *range(1, 7))
    for known in (3, 6):
        seen: list[int] = []
        server = SimpleNamespace(starting_step=known + 1, log=lambda values, step, seen=seen: seen.append(step))
        monkeypatch.setattr(tracker, "_start_wandb", lambda folder, settings, server=server: server)
        log(Tracker(tmp_path, config_of(), 4), *range(5, 9))
        assert seen == list(range(known + 1, 9))
