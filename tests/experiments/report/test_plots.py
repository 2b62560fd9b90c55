"""The figures of the report: files, colours, and the numbers behind the heat map."""

from pathlib import Path
from types import ModuleType

import matplotlib as mpl
import numpy as np
import pandas as pd

from equipoise.experiments.report import command as report
from equipoise.experiments.report import heatmap, plots
from equipoise.experiments.report.comparison import group_rows, load_runs

PICTURES = ["summary.png", "curves_global.png", "curves_local.png", "loss_vs_balance.png", "load_heatmap.png"]


def test_files_and_pictures(drawn: report.Report) -> None:
    names = sorted(path.name for path in drawn.folder.iterdir())
    assert names == sorted([*PICTURES, "table.csv", "table.md", "table.tex", "index.html"])
    for name in PICTURES:
        data = (drawn.folder / name).read_bytes()
        assert data.startswith(b"\x89PNG")
        assert int.from_bytes(data[16:20], "big") > 1000


def test_drawing_leaves_matplotlib_as_it_was(drawn: report.Report, tmp_path: Path) -> None:
    with mpl.rc_context({"font.size": 23.0}):
        before = dict(mpl.rcParams)
        plots.draw_all(drawn.rows, tmp_path, 9)
        assert dict(mpl.rcParams) == before
    # the reader's own settings do not show
    assert (tmp_path / "curves_local.png").read_bytes() == (drawn.folder / "curves_local.png").read_bytes()


def test_colours_belong_to_balancers(fake_runs: ModuleType, tmp_path: Path) -> None:
    for number, name in enumerate(["eqb", "eqb_lei", "eqb_lei", "mine", "yours"]):
        changes = {"balancer.gradient.eta": 1e-5 * number} if name == "eqb_lei" else {}
        fake_runs.write_run(tmp_path, name, 0, changes=changes, suffix=str(number))
    styles = plots.styles_of(group_rows(load_runs(tmp_path)))
    assert styles["eqb"].colour == plots.COLOURS["eqb"]
    assert len({style.colour for style in styles.values()}) == 5
    assert len({style.marker for style in styles.values()}) == 5


def test_relative_load(fake_runs: ModuleType, tmp_path: Path) -> None:
    loads = np.array([[[1, 3], [4, 4]], [[0, 8], [2, 6]]])
    path = tmp_path / "load.parquet"
    fake_runs.write_loads(path, loads)
    # layers are numbered from the first MoE layer of the model, positions from 0
    frame = pd.read_parquet(path)
    frame["layer"] += 3
    frame.to_parquet(path)
    np.testing.assert_array_equal(heatmap.relative_load(path, 0), [[0.5, 0.0], [1.5, 2.0]])
    np.testing.assert_array_equal(heatmap.relative_load(path, 1), [[1.0, 0.5], [1.0, 1.5]])
    assert heatmap.relative_load(path, 2) is None
    # what a run writes is a folder of parts
    parts = tmp_path / "parts"
    parts.mkdir()
    for step, part in frame.groupby("step"):
        part.to_parquet(parts / f"part-{step}.parquet", index=False)
    np.testing.assert_array_equal(heatmap.relative_load(parts, 1), [[1.0, 0.5], [1.0, 1.5]])
    assert heatmap.relative_load(tmp_path / "absent.parquet", 0) is None


def test_of_many_layers_the_worst_is_shown(fake_runs: ModuleType, tmp_path: Path) -> None:
    loads = np.ones((12, 6, 4), dtype=int)
    # layer 1 is worst early, layer 4 in the tail
    loads[:8, 1, 0] = 90
    loads[8:, 4, 0] = 50
    fake_runs.write_run(tmp_path, "eqb", 0, loads=loads)
    rows = group_rows(load_runs(tmp_path))
    assert heatmap.layers_to_show(rows, 9) == [4]
    assert heatmap.layers_to_show(rows, 1) == [1]
