"""Command lines that once did something else than they say."""

import sys
from pathlib import Path

import pytest

from equipoise.experiments import launch


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["equipoise", *arguments])
    return launch.main()


def test_a_single_run_is_not_trained_here_for_a_plugin(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hydra calls a launcher for sweeps only, and a login node is no place to train."""
    assert run(monkeypatch, "hydra/launcher=slurm", "balancer=eqb") == 1
    assert "runs sweeps: expected -m beside it" in capsys.readouterr().err
    assert not list(place.iterdir())


def test_presets_beside_a_single_run_are_not_forgotten_in_silence(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "balancer=lei", "beside=[eqb]", "launch=false") == 1
    assert "beside=['eqb'] adds jobs to a sweep, and this is a single run: expected -m" in capsys.readouterr().err
    assert not list(place.iterdir())


def test_a_dry_run_may_stand_before_an_option(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["equipoise", "balancer=eqb,lei", "launch=false", "dry_run=true", "-m"])
    assert [config["balancer"]["name"] for config in launch.compose().configs] == ["eqb", "lei"]
    assert not list(place.iterdir())


@pytest.mark.parametrize("override", ["dry_run=no", "launch=yes"])
def test_a_switch_is_true_or_false(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], override: str
) -> None:
    key, value = override.split("=")
    assert run(monkeypatch, override) == 1
    assert f"{key} must be true or false, got '{value}'" in capsys.readouterr().err
    assert not list(place.iterdir())


def test_presets_beside_may_lie_in_a_folder_of_the_search_path(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "mine" / "balancer").mkdir(parents=True)
    (place / "mine" / "balancer" / "own.yaml").write_text("name: own\nbias: null\ngradient: null\n")
    search = f"hydra.searchpath=[file://{place / 'mine'}]"
    monkeypatch.setattr(sys, "argv", ["equipoise", "-m", search, "balancer=eqb", "beside=[own]"])
    assert [config["balancer"]["name"] for config in launch.compose().configs] == ["eqb", "own"]
