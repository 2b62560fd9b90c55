"""What a replay says, a sentence a question; computed from its rows, and where they do not tell, what is missing.

Ranges are over the streams. Pooled estimators are those whose bias never depended on the partition, the others average
over ranks: which is which is read off the spread.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import pandas as pd

from .table import (
    REFERENCE,
    at_ranks,
    averaged,
    geometric,
    listed,
    main_microbatches,
    make_table,
    matrix,
    names,
    num_partitions,
    number,
    range_words,
    share,
    window,
)

RANKS = (1, 2, 8, 64)
UNKNOWN = "Cannot be told"
HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Question:
    """A question, the figures that show its answer and the answer itself, from the rows and the facts."""

    key: str
    text: str
    pictures: tuple[str, ...]
    answer: Callable[[pd.DataFrame, "Facts"], str]


@dataclass(frozen=True)
class Facts:
    """What the config tells of the rows.

    Args:
        frozen: one batch, again and again, instead of a stream.
        num_experts: ``E`` of each stream by name; a stream may lack it.
        skewed: the streams whose ranks or microbatches differ.
    """

    frozen: bool = False
    num_experts: int | None = None
    skewed: Collection[str] = ()


def rank_averaging(frame: pd.DataFrame, facts: Facts) -> str:
    """How far the first estimator that averages over ranks is off, without skew and with the worst."""
    if num_partitions(frame) < 2:
        return f"{UNKNOWN}: one partition of the tokens was run; expected several numbers of ranks."
    found = averaged(frame)
    if not found:
        return "No estimator depends on how the tokens are spread over ranks and microbatches."
    table = make_table(frame)
    table = table[table["microbatches"] == main_microbatches(frame)]
    ranks = sorted(int(value) for value in table["ranks"].unique())
    streams = names(frame, "stream")
    groups = {
        "without skew": [name for name in streams if name not in facts.skewed],
        "with skew": [name for name in streams if name in facts.skewed],
    }
    parts = [_off_by(table, found[0], word, group) for word, group in groups.items()]
    absent = [str(value) for value in RANKS if value not in ranks]
    missing = f" Ranks {listed(absent)} missing." if absent else ""
    at = listed([str(value) for value in ranks])
    return f"At {at} virtual ranks the mean error of {found[0]} is {'; '.join(parts)}.{missing}"


def _off_by(table: pd.DataFrame, estimator: str, word: str, streams: Sequence[str]) -> str:
    """The errors at each number of ranks, on the stream where the last is largest, and those of the reference there."""
    own = table[(table["estimator"] == estimator) & table["stream"].isin(streams)]
    if own.empty:
        return f"{UNKNOWN.lower()} {word}: no such stream was run"
    most = own[own["ranks"] == own["ranks"].max()]
    stream = most.loc[most["error_mean"].idxmax(), "stream"]
    line = own[own["stream"] == stream].sort_values("ranks")
    reference = table[(table["estimator"] == REFERENCE) & (table["stream"] == stream)].sort_values("ranks")
    worst = f", the worst of {len(streams)}" if len(streams) > 1 else ""
    pooled = {
        key: f" ({REFERENCE}: {range_words(reference[key])})" if len(reference) else ""
        for key in ("error_mean", "maxvio_next")
    }
    return (
        f"{listed([number(value) for value in line['error_mean']])}{pooled['error_mean']} {word} on {stream}{worst}, "
        f"{_from_to(line['noise_ratio'])} times the sampling noise, with a MaxVio of the next batch of "
        f"{_from_to(line['maxvio_next'])}{pooled['maxvio_next']}"
    )


def _from_to(values: pd.Series) -> str:
    """The first and the last of a series, one number where they are the same in print."""
    first, last = number(values.iloc[0]), number(values.iloc[-1])
    return first if first == last else f"{first} to {last}"


def equal_bytes(frame: pd.DataFrame, facts: Facts) -> str:
    """The histogram whose bytes are nearest to those of the exact reference, against it."""
    table = make_table(at_ranks(frame, frame["ranks"].max()))
    sent = table.groupby("estimator", sort=False)["bytes"].mean()
    histograms = sent[[name for name in sent.index if HISTOGRAM in name]]
    if histograms.empty or REFERENCE not in sent:
        return f"{UNKNOWN}: {REFERENCE if REFERENCE not in sent else 'a histogram'} missing."
    nearest = (histograms / sent[REFERENCE]).map(lambda ratio: abs(math.log(ratio))).idxmin()
    errors = matrix(table, "error_mean").loc[[nearest, REFERENCE]]
    ratios = errors.loc[nearest] / errors.loc[REFERENCE]
    to_noise = matrix(table, "noise_ratio").T
    return (
        f"With {_bytes(sent[REFERENCE], facts)}, {REFERENCE} has a mean error of "
        f"{range_words(to_noise[REFERENCE])} times the sampling noise; {nearest}, nearest to it with "
        f"{_bytes(sent[nearest], facts)}, {range_words(to_noise[nearest])} times: "
        f"{range_words(ratios)} times the error of {REFERENCE}{_over(ratios)}."
    )


def _bytes(value: float, facts: Facts) -> str:
    if facts.num_experts:
        return f"{number(value / facts.num_experts)} bytes an expert and step"
    return f"{number(value)} bytes a layer and step"


def _over(values: pd.Series) -> str:
    return f" over the {len(values)} streams" if len(values) > 1 else f" on {values.index[0]}"


def precision(frame: pd.DataFrame, facts: Facts) -> str:
    """Which mean errors are below the sampling noise of the batch, on the largest number of ranks."""
    ranks = frame["ranks"].max()
    ratios = matrix(make_table(at_ranks(frame, ranks)), "noise_ratio")
    if ratios.isna().all(axis=None):
        return f"{UNKNOWN}: the sampling noise is missing; it takes at least two tokens a step."
    below = ratios.lt(1).where(ratios.notna()).mean(axis=1)
    groups = {
        f"on all {ratios.shape[1]} streams": below.index[below == 1],
        "on some": below.index[(below > 0) & (below < 1)],
        "on none": below.index[below == 0],
    }
    parts = [
        f"{word} for {listed([f'{name} ({range_words(ratios.loc[name])})' for name in group])}"
        for word, group in groups.items()
        if len(group)
    ]
    return f"At {_ranks(ranks)} the mean error is below the sampling noise {'; '.join(parts)} (in brackets: times it)."


def _ranks(number_of_ranks: int) -> str:
    return f"{number_of_ranks} {'rank' if number_of_ranks == 1 else 'ranks'}"


def candidate_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a candidate form and stream: how often it fell back, and what it takes over what the reference takes.

    Shares are over all steps, layers, seeds and partitions; the ratios are of the smallest number of ranks and NaN
    where the reference did not run.
    """
    own = frame[frame["candidate_share"].notna()]
    table = make_table(at_ranks(frame, frame["ranks"].min()))
    records = []
    for (name, stream), part in own.groupby(["estimator", "stream"], sort=False):
        later = part[part["step"] > 1]
        mine, reference = (_costs_of(table, str(estimator), str(stream)) for estimator in (name, REFERENCE))
        records.append(
            {
                "estimator": name,
                "stream": stream,
                "fallback, all steps": part["fallback_share"].gt(0).mean(),
                "after step 1": later["fallback_share"].gt(0).mean() if len(later) else math.nan,
                "experts, all steps": part["fallback_share"].mean(),
                "experts, after step 1": later["fallback_share"].mean(),
                "pairs kept": mine["candidate_share"],
                f"bytes / {REFERENCE}": mine["bytes"] / reference["bytes"],
                f"memory / {REFERENCE}": mine["memory"] / reference["memory"],
                # with the steps that fall back, each of which routes twice
                f"time / {REFERENCE}": mine["seconds_mean"] / reference["seconds_mean"],
            }
        )
    return pd.DataFrame(records)


def _costs_of(table: pd.DataFrame, estimator: str, stream: str) -> pd.Series:
    """What one estimator takes on one stream, NaN where it did not run."""
    columns = ["candidate_share", "bytes", "memory", "seconds_mean"]
    return table.loc[(table["estimator"] == estimator) & (table["stream"] == stream), columns].mean()


def fallback(frame: pd.DataFrame, facts: Facts) -> str:
    """How often each candidate form had to fall back, and what it takes over what the reference takes."""
    rows = candidate_rows(frame)
    if rows.empty:
        return f"{UNKNOWN}: an estimator with candidates missing."
    parts = []
    for name, own in rows.groupby("estimator", sort=False):
        mean = own.mean(numeric_only=True)
        most = own.sort_values("after step 1", na_position="first").iloc[-1]
        worst = f", at most {share(most['after step 1'])} on {most['stream']}" if most["after step 1"] > 0 else ""
        ratios = [number(geometric(own[f"{key} / {REFERENCE}"])) for key in ("bytes", "memory", "time")]
        parts.append(
            f"{name} falls back in {share(mean['fallback, all steps'])} of the layers and steps and after step 1 in "
            f"{share(mean['after step 1'])} ({share(mean['experts, after step 1'])} of the experts{worst}), keeps "
            f"{share(mean['pairs kept'])} of the pairs and takes {ratios[0]} times the bytes, {ratios[1]} times the "
            f"memory and {ratios[2]} times the time of {REFERENCE}"
        )
    return f"{'; '.join(parts)}."


def costs(frame: pd.DataFrame, facts: Facts) -> str:
    """The cheapest and the dearest in bytes, memory and time."""
    ranks = frame["ranks"].min()
    table = make_table(at_ranks(frame, ranks))
    units = {"bytes": ("bytes", 1), "memory": ("bytes of statistics", 1), "seconds": ("ms", 1000)}
    parts = []
    for key, (word, factor) in units.items():
        values = factor * matrix(table, key).mean(axis=1)
        low, high = str(values.idxmin()), str(values.idxmax())
        reference = f" ({number(values[REFERENCE])} for {REFERENCE})" if REFERENCE in values else ""
        parts.append(f"{number(values[low])} ({low}) to {number(values[high])} ({high}) {word}{reference}")
    rounds = range_words(table["rounds"])
    return f"On {_ranks(ranks)} a layer and step takes, mean over the streams, {listed(parts)}, in {rounds} rounds."


def spread(frame: pd.DataFrame, facts: Facts) -> str:
    """Which estimators give the same bits on every partition."""
    if num_partitions(frame) < 2:
        return f"{UNKNOWN}: one partition of the tokens was run; expected several."
    largest = frame.groupby("estimator", sort=False)["spread"].max()
    zero = [str(name) for name in largest.index[largest == 0]]
    others = [f"{name} ({number(value)})" for name, value in largest.items() if value > 0]
    return (
        f"Over {num_partitions(frame)} partitions of the same tokens the new bias has the same bits in every step for "
        f"{listed(zero)}; it differs by up to the value in brackets for {listed(others)}."
    )


def steps_to_settle(frame: pd.DataFrame) -> pd.DataFrame:
    """``[estimators, streams]``: the step from which on no bias moves, of the slowest seed and layer; NaN: it moves.

    Taken at the largest number of ranks.
    """
    own = at_ranks(frame, frame["ranks"].max())
    moving = own[own["moved"] != 0]
    keys = ["estimator", "stream"]
    last_moved = moving.groupby(keys)["step"].max().reindex(pd.MultiIndex.from_frame(own[keys].drop_duplicates()))
    settled = last_moved.fillna(0) + 1
    last = own.groupby(keys)["step"].max()
    wide = settled.where(settled <= last.reindex(settled.index)).unstack("stream")
    return wide.reindex(index=names(own, "estimator"), columns=names(own, "stream"))


def over_steps(frame: pd.DataFrame, facts: Facts) -> str:
    """Frozen: after how many steps the bias stands still. Online: MaxVio after one step and in the window."""
    if facts.frozen:
        return _settling(frame)
    own = at_ranks(frame, frame["ranks"].max())
    first = own[own["step"] == own["step"].min()].groupby("estimator")["maxvio_before"].mean()
    late = window(own).groupby("estimator", sort=False)["maxvio_next"].mean()
    values = [f"{name} {number(late[name])}" for name in late.index]
    return (
        f"From a MaxVio of {range_words(first)} under the zero bias, the mean over the streams and the window comes to "
        f"{listed(values)} on the next batch, at {_ranks(own['ranks'].iloc[0])}."
    )


def _settling(frame: pd.DataFrame) -> str:
    steps = steps_to_settle(frame)
    parts = []
    for name in steps.index:
        cycles = int(steps.loc[name].isna().sum())
        found = [f"in step {range_words(steps.loc[name])}"] if cycles < steps.shape[1] else []
        found += [f"cycles or still moves on {cycles} of {steps.shape[1]} streams"] if cycles else []
        parts.append(f"{name} {', '.join(found)}")
    return f"The bias stands still, in every layer and for every seed: {'; '.join(parts)}."


QUESTIONS = (
    Question("ranks", "How far is rank averaging off?", ("rank_averaging",), rank_averaging),
    Question("equal_bytes", "Histogram against exact at equal bytes", ("error_by_bytes",), equal_bytes),
    Question("precision", "Which error is below the sampling noise?", ("error_to_noise",), precision),
    Question("fallback", "How often do candidates fall back, and what do they save?", ("fallback",), fallback),
    Question("costs", "What does each estimator cost?", ("costs",), costs),
    Question("spread", "Does the result depend on the partition?", ("spread",), spread),
    Question("steps", "How do error and MaxVio go over the steps?", ("error_by_step", "maxvio_by_step"), over_steps),
)
