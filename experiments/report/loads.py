"""The load and the bias of every expert over the steps, read from ``load.parquet`` in one pass.

``P`` MoE layers that were asked for, ``E`` experts, ``C`` columns: groups of neighbouring steps, so that a long run has
no more of them than a picture can show.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from .comparison import Row


@dataclass(frozen=True, eq=False)
class Loads:
    """What was read; NaN where nothing was recorded.

    ``load_PEC`` is the load in the steps of a column and ``tail_PE`` that in the tail window, as multiples of the
    balanced load; ``bias_PEC`` is the bias at the last step of a column, None in a file that has no such column. A
    column holds ``width`` of the ``steps`` steps, the last one what remains.
    """

    layers: list[int]
    width: int
    steps: int
    load_PEC: np.ndarray
    tail_PE: np.ndarray
    bias_PEC: np.ndarray | None

    @property
    def last_step_C(self) -> np.ndarray:
        """The last step of each column."""
        return np.minimum((np.arange(self.load_PEC.shape[2]) + 1) * self.width, self.steps)

    @property
    def order_PE(self) -> np.ndarray:
        """The experts of each layer, the busiest in the tail window first."""
        return np.argsort(-self.tail_PE, axis=1, kind="stable")


def read_loads(path: Path, layers: Sequence[int], steps: int, start: int, columns: int) -> Loads | None:
    """The ``layers`` that ``path`` has, in at most ``columns`` columns; None if it has none of them.

    ``start`` is the first step of the tail window. At scale a run does not fit into memory: it is read in batches.

    Raises:
        ValueError: if ``path`` is not a table of one count per step, layer and expert.
    """
    if not path.exists():
        return None
    try:
        table = ds.dataset(path, format="parquet")
        first = table.to_table(["layer", "expert"], filter=pc.field("step") == 1)
        own = [layer for layer in layers if layer in set(first["layer"].to_pylist())]
        if not own:
            return None
        return _accumulate(table, own, 1 + pc.max(first["expert"]).as_py(), steps, start, columns)
    # what pyarrow raises for a broken file, a missing column or a type that cannot be computed with
    except (pa.ArrowException, OSError, KeyError, IndexError) as error:
        raise ValueError(f"{path} is not a table of one count per step, layer and expert: {error}") from error


def _accumulate(table: ds.Dataset, layers: list[int], num_experts: int, steps: int, start: int, columns: int) -> Loads:
    width = -(-steps // columns)
    shape = (len(layers), num_experts, -(-steps // width))
    count_PEC, tail_PE, bias_PEC = np.zeros(shape), np.zeros(shape[:2]), np.full(shape, np.nan)
    for step, layer, expert, count, bias in _batches(table, layers):
        column, place = (step - 1) // width, np.searchsorted(layers, layer)
        np.add.at(count_PEC, (place, expert, column), count)
        late = step >= start
        np.add.at(tail_PE, (place[late], expert[late]), count[late])
        last = (step % width == 0) | (step == steps)
        bias_PEC[place[last], expert[last], column[last]] = bias[last]
    load_PEC, relative_PE = (_over_balanced(counts) for counts in (count_PEC, tail_PE))
    return Loads(layers, width, steps, load_PEC, relative_PE, bias_PEC if "bias" in table.schema.names else None)


def _batches(table: ds.Dataset, layers: list[int]) -> Iterator[tuple[np.ndarray, ...]]:
    """Step, layer, expert (from 0), count and bias of some records; the bias is NaN in a file without one."""
    names = ["step", "layer", "expert", "count", *(["bias"] if "bias" in table.schema.names else [])]
    for batch in table.to_batches(columns=names, filter=pc.field("layer").isin(layers)):
        step, layer, expert, count = (batch[name].to_numpy(zero_copy_only=False) for name in names[:4])
        bias = batch["bias"].to_numpy(zero_copy_only=False) if "bias" in names else np.full(step.size, np.nan)
        yield step.astype(np.int64), layer, expert, count, bias


def _over_balanced(count: np.ndarray) -> np.ndarray:
    """Counts ``[P, E, ...]`` over the mean of the experts, NaN where there are none."""
    mean = count.mean(axis=1, keepdims=True)
    return np.divide(count, mean, out=np.full_like(count, np.nan), where=mean > 0)


def worst_layers(rows: Sequence[Row], start: int, most: int) -> list[int]:
    """The MoE layers of the highest global MaxVio in the tail window, over all rows: at most ``most``, in their order.

    Without a record of single layers these are the first ones.
    """
    tails = [run.layers_NL[start - 1 :].mean(axis=0) for row in rows for run in row.complete if run.layers_NL.size]
    if not tails:
        return list(range(most))
    # rows may have different numbers of layers
    size = max(tail.size for tail in tails)
    padded = np.array([np.pad(tail, (0, size - tail.size), constant_values=np.nan) for tail in tails])
    return sorted(np.argsort(-np.nanmean(padded, axis=0), kind="stable")[:most].tolist())


def num_layers(rows: Sequence[Row]) -> int:
    """The most MoE layers that a run has; 0 without a record of single layers."""
    return max((run.layers_NL.shape[1] for row in rows for run in row.complete), default=0)
