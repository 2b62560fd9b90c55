"""The figures of the report. A balancer has the same colour and marker in all of them.

Lines and bars are means over the complete seeds; a band or a whisker runs from the lowest seed to the highest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from .comparison import Row
from .drift import bias_drift, draw_drift
from .heatmap import load_heatmap, tail_label
from .reading import Run
from .statistics import mean_and_std, tail_mean
from .sweeps import Sweep, find_sweep
from .tables import wrapped

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
    # a name may hold a dollar sign
    "text.parse_math": False,
    # the same report is the same file
    "svg.hashsalt": "equipoise",
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
# share of white or black in the lightest and in the darkest shade of a colour
STRONGEST_SHADE = 0.5
# points of a curve; more are no longer told apart
MAX_POINTS = 1000


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
    """Colour and marker of each row by its label: one hue a name, a shade for each row that shares it."""
    names = list(dict.fromkeys(row.name for row in rows))
    spare = (*SPARE_COLOURS, *(colour for name, colour in COLOURS.items() if name not in names))
    unknown = [name for name in names if name not in COLOURS]
    hues = COLOURS | {name: spare[number % len(spare)] for number, name in enumerate(unknown)}
    styles: dict[str, Style] = {}
    for number, row in enumerate(rows):
        namesakes = [other for other in rows if other.name == row.name]
        colour = shade(hues[row.name], namesakes.index(row), len(namesakes))
        styles[row.label] = Style(colour, MARKERS[number % len(MARKERS)])
    return styles


def shade(colour: str, position: int, number: int) -> str:
    """One of ``number`` shades of a colour, from light to dark; a lone one is the colour itself.

    >>> shade("#808080", 0, 1), shade("#808080", 0, 3), shade("#808080", 1, 3), shade("#808080", 2, 3)
    ('#808080', '#c0c0c0', '#808080', '#404040')
    """
    place = 2 * position / (number - 1) - 1 if number > 1 else 0.0
    end = 1.0 if place < 0 else 0.0
    red, green, blue = (part + (end - part) * abs(place) * STRONGEST_SHADE for part in to_rgb(colour))
    return to_hex((red, green, blue))


def draw_all(rows: Sequence[Row], folder: Path, start: int) -> list[Picture]:
    """Write every figure into ``folder``, as PNG and as SVG; ``start`` is the first step of the tail window.

    Where rows have an axis, also ``bias_drift.csv``. The pictures that are returned are the PNGs; rows without a
    complete run are left out.
    """
    rows = [row for row in rows if row.complete]
    figures: dict[str, Callable[[Sequence[Row], int], tuple[Figure, str]]] = {
        "summary": summary,
        "curves_global": lambda rows, start: curves(rows, start, "global_maxvio"),
        "curves_local": lambda rows, start: curves(rows, start, "local_maxvio"),
        "loss_vs_balance": loss_vs_balance,
        "load_heatmap": load_heatmap,
    }
    swept = find_sweep(rows)
    if swept:
        figures["sweep"] = lambda rows, start: sweep_figure(swept, rows, start)
    drift = bias_drift(rows)
    if not drift.empty:
        drift.to_csv(folder / "bias_drift.csv", index=False)
        figures["bias_drift"] = lambda rows, start: draw_drift(drift, _balancer_colours(rows))
    return save_all({name: partial(draw, rows, start) for name, draw in figures.items()}, folder)


def save_all(figures: Mapping[str, Callable[[], tuple[Figure, str]]], folder: Path) -> list[Picture]:
    """Draw each figure into ``folder`` under its name, as PNG and as SVG; the pictures returned are the PNGs."""
    pictures = []
    # the style is the report's own, whatever the reader's matplotlib is set to
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        for name, draw in figures.items():
            figure, title = draw()
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=DPI, facecolor="white")
            # the layout is made; making it again takes as long as drawing
            figure.set_layout_engine("none")
            figure.savefig(path.with_suffix(".svg"), facecolor="white", metadata={"Date": None})
            pictures.append(Picture(path, title))
    return pictures


def _balancer_colours(rows: Sequence[Row]) -> dict[str, str]:
    """The colour of each balancer, the same in all blocks."""
    first = {row.balancer: row for row in reversed(rows)}
    styles = styles_of(list(first.values()))
    return {balancer: styles[row.label].colour for balancer, row in first.items()}


def smoothed(run: Run, key: str, window: int) -> pd.Series:
    """A metric by step, each value the mean of the ``window`` steps around it."""
    return run.metrics.set_index("step")[key].rolling(window, center=True, min_periods=1).mean()


def thinned(frame: pd.DataFrame, most: int) -> pd.DataFrame:
    """Every n-th record, so that at most ``most`` remain; the last one is among them."""
    return frame.iloc[::-1].iloc[:: -(-len(frame) // most) or 1].iloc[::-1]


def smoothing_window(steps: int) -> int:
    """Steps that a curve's point averages over: odd, one up to 60 steps, then about a thirtieth of the run."""
    return max(1, steps // 60 * 2 + 1)


def _draw_curves(axes: Axes, rows: Sequence[Row], key: str, styles: dict[str, Style], start: int) -> None:
    window = smoothing_window(rows[0].complete[0].steps)
    for row in rows:
        seeds = thinned(pd.concat([smoothed(run, key, window) for run in row.complete], axis=1), MAX_POINTS)
        steps, colour = seeds.index.to_numpy(), styles[row.label].colour
        axes.fill_between(steps, seeds.min(axis=1), seeds.max(axis=1), color=colour, alpha=0.15, linewidth=0)
        axes.plot(steps, seeds.mean(axis=1), color=colour, linewidth=1.8, label=row.label)
    axes.axvspan(start, rows[0].complete[0].steps, color="#000000", alpha=0.05, linewidth=0)
    if _is_logarithmic(rows, key):
        axes.set_yscale("log")
        _plain_log_ticks(axes.yaxis)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.margins(x=0.01)


def _is_logarithmic(rows: Sequence[Row], key: str, start: int = 1) -> bool:
    """Whether anything is positive from a step on: dense models have no MaxVio, and it may be 0 throughout."""
    return any((run.metrics[key][start - 1 :] > 0).any() for row in rows for run in row.complete)


def _log_word(rows: Sequence[Row], key: str, start: int = 1) -> str:
    return " (log)" if _is_logarithmic(rows, key, start) else ""


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
    figure = Figure(figsize=_beside_legend(9.5, 5.2, rows), layout="constrained")
    axes = figure.add_subplot()
    styles = styles_of(rows)
    _draw_curves(axes, rows, key, styles, start)
    figure.suptitle(f"{title}: mean over seeds, band: their range", x=0.01, ha="left")
    axes.set(xlabel=_step_label(rows, start), ylabel=f"{kind} MaxVio{_log_word(rows, key)}")
    handles = [Line2D([], [], color=s.colour, linewidth=1.8) for s in styles.values()]
    figure.legend(handles, list(styles), loc="outside right upper", frameon=False)
    return figure, title


def _beside_legend(width: float, height: float, rows: Sequence[Row]) -> tuple[float, float]:
    """Size of a figure in inches whose legend holds long labels, or many."""
    longest = max(len(row.label) for row in rows)
    return width + 0.08 * max(0, longest - 16), max(height, 1.0 + 0.23 * len(rows))


def seed_values(row: Row, key: str, start: int) -> list[float]:
    """The tail mean of each complete seed."""
    return [tail_mean(run.metrics["step"], run.metrics[key], start) for run in row.complete]


def loss_vs_balance(rows: Sequence[Row], start: int) -> tuple[Figure, str]:
    """Validation BPB against MaxVio, one point a balancer, bars of one sample standard deviation."""
    title = "Loss against balance"
    styles = styles_of(rows)
    figure = Figure(figsize=_beside_legend(11.5, 4.8, rows), layout="constrained")
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
        if _is_logarithmic(rows, key, start):
            axes.set_xscale("log")
            _plain_log_ticks(axes.xaxis)
        axes.set_xlabel(f"{key.split('_')[0]} MaxVio of the worst layer{_log_word(rows, key, start)}")
    panels[0].set_ylabel("validation bits per byte")
    figure.suptitle(f"{title}: mean ± sample std over seeds, {tail_label(rows, start)}", x=0.01, ha="left")
    _legend_of_markers(figure, styles)
    return figure, title


def _legend_of_markers(figure: Figure, styles: dict[str, Style]) -> None:
    handles = [Line2D([], [], color=s.colour, marker=s.marker, linestyle="", markersize=8) for s in styles.values()]
    figure.legend(handles, list(styles), loc="outside right upper", frameon=False)


def _draw_bars(axes: Axes, rows: Sequence[Row], start: int, styles: dict[str, Style]) -> None:
    for number, row in enumerate(rows):
        for key, offset, alpha in (("global_maxvio", -0.2, 1.0), ("local_maxvio", 0.2, 0.45)):
            values = seed_values(row, key, start)
            mean, colour = float(np.mean(values)), styles[row.label].colour
            axes.barh(number + offset, mean, height=0.38, color=colour, alpha=alpha)
            # rounding can put the mean of equal seeds beside them
            reach = np.maximum(0, [[mean - min(values)], [max(values) - mean]])
            axes.errorbar(mean, number + offset, xerr=reach, color="#222222", capsize=2.5, linewidth=1)
            place = (max(values), number + offset)
            axes.annotate(f"{mean:.2f}", place, (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(rows)), [wrapped(row.label, 26) for row in rows])
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
        word = _log_word(rows, f"{kind}_maxvio")
        axes.set_title(f"{kind} MaxVio by step{word}, bands: range over seeds", loc="left")
        axes.set_xlabel(_step_label(rows, start) if place else "")
    return figure, title


def sweep_figure(sweep: Sweep, rows: Sequence[Row], start: int) -> tuple[Figure, str]:
    """MaxVio and validation BPB against the swept option, bars of one sample standard deviation."""
    title = f"Balance and loss by {sweep.key}"
    figure = Figure(figsize=_beside_legend(13, 4.6, rows), layout="constrained")
    panels = figure.subplots(1, 3)
    titles = {"global_maxvio": "global MaxVio", "local_maxvio": "local MaxVio", "val_bpb": "validation bits per byte"}
    for axes, (key, label) in zip(panels, titles.items(), strict=True):
        _draw_sweep(axes, sweep, key, start)
        axes.set(xlabel=sweep.key, ylabel=label)
        _ticks_at_values(axes, sweep)
    figure.suptitle(f"{title}: mean ± sample std over seeds, {tail_label(rows, start)}", x=0.01, ha="left")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return figure, title


def _ticks_at_values(axes: Axes, sweep: Sweep) -> None:
    axes.set_xscale("log" if sweep.logarithmic else "linear")
    values = sorted({value for line in sweep.lines.values() for value, _ in line})
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(values, [f"{value:g}" for value in values], rotation=45 if len(values) > 5 else 0)


def _draw_sweep(axes: Axes, sweep: Sweep, key: str, start: int) -> None:
    hues = styles_of([*(line[0][1] for line in sweep.lines.values()), *sweep.others])
    for name, line in sweep.lines.items():
        style = hues[line[0][1].label]
        spread = [mean_and_std(seed_values(row, key, start)) for _, row in line]
        mean, std = np.array(spread).T
        x = [value for value, _ in line]
        axes.errorbar(x, mean, np.nan_to_num(std), color=style.colour, marker=style.marker, capsize=3, label=name)
    for row in sweep.others:
        mean, _ = mean_and_std(seed_values(row, key, start))
        axes.axhline(mean, color=hues[row.label].colour, linestyle="--", linewidth=1.5, label=row.label)
