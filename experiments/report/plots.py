"""The figures of the report. A balancer has the same colour and marker in all of them.

Lines and bars are means over the complete seeds; a band or a whisker runs from the lowest seed to the highest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from .comparison import Row, Run
from .heatmap import load_heatmap, tail_label
from .statistics import mean_and_std, tail_mean

DPI = 150
# Any, because matplotlib types the keys of its settings one by one
STYLE: Any = {
    "font.size": 11,
    "axes.titlesize": 12,
    "legend.fontsize": 10,
    "figure.titlesize": 13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
}
# hues of Okabe-Ito and Tol, apart from one another for colour-blind readers; markers say the same again
COLOURS = {
    "none": "#555555",
    "signed_count": "#e69f00",
    "gshard": "#56b4e9",
    "gshard_global": "#332288",
    "lei": "#117733",
    "rank_averaged_qb": "#009e73",
    "histogram_qb": "#cc79a7",
    "eqb": "#0072b2",
    "eqb_fp32": "#aa4499",
    "eqb_gshard": "#882255",
    "eqb_lei": "#d55e00",
}
SPARE_COLOURS = ("#999933", "#44aa99", "#000000", "#a6761d", "#7570b3", "#e7298a", "#66a61e", "#1b9e77", "#661100")
MARKERS = "oXDdPs^vh*<>p8"


@dataclass(frozen=True)
class Picture:
    """A figure on disk and what it shows."""

    path: Path
    title: str


@dataclass(frozen=True)
class Style:
    colour: str
    marker: str


def styles_of(rows: Sequence[Row]) -> dict[str, Style]:
    """Colour and marker of each row by its label: the preset's own, a spare colour for what shares or lacks a name."""
    styles: dict[str, Style] = {}
    spare = 0
    for number, row in enumerate(rows):
        colour = COLOURS.get(row.name)
        if colour is None or colour in {style.colour for style in styles.values()}:
            colour = SPARE_COLOURS[spare % len(SPARE_COLOURS)]
            spare += 1
        styles[row.label] = Style(colour, MARKERS[number % len(MARKERS)])
    return styles


def draw_all(rows: Sequence[Row], folder: Path, start: int) -> list[Picture]:
    """Write every figure into ``folder``; ``start`` is the first step of the tail window. Rows need a complete run."""
    rows = [row for row in rows if row.complete]
    figures: dict[str, Callable[[Sequence[Row], int], tuple[Figure, str]]] = {
        "summary.png": summary,
        "curves_global.png": lambda rows, start: curves(rows, start, "global_maxvio"),
        "curves_local.png": lambda rows, start: curves(rows, start, "local_maxvio"),
        "loss_vs_balance.png": loss_vs_balance,
        "load_heatmap.png": load_heatmap,
    }
    pictures = []
    # the style is the report's own, whatever the reader's matplotlib is set to
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        for name, draw in figures.items():
            figure, title = draw(rows, start)
            figure.savefig(folder / name, dpi=DPI, facecolor="white")
            pictures.append(Picture(folder / name, title))
    return pictures


def smoothed(run: Run, key: str, window: int) -> pd.Series:
    """A metric by step, each value the mean of the ``window`` steps around it."""
    return run.metrics.set_index("step")[key].rolling(window, center=True, min_periods=1).mean()


def smoothing_window(steps: int) -> int:
    """Steps that a curve's point averages over: odd, one up to 60 steps, then about a thirtieth of the run."""
    return max(1, steps // 60 * 2 + 1)


def _draw_curves(axes: Axes, rows: Sequence[Row], key: str, styles: dict[str, Style], start: int) -> None:
    window = smoothing_window(rows[0].complete[0].steps)
    for row in rows:
        seeds = pd.concat([smoothed(run, key, window) for run in row.complete], axis=1)
        steps, colour = seeds.index.to_numpy(), styles[row.label].colour
        axes.fill_between(steps, seeds.min(axis=1), seeds.max(axis=1), color=colour, alpha=0.15, linewidth=0)
        axes.plot(steps, seeds.mean(axis=1), color=colour, linewidth=1.8, label=row.label)
    axes.axvspan(start, rows[0].complete[0].steps, color="#000000", alpha=0.05, linewidth=0)
    axes.set_yscale("log", nonpositive="clip")
    _plain_log_ticks(axes.yaxis)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.margins(x=0.01)


def _plain_log_ticks(axis: Axis) -> None:
    """Plain numbers, not powers of ten, and some between them where the range is short."""
    axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 6)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:g}")


def _step_label(rows: Sequence[Row], start: int) -> str:
    window = smoothing_window(rows[0].complete[0].steps)
    mean = f"; moving mean of {window} steps" if window > 1 else ""
    return f"step (shaded: tail window, {tail_label(rows, start)}{mean})"


def curves(rows: Sequence[Row], start: int, key: str) -> tuple[Figure, str]:
    """MaxVio of the worst layer against the step, one line a balancer."""
    kind = key.split("_")[0]
    title = f"{kind} MaxVio of the worst layer"
    figure = Figure(figsize=(9.5, 5.2), layout="constrained")
    axes = figure.add_subplot()
    _draw_curves(axes, rows, key, styles_of(rows), start)
    figure.suptitle(f"{title}: mean over seeds, band: their range", x=0.01, ha="left")
    axes.set(xlabel=_step_label(rows, start), ylabel=f"{kind} MaxVio (log)")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return figure, title


def seed_values(row: Row, key: str, start: int) -> list[float]:
    """The tail mean of each complete seed."""
    return [tail_mean(run.metrics["step"], run.metrics[key], start) for run in row.complete]


def loss_vs_balance(rows: Sequence[Row], start: int) -> tuple[Figure, str]:
    """Validation BPB against MaxVio, one point a balancer, bars of one sample standard deviation."""
    title = "Loss against balance"
    styles = styles_of(rows)
    figure = Figure(figsize=(11.5, 4.8), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, key in zip(panels, ("global_maxvio", "local_maxvio"), strict=True):
        for row in rows:
            style = styles[row.label]
            (x, dx), (y, dy) = (mean_and_std(seed_values(row, k, start)) for k in (key, "val_bpb"))
            axes.errorbar(
                x,
                y,
                xerr=np.nan_to_num(dx),
                yerr=np.nan_to_num(dy),
                fmt=style.marker,
                color=style.colour,
                markersize=9,
                capsize=3,
                label=row.label,
            )
        axes.set_xscale("log")
        _plain_log_ticks(axes.xaxis)
        axes.set_xlabel(f"{key.split('_')[0]} MaxVio of the worst layer (log)")
    panels[0].set_ylabel("validation bits per byte")
    figure.suptitle(f"{title}: mean ± sample std over seeds, {tail_label(rows, start)}", x=0.01, ha="left")
    handles = [
        Line2D([], [], color=s.colour, marker=s.marker, linestyle="", markersize=8, label=n) for n, s in styles.items()
    ]
    figure.legend(handles=handles, loc="outside right upper", frameon=False)
    return figure, title


def _draw_bars(axes: Axes, rows: Sequence[Row], start: int, styles: dict[str, Style]) -> None:
    for number, row in enumerate(rows):
        for key, offset, alpha in (("global_maxvio", -0.2, 1.0), ("local_maxvio", 0.2, 0.45)):
            values = seed_values(row, key, start)
            mean, colour = float(np.mean(values)), styles[row.label].colour
            axes.barh(number + offset, mean, height=0.38, color=colour, alpha=alpha)
            reach = [[mean - min(values)], [max(values) - mean]]
            axes.errorbar(mean, number + offset, xerr=reach, color="#222222", capsize=2.5, linewidth=1)
            place = (max(values), number + offset)
            axes.annotate(f"{mean:.2f}", place, (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    # from the top down; a lone row does not fill the picture
    axes.set_ylim(max(len(rows), 4) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.12)
    kinds = [Patch(color="#666666", label="global"), Patch(color="#666666", alpha=0.45, label="local")]
    # below the axes, where no bar can reach
    axes.legend(handles=kinds, frameon=False, loc="upper right", bbox_to_anchor=(1, -0.05), ncols=2)


def summary(rows: Sequence[Row], start: int) -> tuple[Figure, str]:
    """One picture of the comparison: tail means as bars, the curves beside them."""
    title = "MaxVio by balancer"
    styles = styles_of(rows)
    figure = Figure(figsize=(13, max(6.2, 1.5 + 0.6 * len(rows))), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1, 1.15))
    bars = figure.add_subplot(grid[:, 0])
    _draw_bars(bars, rows, start, styles)
    bars.set_title(f"Tail mean ({tail_label(rows, start)}), whiskers: range over seeds", loc="left")
    bars.set_xlabel("MaxVio of the worst layer", loc="left")
    for place, kind in enumerate(("global", "local")):
        axes = figure.add_subplot(grid[place, 1])
        _draw_curves(axes, rows, f"{kind}_maxvio", styles, start)
        axes.set_title(f"{kind} MaxVio by step (log), bands: range over seeds", loc="left")
        axes.set_xlabel(_step_label(rows, start) if place else "")
    return figure, title
