"""Which number a comparison sweeps."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from equipoise.experiments.report.comparison import Row, group_rows
from equipoise.experiments.report.reading import load_runs
from equipoise.experiments.report.sweeps import find_sweep


def rows_of(fake_runs: ModuleType, folder: Path, runs: list[tuple[str, dict[str, Any]]]) -> list[Row]:
    for number, (name, changes) in enumerate(runs):
        fake_runs.write_run(folder, name, 0, changes=changes, suffix=str(number))
    return group_rows(load_runs(folder))


def test_an_option_of_one_balancer(fake_runs: ModuleType, tmp_path: Path) -> None:
    runs = [("eqb_lei", {"balancer.gradient.eta": eta}) for eta in (1e-5, 5e-6, 2e-5)]
    sweep = find_sweep(rows_of(fake_runs, tmp_path, [*runs, ("eqb", {})]))
    assert sweep is not None
    assert sweep.key == "gradient.eta"
    assert [value for value, _ in sweep.lines["eqb_lei"]] == [5e-6, 1e-5, 2e-5]
    assert [row.name for row in sweep.others] == ["eqb"]
    assert sweep.logarithmic


def test_an_axis_of_several_balancers(fake_runs: ModuleType, tmp_path: Path) -> None:
    axis = {"report.axes": ["data.microbatches"]}
    runs = [(name, {"data": {"microbatches": n}, **axis}) for n in (8, 0) for name in ("eqb", "histogram_qb")]
    sweep = find_sweep(rows_of(fake_runs, tmp_path, runs))
    assert sweep is not None
    assert sweep.key == "data.microbatches"
    assert {name: [value for value, _ in line] for name, line in sweep.lines.items()} == {
        "eqb": [0, 8],
        "histogram_qb": [0, 8],
    }
    # zero has no logarithm
    assert not sweep.logarithmic


@pytest.mark.parametrize(
    "runs",
    [
        [("eqb", {}), ("none", {})],
        [("eqb_lei", {}), ("eqb_lei", {"balancer.gradient.eta": 1.0, "balancer.bias.key": "fp32"})],
        [("eqb", {}), ("eqb", {"balancer.bias.key": "fp32"})],
        [("eqb_lei", {}), ("eqb_lei", {"balancer.gradient.eta": 1.0, "balancer.extra": None})],
        [
            ("eqb_lei", {}),
            ("eqb_lei", {"balancer.gradient.eta": 1.0}),
            ("gshard", {}),
            ("gshard", {"balancer.gradient.coefficient": 1.0}),
        ],
    ],
    ids=["none", "two options", "no number", "another option is null", "two sweeps"],
)
def test_what_is_no_sweep(fake_runs: ModuleType, tmp_path: Path, runs: list[tuple[str, dict[str, Any]]]) -> None:
    assert find_sweep(rows_of(fake_runs, tmp_path, runs)) is None
