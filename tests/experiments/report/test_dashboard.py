"""The W&B workspace: its specification offline, and what is said where it cannot be made or pushed."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from equipoise.experiments import tracker
from equipoise.experiments.report import dashboard

# the library's own, when it is imported
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LAYERS = {"global_maxvio": [1.0, 2.0], "local_maxvio": [1.0, 2.0]}
ROW = dict.fromkeys(tracker.BRIEF, 1.0) | {"device_maxvio": {"2": 0.5, "16": 1.0}, "layers": LAYERS}


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("spec") / "workspace.json"
    assert dashboard.main(["--project", "mine", "--experiment", "paper_table", "--spec", str(path)]) == 0
    return json.loads(path.read_text())


def panels(spec: Any) -> list[Any]:
    sections = spec["spec"]["section"]["panelBankConfig"]["sections"]
    return [panel["config"] for section in sections for panel in section["panels"]]


def test_panels_show_what_is_logged_and_all_that_a_reader_compares_by(spec: Any) -> None:
    keys = {metrics: tracker.wandb_scalars(ROW, metrics).keys() for metrics in ("brief", "full")}
    named = {metric for panel in panels(spec) for metric in panel["metrics"]}
    assert named <= keys["brief"]
    # x-axes, and what another panel shows as well
    assert set(tracker.BRIEF) - named == {"step", "tokens", "val_loss"}
    matched = {key for panel in panels(spec) for key in keys["full"] if re.search(panel.get("metricRegex", "$^"), key)}
    assert matched == keys["full"] - set(tracker.BRIEF)


def test_panels_compare_balancers_over_tokens_with_seeds_as_a_band(spec: Any) -> None:
    assert len(panels(spec)) == 16
    for panel in panels(spec):
        assert panel["xAxis"] == "tokens"
        assert (panel["groupBy"], panel["groupAgg"], panel["groupArea"]) == ("jobType", "mean", "minmax")
    logarithmic = {panel["metrics"][0] for panel in panels(spec) if panel["yLogScale"] and panel["metrics"]}
    assert logarithmic == {"global_maxvio", "global_maxvio_mean", "local_maxvio", "local_maxvio_mean", "grad_norm"}


def test_runs_are_those_of_the_experiment_by_balancer(spec: Any) -> None:
    assert (spec["project"], spec["displayName"]) == ("mine", "Equipoise: paper_table")
    (runs,) = spec["spec"]["section"]["runSets"]
    (rule,) = runs["filters"]["filters"]
    assert (rule["key"]["name"], rule["op"], rule["value"]) == ("group", "=", "paper_table")
    assert [key["name"] for key in runs["grouping"]] == ["jobType"]
    assert set(dashboard.COLUMNS) <= runs["runFeed"]["columnPinned"].keys()


def test_specification_of_all_experiments_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert dashboard.main(["--spec", "-"]) == 0
    (runs,) = json.loads(capsys.readouterr().out)["spec"]["section"]["runSets"]
    assert runs["filters"]["filters"] == []


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dashboard.main(["--spec", str(tmp_path / "no" / "spec.json")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_pushing_without_a_key_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(dashboard, "login_problem", lambda: "no W&B key for https://wandb.example: run `wandb login`")
    assert dashboard.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dashboard: no W&B key for https://wandb.example")
    assert "--spec FILE" in line


def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb_workspaces"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=refuse), *sys.meta_path])
    assert dashboard.main(["--spec", "-"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "dashboard: needs wandb-workspaces: pip install 'equipoise[dashboard]'"


def refuse(name: str, path: Any, target: Any = None) -> None:
    if name == "wandb_workspaces":
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_pushing_prints_the_address_or_why_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb = pytest.importorskip("wandb")
    made = SimpleNamespace(entity="team", url="https://wandb.example/team/equipoise?nw=1", save=lambda: None)
    monkeypatch.setattr(dashboard, "make_workspace", lambda *given: made)
    monkeypatch.setattr(dashboard, "login_problem", lambda: None)
    assert dashboard.main([]) == 0
    assert capsys.readouterr().out == f"{made.url}\n"

    def save() -> None:
        raise wandb.errors.CommError("permission denied")

    made.save = save
    assert dashboard.main([]) == 1
    assert capsys.readouterr().err == "dashboard: W&B did not take the workspace: permission denied\n"
