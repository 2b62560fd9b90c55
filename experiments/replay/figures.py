"""The figures of a replay. An estimator has the same colour in all of them, the report's where it has the same name."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from ..report.plots import Picture, Style, save_all
from .answers import Facts
from .averaging import rank_averaging
from .marks import NOISE_COLOUR, log_scale, stream_styles, styles_of
from .table import (
    REFERENCE,
    at_ranks,
    geometric,
    make_table,
    matrix,
    names,
    window_words,
)

# Any, because matplotlib types them as literals
DASHES: Any = ("-", "--", "-.", ":")


def draw_all(frame: pd.DataFrame, facts: Facts, folder: Path) -> list[Picture]:
    """Write every figure into ``folder``, as PNG and as SVG; the pictures returned are the PNGs."""
    table = make_table(frame)
    figures: dict[str, Callable[[pd.DataFrame, pd.DataFrame, Facts], tuple[Figure, str]]] = {
        "rank_averaging": rank_averaging,
        "error_by_bytes": error_by_bytes,
        "error_to_noise": error_to_noise,
        "costs": costs,
        "spread": spread_figure,
        "error_by_step": partial(curves, key="error_mean", title="Mean error of the bias"),
        "maxvio_by_step": partial(curves, key="maxvio_next", title="MaxVio of the next batch"),
    }
    if frame["candidate_share"].notna().any():
        figures["fallback"] = fallback
    return save_all({name: partial(draw, frame, table, facts) for name, draw in figures.items()}, folder)


def error_by_bytes(frame: pd.DataFrame, table: pd.DataFrame, facts: Facts) -> tuple[Figure, str]:
    """Error over noise against the bytes that are summed; bars: range over the streams."""
    ranks = frame["ranks"].max()
    own = at_ranks(table, ranks)
    ratios, sent = matrix(own, "noise_ratio"), matrix(own, "bytes").mean(axis=1) / (facts.num_experts or 1)
    styles = styles_of(list(ratios.index))
    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.add_subplot()
    axes.set_ylabel("mean error / sampling noise (log)")
    points = []
    for name in ratios.index:
        middle, low, high = geometric(ratios.loc[name]), ratios.loc[name].min(), ratios.loc[name].max()
        reach = np.maximum(0, [[middle - low], [high - middle]])
        axes.errorbar(
            sent[name], middle, reach, fmt=styles[name].marker, color=styles[name].colour, markersize=9, capsize=3
        )
        points.append((sent[name], middle, name, styles[name].colour))
    unit = "an expert and step" if facts.num_experts else "a layer and step"
    axes.set_xlabel(f"bytes that a rank puts into all-reduces, {unit} (log)")
    axes.margins(x=0.12, y=0.08)
    log_scale(axes.xaxis)
    log_scale(axes.yaxis)
    low, high = axes.get_ylim()
    axes.axhspan(low, 1, color=NOISE_COLOUR, alpha=0.2, linewidth=0, zorder=0)
    axes.text(
        0.005,
        1,
        "below the sampling noise",
        transform=axes.get_yaxis_transform(),
        ha="left",
        va="top",
        color="#555555",
        # where all errors are far below, so is the axis
        clip_on=True,
        in_layout=False,
    )
    axes.set_ylim(low, high)
    figure.suptitle(
        f"Error against bytes at {ranks} ranks: geometric mean and range over the streams", x=0.01, ha="left"
    )
    _label_points(figure, axes, points)
    return figure, "Error over sampling noise against bytes"


def _label_points(figure: Figure, axes: Axes, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Write a name beside each point, at the first of some places where it covers no other name and no point."""
    figure.draw_without_rendering()
    scale = figure.dpi / 72
    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in axes.transData.transform([p[:2] for p in points])]
    places = [(10 * side, 12 * step) for step in (0, 1, -1, 2, -2, 3, -3, 4, -4, 5, -5) for side in (1, -1)]
    for x, y, name, colour in points:
        text = axes.annotate(name, (x, y), textcoords="offset points", xytext=(0, 0), va="center", fontsize=10)
        size = text.get_window_extent()
        text.remove()
        for dx, dy in places:
            left = size.x0 + scale * dx - (size.width if dx < 0 else 0)
            box = Bbox.from_bounds(left, size.y0 + scale * dy, size.width, size.height)
            inside = axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 and axes.bbox.y0 <= box.y0
            if inside and not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)
        axes.annotate(
            name,
            (x, y),
            (dx, dy),
            textcoords="offset points",
            va="center",
            ha="left" if dx > 0 else "right",
            color=colour,
            fontsize=10,
            arrowprops={"arrowstyle": "-", "color": colour, "alpha": 0.5, "linewidth": 0.8} if dy else None,
        )


def _dots(
    axes: Axes,
    values: pd.DataFrame,
    styles: dict[str, Style],
    bars: tuple[pd.DataFrame, pd.DataFrame] | None = None,
    most_ticks: int = 8,
) -> None:
    """A row an estimator, a marker a stream, on a log axis; zeros and what is missing are left out."""
    streams = stream_styles(list(values.columns))
    positive = values.where(values > 0)
    for row, name in enumerate(values.index):
        line = positive.loc[name]
        axes.plot([line.min(), line.max()], [row, row], color=styles[name].colour, linewidth=2, alpha=0.4)
        for stream, value in line.items():
            axes.plot(value, row, streams[stream].marker, color=styles[name].colour, markersize=6.5, alpha=0.85)
            if bars is not None:
                ends = [bar.loc[name, stream] for bar in bars]
                axes.plot(ends, [row, row], color=styles[name].colour, linewidth=1, alpha=0.7)
    axes.margins(x=0.08)
    log_scale(axes.xaxis, most_ticks)
    axes.set_yticks(range(len(values.index)), list(values.index))
    axes.set_ylim(len(values.index) - 0.4, -0.6)
    axes.grid(visible=True, axis="y", alpha=0.15)


def _legend_of_streams(figure: Figure, streams: Sequence[str]) -> None:
    handles = [
        Line2D([], [], color="#444444", marker=style.marker, linestyle="", label=name)
        for name, style in stream_styles(streams).items()
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=6, frameon=False)


def _height(num_estimators: int) -> float:
    return 1.8 + 0.3 * num_estimators


def error_to_noise(frame: pd.DataFrame, table: pd.DataFrame, facts: Facts) -> tuple[Figure, str]:
    """Mean error over sampling noise, a row an estimator."""
    ranks = frame["ranks"].max()
    ratios = matrix(at_ranks(table, ranks), "noise_ratio")
    figure = Figure(figsize=(11, _height(len(ratios))), layout="constrained")
    axes = figure.add_subplot()
    _dots(axes, ratios, styles_of(list(ratios.index)))
    axes.axvline(1, color="#222222", linewidth=1.2)
    axes.set_xlabel("mean error / sampling noise (log); left of the line the error is below the noise")
    title = f"Mean error over the sampling noise of the batch at {ranks} ranks, {window_words(frame)}"
    figure.suptitle(title, x=0.01, ha="left")
    _legend_of_streams(figure, list(ratios.columns))
    return figure, title


def costs(frame: pd.DataFrame, table: pd.DataFrame, facts: Facts) -> tuple[Figure, str]:
    """Bytes, memory, time and time over that of the reference, a row an estimator."""
    ranks = frame["ranks"].min()
    own = at_ranks(table, ranks)
    styles = styles_of(names(own, "estimator"))
    figure = Figure(figsize=(14, _height(len(styles))), layout="constrained")
    panels = figure.subplots(1, 4, sharey=True)
    labels = {
        "bytes": "bytes a layer and step (log)",
        "memory": "bytes of statistics a layer (log)",
        "seconds": "ms a layer: median, quartiles (log)",
        "time_ratio": f"time over that of {REFERENCE} (log)",
    }
    for axes, (key, label) in zip(panels, labels.items(), strict=True):
        factor = 1000 if key == "seconds" else 1
        bars = None
        if key == "seconds":
            bars = factor * matrix(own, "seconds_low"), factor * matrix(own, "seconds_high")
        _dots(axes, factor * matrix(own, key), styles, bars, most_ticks=5)
        axes.set_xlabel(label, fontsize=10)
    panels[3].axvline(1, color="#222222", linewidth=1.2)
    title = f"Costs on {ranks} {'rank' if ranks == 1 else 'ranks'}, {window_words(frame)}"
    figure.suptitle(title, x=0.01, ha="left")
    _legend_of_streams(figure, names(own, "stream"))
    return figure, title


def spread_figure(frame: pd.DataFrame, table: pd.DataFrame, facts: Facts) -> tuple[Figure, str]:
    """Largest spread over partitions, a row an estimator; exact zeros stand apart."""
    largest = table.groupby(["estimator", "stream"], sort=False)["spread"].max().reset_index()
    values = matrix(largest, "spread")
    figure = Figure(figsize=(11, _height(len(values))), layout="constrained")
    axes = figure.add_subplot()
    _dots(axes, values, styles_of(list(values.index)))
    for row, name in enumerate(values.index):
        if (values.loc[name] == 0).all():
            axes.annotate(
                "exactly 0 on every stream",
                (0.01, row),
                xycoords=("axes fraction", "data"),
                va="center",
                color="#555555",
            )
    axes.set_xlabel("largest spread of the new bias over the partitions (log)")
    if not (values > 0).any(axis=None):
        axes.set_xticks([])
    title = "Spread over the partitions of the same tokens, all steps"
    figure.suptitle(title, x=0.01, ha="left")
    _legend_of_streams(figure, list(values.columns))
    return figure, title


def fallback(frame: pd.DataFrame, table: pd.DataFrame, facts: Facts) -> tuple[Figure, str]:
    """Over the steps: share of layers that fell back, of experts for which they did, and of pairs kept."""
    own = frame[frame["candidate_share"].notna()]
    own = own.assign(fell_back=own["fallback_share"].gt(0).astype(float))
    estimators, streams = names(own, "estimator"), stream_styles(names(own, "stream"))
    labels = {
        "fell_back": "layers with fallback",
        "fallback_share": "experts with fallback",
        "candidate_share": "pairs kept",
    }
    figure = Figure(figsize=(14, 1.2 + 2.8 * len(estimators)), layout="constrained")
    panels = figure.subplots(len(estimators), 3, sharex=True, squeeze=False)
    for row, name in zip(panels, estimators, strict=True):
        for axes, (key, label) in zip(row, labels.items(), strict=True):
            for stream, style in streams.items():
                line = own[(own["estimator"] == name) & (own["stream"] == stream)].groupby("step")[key].mean()
                axes.plot(line.index, line, color=style.colour, marker=style.marker, markersize=4, linewidth=1.3)
            axes.set_title(f"{name}: share of {label}", loc="left", fontsize=11)
            axes.set_ylim(-0.03, 1.03)
            axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    for axes in panels[-1]:
        axes.set_xlabel("step")
    handles = [Line2D([], [], color=s.colour, marker=s.marker, label=name) for name, s in streams.items()]
    figure.legend(handles=handles, loc="outside lower left", ncols=6, frameon=False)
    title = "Candidates by step: fallback and pairs kept, mean over layers, seeds and partitions"
    figure.suptitle(title, x=0.01, ha="left")
    return figure, title


def curves(frame: pd.DataFrame, table: pd.DataFrame, facts: Facts, *, key: str, title: str) -> tuple[Figure, str]:
    """A metric by step, a panel a stream, a line an estimator: mean over layers and seeds."""
    ranks = frame["ranks"].max()
    own = at_ranks(frame, ranks)
    streams, styles = names(own, "stream"), styles_of(names(own, "estimator"))
    columns = min(3, len(streams))
    rows = -(-len(streams) // columns)
    figure = Figure(
        figsize=(4.2 * columns + 2.6, max(1.0 + 2.9 * rows, 0.8 + 0.24 * len(styles))), layout="constrained"
    )
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    for stream, axes in zip(streams, panels, strict=False):
        for place, (name, style) in enumerate(styles.items()):
            line = own[(own["stream"] == stream) & (own["estimator"] == name)].groupby("step")[key].mean()
            axes.plot(
                line.index,
                line.where(line > 0),
                color=style.colour,
                linestyle=DASHES[place % len(DASHES)],
                linewidth=1.6,
            )
        axes.set_title(stream, loc="left")
        log_scale(axes.yaxis)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    for axes in list(panels):
        axes.set_axis_off()
    figure.supxlabel("step", fontsize=11)
    handles = [
        Line2D([], [], color=style.colour, linestyle=DASHES[place % len(DASHES)], label=name)
        for place, (name, style) in enumerate(styles.items())
    ]
    figure.legend(handles=handles, loc="outside right upper", frameon=False)
    title = f"{title} by step (log) at {ranks} ranks, a panel a stream: mean over layers and seeds"
    figure.suptitle(title, x=0.01, ha="left")
    return figure, title
