"""The figures of the report: files, colours, labels."""

import warnings
from pathlib import Path
from types import ModuleType

import matplotlib as mpl
import pandas as pd
import pytest

from equipoise.experiments.report import command as report
from equipoise.experiments.report import plots
from equipoise.experiments.report.comparison import Row, group_rows
from equipoise.experiments.report.reading import load_runs

FIGURES = ["summary", "curves_global", "curves_local", "loss_vs_balance", "load_heatmap", "sweep"]


def test_files_and_pictures(drawn: report.Report) -> None:
    names = {path.name for path in drawn.folder.iterdir()}
    pictures = {f"{name}.{kind}" for name in FIGURES for kind in ("png", "svg")}
    assert names == {*pictures, "table.csv", "table.md", "table.tex", "index.html"}
    for name in FIGURES:
        data = (drawn.folder / f"{name}.png").read_bytes()
        assert data.startswith(b"\x89PNG")
        assert int.from_bytes(data[16:20], "big") > 1000
        assert "<svg" in (drawn.folder / f"{name}.svg").read_text()


def test_drawing_leaves_matplotlib_as_it_was(
    drawn: report.Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the two curves are enough
    for name in ("summary", "loss_vs_balance", "load_heatmap", "sweep_figure"):
        monkeypatch.setattr(plots, name, lambda *a: (mpl.figure.Figure(figsize=(1, 1)), "empty"))
    with mpl.rc_context({"font.size": 23.0}):
        before = dict(mpl.rcParams)
        plots.draw_all(drawn.rows, tmp_path, 9)
        assert dict(mpl.rcParams) == before
    # the reader's own settings do not show
    for name in ("curves_local.png", "curves_local.svg"):
        assert (tmp_path / name).read_bytes() == (drawn.folder / name).read_bytes()


def rows_of(fake_runs: ModuleType, folder: Path, names: list[str]) -> list[Row]:
    """A row a name; the n-th eqb_lei has the eta n * 1e-5."""
    for number, name in enumerate(names):
        changes = {"balancer.gradient.eta": float(f"{names[: number + 1].count(name)}e-5")} if name == "eqb_lei" else {}
        fake_runs.write_run(folder, name, 0, changes=changes, suffix=str(number))
    return group_rows(load_runs(folder))


def test_colours_belong_to_balancers(fake_runs: ModuleType, tmp_path: Path) -> None:
    styles = plots.styles_of(rows_of(fake_runs, tmp_path, ["eqb", "gshard", "eqb_lei", "mine", "yours"]))
    for name in ("eqb", "gshard", "eqb_lei"):
        assert styles[name].colour == plots.COLOURS[name]
    assert len({style.colour for style in styles.values()}) == 5
    assert len({style.marker for style in styles.values()}) == 5


def test_rows_of_one_name_are_shades_from_light_to_dark(fake_runs: ModuleType, tmp_path: Path) -> None:
    styles = plots.styles_of(rows_of(fake_runs, tmp_path, ["eqb", *["eqb_lei"] * 5]))
    sums = [sum(mpl.colors.to_rgb(style.colour)) for label, style in styles.items() if label.startswith("eqb_lei")]
    assert len(sums) == 5
    assert sums == sorted(sums, reverse=True)
    assert styles["eqb_lei (eta=3e-05)"].colour == plots.COLOURS["eqb_lei"]


def test_many_unknown_names_do_not_share_a_colour(fake_runs: ModuleType, tmp_path: Path) -> None:
    styles = plots.styles_of(rows_of(fake_runs, tmp_path, [f"mine{number:02}" for number in range(15)]))
    assert len({style.colour for style in styles.values()}) == 15


@pytest.mark.parametrize("draw", [plots.summary, plots.loss_vs_balance, lambda *a: plots.curves(*a, "local_maxvio")])
def test_nothing_is_cut_off(fake_runs: ModuleType, tmp_path: Path, draw) -> None:
    names = [f"a_balancer_of_a_long_name_{number:02}" for number in range(12)]
    with mpl.rc_context(plots.STYLE):
        figure, _ = draw(rows_of(fake_runs, tmp_path, names), 9)
        figure.draw_without_rendering()
    size, box = figure.get_size_inches(), figure.get_tightbbox()
    assert box.min.min() > -0.02
    assert (box.max <= size + 0.02).all()


@pytest.mark.parametrize("maxvio", [None, 0.0, [1.0] * 8 + [0.0] * 4, 0.1])
def test_no_maxvio_none_at_the_end_and_seeds_that_are_equal(
    fake_runs: ModuleType, tmp_path: Path, maxvio: float | list[float] | None
) -> None:
    """Dense models have none. Warnings are errors here."""
    for seed in range(3):
        fake_runs.write_run(tmp_path, "eqb", seed, values={"global_maxvio": maxvio, "local_maxvio": maxvio})
    rows = group_rows(load_runs(tmp_path))
    with warnings.catch_warnings(), mpl.rc_context(plots.STYLE):
        warnings.simplefilter("error", UserWarning)
        figures = [draw(rows, 9)[0] for draw in (plots.summary, plots.loss_vs_balance)]
        for figure in figures:
            figure.draw_without_rendering()
    scales = [figures[0].axes[1].get_yscale(), figures[1].axes[0].get_xscale()]
    positive = [isinstance(maxvio, list) or bool(maxvio), maxvio == 0.1]
    assert scales == ["log" if above else "linear" for above in positive]
    assert ("(log)" in figures[1].axes[0].get_xlabel()) == positive[1]


def test_a_thinned_frame_keeps_its_end() -> None:
    frame = pd.DataFrame({"x": range(10)})
    assert plots.thinned(frame, 10)["x"].tolist() == list(range(10))
    assert plots.thinned(frame, 4)["x"].tolist() == [0, 3, 6, 9]
    assert plots.thinned(frame, 3)["x"].tolist() == [1, 5, 9]
