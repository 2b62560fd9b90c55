"""The figure of rank averaging: error and MaxVio against the number of ranks."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from ..report.plots import Style
from .answers import HISTOGRAM, Facts
from .marks import NOISE_COLOUR, log_scale, styles_of
from .table import REFERENCE, averaged, listed, main_microbatches, names, number

# room between two labels at the end of lines, in parts of an axis
LABEL_HEIGHT = 0.042


def rank_averaging(frame: pd.DataFrame, table: pd.DataFrame, facts: Facts) -> tuple[Figure, str]:
    """Error and MaxVio against the number of ranks: a line an averaged estimator and stream, pooled ones beside."""
    own = table[table["microbatches"] == main_microbatches(frame)].sort_values("ranks", kind="stable")
    by_name = {str(name): part for name, part in own.groupby("estimator", sort=False)}
    lines, styles = averaged(frame), styles_of(names(table, "estimator"))
    pooled = [name for name in _pooled_examples(list(styles)) if name not in lines]
    figure = Figure(figsize=(13, 5.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    ends = {
        axes: _averaged_lines(axes, by_name, lines, key, styles, facts)
        for axes, key in ((left, "error_mean"), (right, "maxvio_next"))
    }
    ends[left] += [_pooled_band(left, by_name[name], styles[name].colour, name) for name in pooled]
    ends[left] += _noise_band(left, own)
    if REFERENCE in pooled:
        ends[right] += _reference_lines(right, by_name[REFERENCE], styles[REFERENCE].colour, facts)
    beside = [*(by_name[name]["error_mean"] for name in pooled), own["noise"]]
    for axes, label in ((left, "mean error of the new bias (log)"), (right, "MaxVio of the next batch (log)")):
        axes.set(xscale="log", xlabel="virtual ranks (log)", ylabel=label)
        ranks = sorted(own["ranks"].unique())
        axes.set_xticks(ranks, [str(value) for value in ranks])
        axes.xaxis.set_minor_locator(NullLocator())
        if axes is left:
            _cut_off(axes, [by_name[name] for name in lines], beside)
        log_scale(axes.yaxis)
        _label_ends(axes, ends[axes])
    title = _averaging_title(own, lines)
    figure.suptitle(title, x=0.01, ha="left")
    handles = [Line2D([], [], color=styles[name].colour, marker=styles[name].marker, label=name) for name in lines]
    handles.append(Line2D([], [], color="#333333", linestyle="-", label="with skew"))
    handles.append(Line2D([], [], color="#333333", linestyle="--", label="without skew"))
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False)
    return figure, f"{title}. Whiskers: sample std over seeds; bands: range over the streams."


def _pooled_examples(estimators: Sequence[str]) -> list[str]:
    """The reference, and of the histograms the one in the middle."""
    histograms = [name for name in estimators if HISTOGRAM in name]
    return [*(name for name in estimators if name == REFERENCE), *histograms[len(histograms) // 2 :][:1]]


def _averaging_title(own: pd.DataFrame, lines: Sequence[str]) -> str:
    """What the figure shows, in numbers: of the stream where averaging is farthest off, and of the reference there."""
    averages = own[own["estimator"].isin(lines[:1])]
    if averages.empty:
        return "Error and MaxVio by number of ranks"
    worst = averages.sort_values("error_mean").iloc[-1]
    few, many = own["ranks"].min(), own["ranks"].max()
    errors = own[own["stream"] == worst["stream"]].set_index(["estimator", "ranks"])["error_mean"]
    parts = []
    for name in (worst["estimator"], REFERENCE):
        if {(name, few), (name, many)} <= set(errors.index):
            low, high = number(errors[name, few]), number(errors[name, many])
            parts.append(f"{name} {low if low == high else f'{low} and {high}'}")
    return f"Mean error at {few} and {many} ranks on {worst['stream']}: {', '.join(parts)}"


# where a line ends, what to write there, in which colour
End = tuple[float, str, str]


def _averaged_lines(
    axes: Axes, by_name: dict[str, pd.DataFrame], lines: Sequence[str], key: str, styles: dict[str, Style], facts: Facts
) -> list[End]:
    """A line an averaged estimator and stream, the first estimator on top; returns where its lines end."""
    ends: list[End] = []
    for name in reversed(lines):
        first = name == lines[0]
        for stream in names(by_name[name], "stream"):
            line = by_name[name][by_name[name]["stream"] == stream]
            axes.errorbar(
                line["ranks"],
                line[key],
                line[f"{key}_std"].fillna(0),
                color=styles[name].colour,
                marker=styles[name].marker,
                linestyle="-" if stream in facts.skewed else "--",
                # what is the same as the first shows as a rim
                linewidth=1.8 if first else 4.5,
                markersize=5 if first else 9,
                alpha=1.0 if first else 0.5,
                capsize=2,
            )
            ends += [(line[key].iloc[-1], stream, styles[name].colour)] if first else []
    return ends


def _pooled_band(axes: Axes, own: pd.DataFrame, colour: str, name: str) -> End:
    by_ranks = own.groupby("ranks")["error_mean"]
    low, high = by_ranks.min(), by_ranks.max()
    axes.fill_between(low.index, low, high, color=colour, alpha=0.25, linewidth=0)
    middle = (low * high) ** 0.5
    axes.plot(middle.index, middle, color=colour, linewidth=2.5)
    return middle.iloc[-1], f"pooled: {name}", colour


def _noise_band(axes: Axes, own: pd.DataFrame) -> list[End]:
    low, high = own["noise"].min(), own["noise"].max()
    if np.isnan(low):
        return []
    axes.axhspan(low, high, color=NOISE_COLOUR, alpha=0.3, linewidth=0, zorder=0)
    return [(float(np.sqrt(low * high)), "sampling noise of a batch", "#555555")]


def _cut_off(axes: Axes, lines: Sequence[pd.DataFrame], shown: Sequence[pd.Series]) -> None:
    """End the axis below what is shown beside the lines, and say what of them lies lower: rounding would fill it."""
    floor = min(values.min() for values in shown) / 2
    lower = [line[line["error_mean"] < floor] for line in lines]
    lower = [line for line in lower if len(line)]
    if np.isnan(floor) or not lower:
        return
    axes.set_ylim(bottom=floor)
    ranks = sorted(set(pd.concat(lower)["ranks"]))
    most = pd.concat(lower)["error_mean"].max()
    plural = "s" if ranks != [1] else ""
    words = f"below the axis on {listed([str(value) for value in ranks])} rank{plural}: at most {number(most)}"
    axes.text(0.98, 0.02, words, transform=axes.transAxes, fontsize=9, color="#555555", ha="right")


def _reference_lines(axes: Axes, own: pd.DataFrame, colour: str, facts: Facts) -> list[End]:
    """The pooled reference on each stream, which the averages of that stream start from."""
    for stream in names(own, "stream"):
        line = own[own["stream"] == stream]
        dashes = "-" if stream in facts.skewed else "--"
        axes.plot(line["ranks"], line["maxvio_next"], color=colour, linestyle=dashes, linewidth=1.2, alpha=0.8)
    last = own[own["ranks"] == own["ranks"].max()]["maxvio_next"]
    return [(last.min(), f"pooled: {REFERENCE}, each stream", colour)]


def _label_ends(axes: Axes, ends: Sequence[End]) -> None:
    """Write names to the right of a log axis, at the height of their lines, pushed apart where they would overlap."""
    bottom, top = axes.get_ylim()
    places = sorted(
        # what is 0 has no place on it
        (np.log(value / bottom) / np.log(top / bottom), text, colour)
        for value, text, colour in ends
        if value > 0
    )
    heights = [height for height, _, _ in places]
    for _ in range(200):
        for place in range(1, len(heights)):
            overlap = LABEL_HEIGHT - (heights[place] - heights[place - 1])
            if overlap > 0:
                heights[place - 1 : place + 1] = heights[place - 1] - overlap / 2, heights[place] + overlap / 2
    for height, (end, text, colour) in zip(heights, places, strict=True):
        axes.annotate(
            text,
            (1.0, end),
            (1.035, height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=colour,
            va="center",
            fontsize=10,
            arrowprops={"arrowstyle": "-", "color": colour, "alpha": 0.6, "linewidth": 0.8, "relpos": (0, 0.5)},
        )
