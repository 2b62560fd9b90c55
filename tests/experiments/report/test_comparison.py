"""Reading, refusing and grouping run folders."""

from pathlib import Path
from types import ModuleType

import pytest

from equipoise.experiments.report import command as report
from equipoise.experiments.report.comparison import ORDER, group_rows, load_runs


def test_order_of_the_rows(fake_runs: ModuleType, tmp_path: Path) -> None:
    for name in ["zeta", *reversed(ORDER), "alpha"]:
        fake_runs.write_run(tmp_path, name, 0)
    assert [row.label for row in group_rows(load_runs(tmp_path))] == [*ORDER, "alpha", "zeta"]


def test_options_set_rows_of_one_name_apart(fake_runs: ModuleType, tmp_path: Path) -> None:
    for eta in (1e-4, 2e-5, 5e-6):
        changes = {"balancer.gradient.eta": eta}
        fake_runs.write_run(tmp_path, "eqb_lei", 0, changes=changes, suffix=str(eta))
    fake_runs.write_run(tmp_path, "eqb", 0)
    labels = [row.label for row in group_rows(load_runs(tmp_path))]
    etas = ["5e-06", "2e-05", "0.0001"]
    assert labels == ["eqb", *(f"eqb_lei (gradient.eta={eta})" for eta in etas)]


@pytest.mark.parametrize(
    ("changes", "environment", "message"),
    [
        ({"optim.learning_rate": 0.001}, None, r"optim\.learning_rate: 0\.002 in eqb-s0-\S+, 0\.001 in none-s0-"),
        ({"model.top_k": None}, None, r"model\.top_k: 4 in eqb-s0-\S+, None in none-s0-"),
        ({"model.new": 1}, None, r"model\.new: absent in eqb-s0-\S+, 1 in none-s0-"),
        (None, {"data": {"sha256": "6" * 64}}, r"data\.sha256: 5{64} in eqb-s0-\S+, 6{64} in none-s0-"),
        (None, {"world_size": 4}, r"world_size: 2 in eqb-s0-\S+, 4 in none-s0-"),
    ],
)
def test_incomparable_runs_are_refused(
    fake_runs: ModuleType, tmp_path: Path, changes: dict | None, environment: dict | None, message: str
) -> None:
    fake_runs.write_run(tmp_path, "eqb", 0)
    fake_runs.write_run(tmp_path, "none", 0, changes=changes, environment=environment)
    with pytest.raises(ValueError, match=message):
        report.build_report(tmp_path)
    assert not (tmp_path / "report").exists()


def test_different_schedules_are_refused(fake_runs: ModuleType, tmp_path: Path) -> None:
    fake_runs.write_run(tmp_path, "eqb", 0, steps=12)
    fake_runs.write_run(tmp_path, "none", 0, steps=24)
    with pytest.raises(ValueError, match=r"optim\.steps: 12 in .*, 24 in "):
        report.build_report(tmp_path)


def test_a_seed_twice_is_refused(fake_runs: ModuleType, sweep: Path) -> None:
    fake_runs.write_run(sweep, "eqb", 1, changes={"tracker.mode": "none"}, suffix="b")
    with pytest.raises(ValueError, match="seed 1 of eqb is there twice: eqb-s1-0123abcd and eqb-s1-0123abcdb"):
        report.build_report(sweep)


def test_the_folder_of_a_run_is_not_one_of_an_experiment(fake_runs: ModuleType, tmp_path: Path) -> None:
    run = fake_runs.write_run(tmp_path / "table", "eqb", 0)
    with pytest.raises(ValueError, match=r"is the folder of one run; expected that of its experiment, .*table"):
        report.build_report(run)
