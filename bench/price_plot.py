"""The figure of `scripts/bench price`: time against imbalance, in the style of the report."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..experiments.report.comparison import Row
from ..experiments.report.plots import DPI, STYLE, Style, styles_of
from .price_loads import LADDER


@dataclass(frozen=True)
class View:
    """What of a point is drawn, and fitted, against what."""

    x: str
    y: str
    xlabel: str
    ylabel: str


VIEWS = {
    "clock against share": View(
        "share", "wall_ms", "share of the slowest of {count} devices\n(mean over layers; dotted: balance)", "{what}, ms"
    ),
    "clock against local MaxVio": View("maxvio", "wall_ms", "local MaxVio\n(mean over layers)", "{what}, ms"),
    "processor against share": View(
        "step_share",
        "processor_ms",
        "share of the busiest of {count} ranks\n(in all layers together; dotted: balance)",
        "processor time of the busiest rank, ms",
    ),
}


def save(measured: dict[int, dict[str, Any]], rows: Sequence[Row], what: str, path: Path) -> None:
    """Draw ``measured`` into ``path``: a line of panels for each number of devices, a panel for each fit."""
    # the style is the report's own, whatever the reader's matplotlib is set to
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        draw(measured, rows, what).savefig(path, dpi=DPI, facecolor="white")


def draw(measured: dict[int, dict[str, Any]], rows: Sequence[Row], what: str) -> Figure:
    """Points by balancer, medians with quartiles, and the fitted lines."""
    names = list(next(iter(measured.values()))["fits"])
    figure = Figure(figsize=(2.3 + 4.6 * len(names), 0.7 + 4.0 * len(measured)), layout="constrained")
    panels = figure.subplots(len(measured), len(names), squeeze=False)
    styles = styles_of(rows) | {LADDER: Style("#999999", "x")}
    for (count, result), line in zip(measured.items(), panels, strict=True):
        for axes, name in zip(line, names, strict=True):
            view = VIEWS[name]
            _draw_points(axes, result["points"], view, styles)
            _draw_fit(axes, result["points"], view, result["fits"][name])
            axes.set(xlabel=view.xlabel.format(count=count), ylabel=view.ylabel.format(what=what))
            axes.set_ylim(bottom=0)
            if view.x != "maxvio":
                axes.axvline(1 / count, color="#000000", linewidth=1, linestyle=":")
        line[0].set_title(f"P = {count}", loc="left")
    title = f"The price of imbalance: {what}, medians and quartiles, line: least squares"
    figure.suptitle(title, x=0.01, ha="left")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return figure


def _draw_points(axes: Axes, points: Sequence[dict[str, Any]], view: View, styles: dict[str, Style]) -> None:
    for label, style in styles.items():
        own = [point for point in points if point["label"] == label]
        lower, median, upper = (
            np.array([point[view.y][name] for point in own]) for name in ("lower", "median", "upper")
        )
        axes.errorbar(
            [point[view.x] for point in own],
            median,
            [median - lower, upper - median],
            fmt=style.marker,
            color=style.colour,
            markersize=6,
            linewidth=1,
            label=label,
        )


def _draw_fit(axes: Axes, points: Sequence[dict[str, Any]], view: View, fit: dict[str, float]) -> None:
    ends = np.array([reach(point[view.x] for point in points) for reach in (min, max)])
    axes.plot(ends, fit["intercept"] + fit["slope"] * ends, color="#222222", linewidth=1.5)
    text = f"slope {fit['slope']:.3g} ms [{fit['low']:.3g}, {fit['high']:.3g}], R² = {fit['r2']:.2f}"
    axes.annotate(text, (0.03, 0.04), xycoords="axes fraction", fontsize=9)
