"""The heat map of the report: the load of every expert over the steps, read from ``load.parquet``.

``E`` experts, ``N`` steps, ``L`` MoE layers.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .comparison import Row

# log2 of the load relative to balance is cut at +- this
HEAT_LIMIT = 2.0
MAX_LAYERS = 4
MAX_STEPS = 300


def tail_label(rows: Sequence[Row], start: int) -> str:
    """The tail window in words."""
    return f"steps {start}-{rows[0].complete[0].steps}"


def load_heatmap(rows: Sequence[Row], start: int) -> tuple[Figure, str]:
    """Load of every expert over the steps, one seed a balancer: a row a layer (the worst one if there are many)."""
    title = "Load of each expert over the steps"
    positions = layers_to_show(rows, start)
    columns = min(len(rows), 4)
    blocks = -(-len(rows) // columns)
    height = blocks * len(positions)
    figure = Figure(figsize=(12, 1.4 + 1.35 * height + 0.5 * blocks), layout="constrained")
    panels = figure.subplots(height, columns, squeeze=False, sharex=True)
    for axes in panels.flat:
        axes.set_axis_off()
    for number, row in enumerate(rows):
        block, column = divmod(number, columns)
        own = panels[block * len(positions) : (block + 1) * len(positions), column]
        _draw_loads(list(own), row, positions, start)
    colours = ScalarMappable(Normalize(-HEAT_LIMIT, HEAT_LIMIT), "RdBu_r")
    bar = figure.colorbar(colours, ax=panels, ticks=[-2, -1, 0, 1, 2], shrink=0.6, aspect=30, extend="both")
    bar.ax.set_yticklabels(["1/4", "1/2", "1", "2", "4"])
    bar.set_label("load / balanced load")
    which = "first complete seed" if len(positions) > 1 else "first complete seed, worst layer"
    order = f"experts sorted by their load in {tail_label(rows, start)}"
    figure.suptitle(f"{title} ({which}; {order})", x=0.01, ha="left")
    figure.supxlabel("step", fontsize=11)
    return figure, title


def layers_to_show(rows: Sequence[Row], start: int) -> list[int]:
    """Positions of the layers shown: all if few, else the one whose MaxVio is worst in the tail, over all rows."""
    layers = [run.layers_NL[start - 1 :] for row in rows for run in row.complete if run.layers_NL.shape[1]]
    if not layers:
        return [0]
    mean_L = np.mean([tail.mean(axis=0) for tail in layers], axis=0)
    return list(range(mean_L.size)) if mean_L.size <= MAX_LAYERS else [int(mean_L.argmax())]


def _draw_loads(panels: list[Axes], row: Row, positions: Sequence[int], start: int) -> None:
    run = row.complete[0]
    for number, (axes, position) in enumerate(zip(panels, positions, strict=True)):
        axes.set_axis_on()
        axes.grid(visible=False)
        axes.set_yticks([])
        axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
        if number == 0:
            axes.set_title(f"{row.label} (s{run.seed})", fontsize=10)
        axes.tick_params(labelbottom=axes is panels[-1], labelsize=9)
        load_EN = relative_load(run.folder / "load.parquet", position)
        if load_EN is None:
            axes.text(0.5, 0.5, "no load recorded", transform=axes.transAxes, ha="center", va="center")
            continue
        load_EN = load_EN[np.argsort(-load_EN[:, start - 1 :].mean(axis=1), kind="stable")]
        axes.set_ylabel(f"MoE layer {position}\n{len(load_EN)} experts", fontsize=9)
        logarithm = np.log2(np.maximum(_coarser(load_EN), 2.0 ** (-HEAT_LIMIT - 1)))
        extent = (0.5, load_EN.shape[1] + 0.5, len(load_EN), 0)
        colours = Normalize(-HEAT_LIMIT, HEAT_LIMIT)
        axes.imshow(logarithm, cmap="RdBu_r", norm=colours, aspect="auto", interpolation="nearest", extent=extent)


def relative_load(path: Path, position: int) -> np.ndarray | None:
    """Load of the ``position``-th MoE layer over its balanced load, ``[E, steps]``; None if it was not recorded."""
    if not path.exists():
        return None
    try:
        ids = np.unique(pq.read_table(path, columns=["layer"])["layer"].to_numpy())
        if position >= ids.size:
            return None
        # one layer at a time: at scale all of them do not fit into memory
        frame = pq.read_table(path, filters=[("layer", "==", int(ids[position]))]).to_pandas()
        load_EN = frame.pivot(index="expert", columns="step", values="count").fillna(0).to_numpy(dtype=float)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is not a table of one count per step, layer and expert: {error}") from error
    return load_EN / load_EN.mean(axis=0)


def _coarser(load_EN: np.ndarray) -> np.ndarray:
    """The load with neighbouring steps averaged, so that a long run has no more columns than a picture can show."""
    width = -(-load_EN.shape[1] // MAX_STEPS)
    starts = np.arange(0, load_EN.shape[1], width)
    return np.add.reduceat(load_EN, starts, axis=1) / np.diff(np.append(starts, load_EN.shape[1]))
