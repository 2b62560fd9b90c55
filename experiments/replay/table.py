"""From the rows of ``steps.parquet`` to the figures of the page: the window of steps, means over it, spread over seeds.

A run is one estimator on one stream with one seed and one partition (``ranks`` x ``microbatches``). A figure of a run
is a mean over its layers and over the last two thirds of its steps, as the first steps start from a zero bias.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from ..report.statistics import tail_start
from ..report.tables import spread

# what times, bytes and memory are divided by
REFERENCE = "eqb"
TAIL = 2 / 3
PARTITION = ["ranks", "microbatches"]
ROW = ["stream", "estimator", *PARTITION]
RUN = [*ROW, "seed"]
ERRORS = ["error_max", "error_mean", "noise", "maxvio_before", "maxvio_same", "maxvio_next"]
COSTS = ["bytes", "rounds", "memory", "seconds"]
MEANS = [*ERRORS, "noise_ratio", "bytes", "rounds", "fallback_steps", "candidate_share"]
SHARES = ["fallback_share", "candidate_share"]
CONTRACT = [*RUN, "step", "layer", *ERRORS, "moved", "spread", *COSTS, *SHARES]
# below this many seeds a deviation says little
MIN_SEEDS = 3


@dataclass(frozen=True)
class Column:
    """A column of the table: its heading, its key in ``table.csv`` and what it means."""

    heading: str
    key: str
    meaning: str


COLUMNS = (
    Column("estimator", "estimator", "how the bias is found; * marks fewer than three seeds"),
    Column("stream", "stream", "the router scores that it saw, the same for every estimator"),
    Column("ranks", "ranks", "virtual ranks that the tokens of a step are spread over"),
    Column("microbatches", "microbatches", "microbatches of a rank in a step"),
    Column(
        "error, mean",
        "error_mean",
        "distance of the new bias from the fp64 quantile of the pooled margins, both centred: mean over the experts",
    ),
    Column("error, max", "error_max", "the same, of the expert that is farthest off"),
    Column(
        "error / noise",
        "noise_ratio",
        "mean error over the sampling noise of the batch, half the difference between the fp64 quantiles of two halves "
        "of its tokens, centred (mean over the experts); below 1 the batch itself says no more. Neighbouring tokens "
        "are in different halves: where they are alike the noise is too small",
    ),
    Column("MaxVio, next", "maxvio_next", "max load / mean load - 1 of the next batch under the new bias"),
    Column("MaxVio, same", "maxvio_same", "the same of the batch that the new bias was found from"),
    Column(
        "spread",
        "spread",
        "largest difference of the new bias between the partitions of the same tokens, max over experts, layers and "
        "all steps; 0 means the same bits",
    ),
    Column("bytes", "bytes", "what one rank puts into all-reduces in a step for a layer"),
    Column("rounds", "rounds", "all-reduces in a step"),
    Column("memory", "memory", "bytes of statistics on the busiest rank for a layer, the peak in a step"),
    Column(
        "ms",
        "seconds",
        "milliseconds a layer and step of all virtual ranks together, routing included: median [quartiles]",
    ),
    Column("time / eqb", "time_ratio", f"time over that of {REFERENCE} in the same step: median"),
    Column("fallback", "fallback_steps", "share of the layers and steps in which candidates were incomplete"),
    Column("candidates", "candidate_share", "share of the pairs of token and expert that were kept or counted"),
)
# columns of the summary, and which of them are shares
SUMMARY = (
    "estimator",
    "noise_ratio",
    "maxvio_next",
    "spread",
    "bytes",
    "memory",
    "seconds",
    "time_ratio",
    "fallback_steps",
    "candidate_share",
)
PER_CENT = ("fallback_steps", "candidate_share")


def heading(key: str) -> str:
    """The heading of a column."""
    return next(column.heading for column in COLUMNS if column.key == key)


def read_steps(folder: Path) -> pd.DataFrame:
    """The rows of ``<folder>/steps.parquet``.

    Raises:
        ValueError: if there is no such file, it has no row, or it lacks a column.
    """
    path = folder / "steps.parquet"
    if not path.is_file():
        raise ValueError(f"expected the folder of a replay, which holds steps.parquet, got {folder}")
    frame = pd.read_parquet(path)
    if missing := [name for name in CONTRACT if name not in frame]:
        raise ValueError(f"{path}: expected the columns {', '.join(CONTRACT)}; {', '.join(missing)} missing")
    if frame.empty:
        raise ValueError(f"{path} has no row: no step was replayed")
    return frame


def names(frame: pd.DataFrame, column: str) -> list[str]:
    """The streams or estimators in the order in which they were run.

    >>> names(pd.DataFrame({"stream": ["plain", "drift", "plain"]}), "stream")
    ['plain', 'drift']
    """
    return list(dict.fromkeys(frame[column]))


def first_steps(frame: pd.DataFrame) -> pd.Series:
    """For each row the first step of its run's window."""
    last = frame.groupby(RUN)["step"].transform("max")
    starts = {steps: tail_start(steps, TAIL) for steps in last.unique()}
    return last.map(starts)


def window(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the last two thirds of each run."""
    return frame[frame["step"] >= first_steps(frame)]


def window_words(frame: pd.DataFrame) -> str:
    """Which steps ``window`` keeps.

    >>> run = {"stream": "plain", "estimator": "eqb", "ranks": 1, "microbatches": 1, "seed": 0}
    >>> window_words(pd.DataFrame([run | {"step": step} for step in range(1, 10)]))
    'steps 4 to 9'
    """
    last = frame.groupby(RUN)["step"].max().unique()
    if len(last) > 1:
        return f"the last two thirds of each run ({min(last)} to {max(last)} steps)"
    return f"steps {tail_start(last[0], TAIL)} to {last[0]}"


def main_microbatches(frame: pd.DataFrame) -> int:
    """The number of microbatches that was run with the most numbers of ranks, the smallest of these."""
    counts = frame.groupby("microbatches")["ranks"].nunique()
    return int(counts.index[counts == counts.max()].min())


def at_ranks(frame: pd.DataFrame, ranks: int) -> pd.DataFrame:
    """The rows of one partition: so many ranks, and the main number of microbatches."""
    return frame[(frame["ranks"] == ranks) & (frame["microbatches"] == main_microbatches(frame))]


def by_seed(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a run: means over the layers and the steps of its window; bytes and seconds as well."""
    kept = window(frame)
    runs = kept.groupby(RUN, sort=False)
    found = runs[[*ERRORS, "bytes", "rounds", "candidate_share"]].mean()
    # saturated or tied scores may have no noise at all
    found["noise_ratio"] = found["error_mean"] / found["noise"].where(found["noise"] > 0)
    found["memory"] = runs["memory"].max()
    found["fallback_steps"] = (
        kept["fallback_share"]
        .gt(0)
        .where(kept["fallback_share"].notna())
        .groupby([kept[key] for key in RUN], sort=False)
        .mean()
    )
    # the steps before the window count too: one bit that differs is one too many
    found["spread"] = frame.groupby(RUN, sort=False)["spread"].max()
    return found.reset_index()


def make_table(frame: pd.DataFrame) -> pd.DataFrame:
    """One row an estimator, stream and partition: mean over the seeds and, under ``<key>_std``, sample deviation.

    Spread and memory are the largest of the seeds, seconds the median and quartiles of all steps and seeds.
    """
    runs = by_seed(frame).groupby(ROW, sort=False)
    times = with_ratio(frame).groupby(ROW, sort=False)
    low, median, high = (times["seconds"].quantile(q) for q in (0.25, 0.5, 0.75))
    means, deviations = runs[MEANS].mean(), runs[MEANS].std()
    columns = {"seeds": runs.size()}
    for key in MEANS:
        columns |= {key: means[key], f"{key}_std": deviations[key]}
    columns |= {key: runs[key].max() for key in ("spread", "memory")}
    columns |= {"seconds": median, "seconds_low": low, "seconds_high": high, "seconds_mean": times["seconds"].mean()}
    columns |= {"time_ratio": times["time_ratio"].median()}
    return pd.DataFrame(columns).reset_index()


def with_ratio(frame: pd.DataFrame) -> pd.DataFrame:
    """The seconds of each step, a layer, and their ratio to those of the reference in the same step.

    The ratio is NaN where the reference did not run.
    """
    keys = ["stream", *PARTITION, "seed", "step"]
    seconds = window(frame).groupby([*keys, "estimator"], sort=False)["seconds"].mean().reset_index()
    reference = seconds[seconds["estimator"] == REFERENCE].set_index(keys)["seconds"].rename("reference")
    joined = seconds.join(reference, on=keys)
    return joined.assign(time_ratio=joined["seconds"] / joined["reference"])


def number(value: float, digits: int = 3) -> str:
    """So many significant digits; all before the point where there are more.

    >>> [number(value) for value in (0, 0.0123456, 1.5e-7, 2, 12345.6, float("nan"))]
    ['0', '0.0123', '1.5e-07', '2', '12,346', '-']
    """
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def plus_minus(mean: float, std: float) -> str:
    """Mean and sample deviation, rounded alike: to two digits of the deviation, or four of the mean where it is small.

    >>> plus_minus(0.01234, 0.00056), plus_minus(1.5, 1e-6), plus_minus(1.5, float("nan")), plus_minus(0.0, 0.0)
    ('0.01234 ± 0.00056', '1.5000 ± 0.0000', '1.5', '0 ± 0')
    """
    if math.isnan(std) or math.isnan(mean):
        return number(mean)
    finest = max(std, abs(mean) / 1000)
    digits = 1 - math.floor(math.log10(finest)) if finest else 0
    return spread(mean, std, max(0, digits)) if digits < 8 else f"{mean:.3g} ± {std:.2g}"


def share(value: float) -> str:
    """A share in per cent.

    >>> [share(value) for value in (0.0, 0.0423, 0.5, 1.0, float("nan"))]
    ['0 %', '4.2 %', '50 %', '100 %', '-']
    """
    if math.isnan(value):
        return "-"
    percent = 100 * value
    return f"{percent:.2g} %" if percent < 10 else f"{percent:.0f} %"


def cells(record: pd.Series) -> list[str]:
    """One row of the table as text, in the order of ``COLUMNS``."""
    few = " *" if record["seeds"] < MIN_SEEDS else ""
    milliseconds = [number(1000 * record[key]) for key in ("seconds", "seconds_low", "seconds_high")]
    return [
        f"{record['estimator']}{few}",
        record["stream"],
        *(str(record[key]) for key in PARTITION),
        *(
            plus_minus(record[key], record[f"{key}_std"])
            for key in ("error_mean", "error_max", "noise_ratio", "maxvio_next", "maxvio_same")
        ),
        number(record["spread"]),
        *(number(record[key]) for key in ("bytes", "rounds", "memory")),
        f"{milliseconds[0]} [{milliseconds[1]}, {milliseconds[2]}]",
        number(record["time_ratio"]),
        *(share(record[key]) for key in ("fallback_steps", "candidate_share")),
    ]


def range_words(values: pd.Series, words: Callable[[float], str] = number) -> str:
    """Lowest to highest of what is not NaN, one number where they are the same in print.

    >>> range_words(pd.Series([0.5, 0.25])), range_words(pd.Series([2.0, 2.0])), range_words(pd.Series([math.nan]))
    ('0.25 to 0.5', '2', '-')
    """
    low, high = words(values.min()), words(values.max())
    return low if low == high else f"{low} to {high}"


def summary(table: pd.DataFrame) -> list[list[str]]:
    """One row an estimator, the range of its figures over the streams, in the order of ``SUMMARY``."""
    rows, two_digits = [], partial(number, digits=2)
    for name, own in table.groupby("estimator", sort=False):
        few = " *" if own["seeds"].min() < MIN_SEEDS else ""
        figures = [
            range_words(1000 * own[key] if key == "seconds" else own[key], share if key in PER_CENT else two_digits)
            for key in SUMMARY[1:]
        ]
        rows.append([f"{name}{few}", *figures])
    return rows


def matrix(table: pd.DataFrame, key: str) -> pd.DataFrame:
    """One column of the table of one partition as ``[estimators, streams]``, both in the order of the table."""
    wide = table.pivot(index="estimator", columns="stream", values=key)
    return wide.reindex(index=names(table, "estimator"), columns=names(table, "stream"))


def averaged(frame: pd.DataFrame) -> list[str]:
    """The estimators whose bias depends on how the tokens are spread over ranks and microbatches."""
    largest = frame.groupby("estimator", sort=False)["spread"].max()
    return [str(name) for name in largest.index[largest > 0]]


def num_partitions(frame: pd.DataFrame) -> int:
    """How many partitions of the same tokens there are."""
    return len(frame[PARTITION].drop_duplicates())


def listed(values: Sequence[str]) -> str:
    """Names in a sentence.

    >>> listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"]), listed([])
    ('a', 'a and b', 'a, b and c', 'none')
    """
    if len(values) < 2:
        return values[0] if values else "none"
    return f"{', '.join(values[:-1])} and {values[-1]}"


def geometric(values: pd.Series) -> float:
    """Geometric mean of ratios, 0 if one of them is.

    >>> geometric(pd.Series([0.5, 2.0])), geometric(pd.Series([0.0, 2.0]))
    (1.0, 0.0)
    """
    with np.errstate(divide="ignore"):
        return float(np.exp(np.log(values).mean()))
