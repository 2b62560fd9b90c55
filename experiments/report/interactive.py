"""What the page's own plots show, as JSON: rounded, coarse enough for a file, and nothing that is not in the runs.

``E`` experts, ``C`` columns of steps. Numbers that are not there are null.
"""

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from .comparison import Row
from .heatmap import HEAT_LIMIT
from .loads import Loads, num_layers, read_loads, worst_layers
from .plots import Style, seed_values, smoothed, smoothing_window, styles_of, thinned
from .reading import Run
from .statistics import mean_and_std, tail_mean
from .sweeps import find_sweep

CURVES = ("global_maxvio", "local_maxvio", "loss", "val_bpb")
SPREAD = ("global_maxvio", "local_maxvio", "val_bpb")
# what one file can hold and one screen can show
MAX_POINTS = 400
MAX_COLUMNS = 120
MAX_LAYERS = 8
# levels of a byte for log2(load) between the limits of the heat map, of two bytes for a bias; above: not recorded
LOAD_LEVELS, LOAD_ABSENT = 250, 255
BIAS_LEVELS, BIAS_ABSENT = 65534, 65535
# plotly's names of the markers of plots.py
SYMBOLS = {
    "o": "circle",
    "X": "x",
    "D": "diamond",
    "d": "diamond-tall",
    "P": "cross",
    "s": "square",
    "^": "triangle-up",
    "v": "triangle-down",
    "h": "hexagon",
    "*": "star",
    "<": "triangle-left",
    ">": "triangle-right",
    "p": "pentagon",
    "8": "octagon",
}


def page_data(rows: Sequence[Row], start: int) -> dict[str, Any]:
    """Everything that the plots of the page show; ``start`` is the first step of the tail window.

    Rows need a complete run.
    """
    styles, layers = styles_of(rows), worst_layers(rows, start, MAX_LAYERS)
    return {
        "rows": [_row_data(row, styles[row.label], layers, start) for row in rows],
        "tail": _tail(rows, start),
        "last_token": max(_tail_tokens(row.complete[0], start)[1] for row in rows),
        "smoothing": smoothing_window(rows[0].complete[0].steps),
        "num_layers": num_layers(rows),
        "worst_layer": worst_layers(rows, start, 1)[0],
        "heat_limit": HEAT_LIMIT,
        "load_levels": LOAD_LEVELS,
        "bias_levels": BIAS_LEVELS,
        "sweep": _sweep(rows),
    }


def _row_data(row: Row, style: Style, layers: Sequence[int], start: int) -> dict[str, Any]:
    return {
        "label": row.label,
        "colour": style.colour,
        "symbol": SYMBOLS[style.marker],
        "seeds": [run.seed for run in row.complete],
        "curves": {key: _curve(row, key) for key in CURVES},
        "tail": {key: _spread(seed_values(row, key, start)) for key in SPREAD},
        "devices": _devices(row, start),
        "experts": _experts(row.complete[0], layers, start),
    }


def _tail(rows: Sequence[Row], start: int) -> dict[str, Any]:
    """The tail window in steps and in tokens; the tokens are null where rows have other tokens a step."""
    tokens = _tail_tokens(rows[0].complete[0], start)
    same = all(_tail_tokens(row.complete[0], start) == tokens for row in rows)
    return {"steps": [start, rows[0].complete[0].steps], "tokens": tokens if same else None}


def _tail_tokens(run: Run, start: int) -> list[int]:
    """The tokens at both ends of the tail window, the first at the end of the step before it."""
    tokens = [0, *run.metrics["tokens"].astype(int).tolist()]
    return [tokens[start - 1], tokens[-1]]


def _curve(row: Row, key: str) -> dict[str, list] | None:
    """Mean over the complete seeds and their range, by step and tokens; None if it was never measured."""
    # a validation is a mean over many tokens and has gaps between: no moving mean
    window = 1 if key == "val_bpb" else smoothing_window(row.complete[0].steps)
    seeds = pd.concat([smoothed(run, key, window) for run in row.complete], axis=1).dropna(how="all")
    if seeds.empty:
        return None
    seeds = thinned(seeds, MAX_POINTS)
    tokens = row.complete[0].metrics.set_index("step")["tokens"].loc[seeds.index]
    curve = {"mean": seeds.mean(axis=1), "low": seeds.min(axis=1), "high": seeds.max(axis=1)}
    whole = {"step": seeds.index.astype(int).tolist(), "tokens": tokens.astype(int).tolist()}
    return whole | {name: rounded(values) for name, values in curve.items()}


def rounded(values: Iterable[float]) -> list[float | None]:
    """Numbers with five significant digits, null for what is not finite.

    >>> rounded([1234567.8, 0.000123456, float("nan")])
    [1234600.0, 0.00012346, None]
    """
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]


def _spread(values: Sequence[float]) -> dict[str, Any]:
    mean, std = rounded(mean_and_std(values))
    return {"mean": mean, "std": std, "seeds": rounded(values)}


def _devices(row: Row, start: int) -> dict[str, list[float | None]]:
    """For each number of devices the tail mean of their MaxVio: mean, lowest and highest seed."""
    found = {}
    for count in sorted({count for run in row.complete for count in run.devices}):
        runs = [run for run in row.complete if count in run.devices]
        seeds = np.array([tail_mean(run.metrics["step"], run.devices[count], start) for run in runs])
        seeds = seeds[~np.isnan(seeds)]
        if seeds.size:
            found[str(count)] = rounded([seeds.mean(), seeds.min(), seeds.max()])
    return found


def _experts(run: Run, layers: Sequence[int], start: int) -> dict[str, Any] | None:
    """Load and bias of every expert of one run; None if no load was recorded."""
    loads = read_loads(run.folder / "load.parquet", layers, run.steps, start, MAX_COLUMNS)
    if loads is None:
        return None
    num_experts, num_columns = loads.load_PEC.shape[1:]
    return {
        "seed": run.seed,
        "num_experts": num_experts,
        "width": loads.width,
        "last_step": loads.last_step_C.tolist(),
        "num_columns": num_columns,
        "has_bias": loads.bias_PEC is not None,
        "layers": [_layer(loads, place) for place in range(len(loads.layers))],
    }


def _layer(loads: Loads, place: int) -> dict[str, Any]:
    return {
        "layer": loads.layers[place],
        "order": loads.order_PE[place].tolist(),
        "load": load_code(loads.load_PEC[place]),
        "bias": None if loads.bias_PEC is None else bias_code(loads.bias_PEC[place]),
    }


def load_code(load_EC: np.ndarray) -> str:
    """One byte a load, base64: the place of its log2 between the limits of the heat map; 255 where there is none.

    >>> list(base64.b64decode(load_code(np.array([[0.25, 1.0, 4.0, 100.0, 0.0, np.nan]]))))
    [0, 125, 250, 250, 0, 255]
    """
    with np.errstate(divide="ignore"):
        logarithm = np.clip(np.log2(load_EC), -HEAT_LIMIT, HEAT_LIMIT)
    level = np.round((logarithm + HEAT_LIMIT) / (2 * HEAT_LIMIT) * LOAD_LEVELS)
    return _base64(np.nan_to_num(level, nan=LOAD_ABSENT).astype(np.uint8))


def bias_code(bias_EC: np.ndarray) -> dict[str, Any] | None:
    """Two bytes a bias, base64, little-endian: its place between ``low`` and ``high``; None if the layer has none."""
    if np.isnan(bias_EC).all():
        return None
    low, high = float(np.nanmin(bias_EC)), float(np.nanmax(bias_EC))
    level = np.round((bias_EC - low) / ((high - low) or 1.0) * BIAS_LEVELS)
    return {"low": low, "high": high, "levels": _base64(np.nan_to_num(level, nan=BIAS_ABSENT).astype("<u2"))}


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")


def _sweep(rows: Sequence[Row]) -> Mapping[str, Any] | None:
    """The swept option: the rows of each line by their number, and those beside them."""
    sweep = find_sweep(rows)
    if sweep is None:
        return None
    number = {row.label: place for place, row in enumerate(rows)}
    lines = [
        {"name": name, "x": [value for value, _ in line], "rows": [number[row.label] for _, row in line]}
        for name, line in sweep.lines.items()
    ]
    others = [number[row.label] for row in sweep.others]
    return {"key": sweep.key, "logarithmic": sweep.logarithmic, "lines": lines, "others": others}
