"""How far the same balancer's biases are from one another at different points of an axis.

The question of the experiment ``sharding``: the same tokens cut into more parts should give the same bias. The distance
of a run is the root mean square, over layers and experts, of the difference between its bias and that of the run of the
same balancer and seed in the first block; exactly 0 means the same bits.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib.figure import Figure

from ..runs import FREE, flatten
from .comparison import Row, differing
from .reading import Run

FIRST_STEPS = 10
MAX_STEPS = 100
COLUMNS = ["balancer", "block", "seed", "step", "distance"]
# how tokens are cut; runs that differ in more are of other models
CUTS = ("data", "parallel")


def bias_drift(rows: Sequence[Row]) -> pd.DataFrame:
    """One record a balancer, block (but the first), seed and step: the distance of its bias from the first block's.

    Empty where there is one block or no bias, where the runs differ in more than ``CUTS``, or where biases of other
    shapes cannot be compared. Of a long run the first ``FIRST_STEPS`` and about ``MAX_STEPS`` more are read.
    """
    blocks = list(dict.fromkeys(row.block for row in rows))
    first = {(row.balancer, run.seed): run for row in rows if row.block == blocks[0] for run in row.complete}
    records: list[tuple[str, str, int, int, float]] = []
    for row in (row for row in rows if row.block != blocks[0]):
        for run in row.complete:
            base = first.get((row.balancer, run.seed))
            distances = distance(read_bias(base), read_bias(run)) if base and _cut_otherwise(base, run) else {}
            records += [(row.balancer, row.block, run.seed, step, value) for step, value in distances.items()]
    return pd.DataFrame.from_records(records, columns=COLUMNS)


def _cut_otherwise(one: Run, other: Run) -> bool:
    """Whether the runs differ only in how their tokens are cut."""
    keys = differing([flatten(run.config) for run in (one, other)])
    return {key.partition(".")[0] for key in keys} <= {*CUTS, *FREE}


def read_bias(run: Run) -> pd.DataFrame:
    """The bias after each step that is read, ``[N, L * E]``; empty if none was recorded."""
    path = run.folder / "load.parquet"
    wanted = {*range(1, FIRST_STEPS + 1), *np.linspace(1, run.steps, MAX_STEPS).round().astype(int).tolist()}
    if not path.exists() or "bias" not in pq.ParquetDataset(path).schema.names:
        return pd.DataFrame()
    steps = pa.array(sorted(wanted), pa.int32())
    table = pq.read_table(path, columns=["step", "layer", "expert", "bias"], filters=[("step", "in", steps)])
    return table.to_pandas().pivot(index="step", columns=["layer", "expert"], values="bias").dropna(axis=1)


def distance(one: pd.DataFrame, other: pd.DataFrame) -> dict[int, float]:
    """Root mean square of the difference by step; empty if their layers and experts are not the same."""
    if one.empty or other.empty or not one.columns.equals(other.columns):
        return {}
    steps = one.index.intersection(other.index)
    difference = one.loc[steps].to_numpy(dtype=float) - other.loc[steps].to_numpy(dtype=float)
    return dict(zip(steps.tolist(), np.sqrt((difference**2).mean(axis=1)).tolist(), strict=True))


def draw_drift(drift: pd.DataFrame, colours: dict[str, str]) -> tuple[Figure, str]:
    """Distance by step, one panel a block: the line is the mean over seeds, the band their range, 0 at the bottom."""
    blocks = list(dict.fromkeys(drift["block"]))
    figure = Figure(figsize=(max(6.5, 4.2 * len(blocks)), 4.6), layout="constrained")
    panels = figure.subplots(1, len(blocks), sharey=True, squeeze=False)[0]
    for axes, block in zip(panels, blocks, strict=True):
        for balancer, own in drift[drift["block"] == block].groupby("balancer", sort=False):
            seeds = own.groupby("step")["distance"].agg(["mean", "min", "max"])
            colour = colours[str(balancer)]
            axes.fill_between(seeds.index, seeds["min"], seeds["max"], color=colour, alpha=0.15, linewidth=0)
            axes.plot(seeds.index, seeds["mean"], color=colour, linewidth=1.8, label=balancer)
        axes.set_title(block, loc="left")
        axes.set_xlabel("step")
        # the same bits are a distance of 0, which a logarithm cannot show
        axes.set_yscale("symlog", linthresh=1e-8)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}" if value else "0")
    panels[0].set_ylabel("RMS difference of the bias")
    title = "Bias against that of the first block"
    figure.suptitle(f"{title}: mean over seeds, band: their range", x=0.01, ha="left")
    # a block may lack a balancer
    handles = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False)
    return figure, title
