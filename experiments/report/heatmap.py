"""The heat map of the report: the load of every expert over the steps.

``E`` experts, ``C`` columns of steps.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .comparison import Row
from .loads import Loads, num_layers, read_loads, worst_layers
from .tables import wrapped

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
    layers = worst_layers(rows, start, MAX_LAYERS)
    if num_layers(rows) > MAX_LAYERS:
        layers = worst_layers(rows, start, 1)
    columns = min(len(rows), 4)
    blocks = -(-len(rows) // columns)
    height = blocks * len(layers)
    figure = Figure(figsize=(12, 1.4 + 1.35 * height + 0.5 * blocks), layout="constrained")
    panels = figure.subplots(height, columns, squeeze=False, sharex=True)
    for axes in panels.flat:
        axes.set_axis_off()
    for number, row in enumerate(rows):
        block, column = divmod(number, columns)
        own = panels[block * len(layers) : (block + 1) * len(layers), column]
        _draw_loads(list(own), row, layers, start)
    colours = ScalarMappable(Normalize(-HEAT_LIMIT, HEAT_LIMIT), "RdBu_r")
    bar = figure.colorbar(colours, ax=panels, ticks=[-2, -1, 0, 1, 2], shrink=0.6, aspect=30, extend="both")
    bar.ax.set_yticklabels(["1/4", "1/2", "1", "2", "4"])
    bar.set_label("load / balanced load")
    which = "first complete seed" if len(layers) > 1 else "first complete seed, worst layer"
    order = f"experts sorted by their load in {tail_label(rows, start)}"
    figure.suptitle(f"{title} ({which}; {order})", x=0.01, ha="left")
    figure.supxlabel("step", fontsize=11)
    return figure, title


def _draw_loads(panels: list[Axes], row: Row, layers: Sequence[int], start: int) -> None:
    run = row.complete[0]
    loads = read_loads(run.folder / "load.parquet", layers, run.steps, start, MAX_STEPS)
    panels[0].set_title(f"{wrapped(row.label, 30)} (s{run.seed})", fontsize=10)
    for axes, layer in zip(panels, layers, strict=True):
        axes.set_axis_on()
        axes.grid(visible=False)
        axes.set_yticks([])
        axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
        axes.tick_params(labelbottom=axes is panels[-1], labelsize=9)
        if loads is None or layer not in loads.layers:
            axes.text(0.5, 0.5, "no load recorded", transform=axes.transAxes, ha="center", va="center")
        else:
            _draw_layer(axes, loads, loads.layers.index(layer))


def _draw_layer(axes: Axes, loads: Loads, place: int) -> None:
    load_EC = loads.load_PEC[place][loads.order_PE[place]]
    axes.set_ylabel(f"MoE layer {loads.layers[place]}\n{len(load_EC)} experts", fontsize=9)
    logarithm = np.log2(np.maximum(load_EC, 2.0 ** (-HEAT_LIMIT - 1)))
    extent = (0.5, loads.steps + 0.5, len(load_EC), 0)
    colours = Normalize(-HEAT_LIMIT, HEAT_LIMIT)
    axes.imshow(logarithm, cmap="RdBu_r", norm=colours, aspect="auto", interpolation="nearest", extent=extent)
