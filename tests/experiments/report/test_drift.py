"""The distance of biases between points of an axis, on synthetic runs with known biases."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from equipoise.experiments.report import drift
from equipoise.experiments.report.comparison import Row, group_rows
from equipoise.experiments.report.reading import load_runs

STEPS, LAYERS, EXPERTS = 12, 2, 8


def rows_of(
    fake_runs: ModuleType,
    folder: Path,
    offsets: dict[int, float | None],
    experts: int = EXPERTS,
    part_of: str = "parallel",
) -> list[Row]:
    """eqb with 1, 2, ... parts, whose bias lies ``offset`` above that of one part; None: no bias was recorded."""
    shape = (STEPS, LAYERS, experts)
    for parts, offset in offsets.items():
        for seed in range(2):
            bias = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
            changes = {f"{part_of}.parts": parts, "report.axes": [f"{part_of}.parts"]}
            fake_runs.write_run(
                folder,
                "eqb",
                seed,
                steps=STEPS,
                changes=changes,
                loads=np.ones(shape, np.int64),
                bias=None if offset is None else bias + np.float32(offset) * np.array([[[1], [0]]]),
                suffix=str(parts),
            )
    return group_rows(load_runs(folder))


def test_distance_is_the_root_mean_square_over_layers_and_experts(fake_runs: ModuleType, tmp_path: Path) -> None:
    found = drift.bias_drift(rows_of(fake_runs, tmp_path, {1: 0.0, 2: 0.0, 4: 0.5}))
    assert list(found.columns) == drift.COLUMNS
    assert len(found) == 2 * 2 * STEPS
    by_block = found.groupby("block")["distance"]
    assert set(by_block.get_group("parts=2")) == {0.0}
    # one layer of two is off by 0.5
    assert np.allclose(by_block.get_group("parts=4"), 0.5 / np.sqrt(2), atol=1e-6)


@pytest.mark.parametrize("offsets", [{1: 0.0}, {1: None, 2: 0.0}, {1: 0.0, 2: None}])
def test_nothing_to_compare(fake_runs: ModuleType, tmp_path: Path, offsets: dict[int, float | None]) -> None:
    assert drift.bias_drift(rows_of(fake_runs, tmp_path, offsets)).empty


def test_biases_of_other_shapes_are_not_compared(fake_runs: ModuleType, tmp_path: Path) -> None:
    rows_of(fake_runs, tmp_path, {1: 0.0})
    assert drift.bias_drift(rows_of(fake_runs, tmp_path, {2: 0.0}, experts=16)).empty


def test_biases_of_other_models_are_not_compared(fake_runs: ModuleType, tmp_path: Path) -> None:
    assert drift.bias_drift(rows_of(fake_runs, tmp_path, {1: 0.0, 2: 0.5}, part_of="model")).empty


def test_the_figure_has_a_panel_a_block(fake_runs: ModuleType, tmp_path: Path) -> None:
    found = drift.bias_drift(rows_of(fake_runs, tmp_path, {1: 0.0, 2: 0.0, 4: 0.5}))
    figure, _ = drift.draw_drift(found, {"eqb": "#0072b2"})
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["parts=2", "parts=4"]
    flat, high = (axes.get_lines()[0].get_ydata() for axes in figure.axes)
    assert set(flat) == {0.0}
    assert np.allclose(high, 0.5 / np.sqrt(2), atol=1e-6)
