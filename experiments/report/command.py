"""``equipoise-report runs/<experiment>``: the table, the figures and the page of a comparison.

Reads the run folders, refuses what cannot be compared (``comparison.py``), and writes to ``<folder>/report/``
``table.csv``, ``table.md``, ``table.tex``, ``index.html`` and the figures of ``plots.py``. Exit status: 0; 3 if the
report was written but a row lacks a seed (it says which); 2 if there is nothing to report or nothing can be compared.
"""

import argparse
import math
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from ..ledger import read_ledger
from ..runs import RunState, run_state
from . import page, plots, tables
from .comparison import (
    Row,
    environment_warnings,
    group_rows,
    refuse_incomparable,
)
from .reading import Run, load_runs
from .statistics import LEVEL, MIN_SEEDS, mean_and_std, paired_difference, tail_mean, tail_start

REFERENCE = "eqb"
DEFAULT_TAIL = 1 / 3
INCOMPLETE = 3
SPREAD_OVER_SEEDS = ("global_maxvio", "local_maxvio", "val_bpb")
# columns that only the renderers need
INTERNAL = ["is_reference", "seeds_expected", "block"]


@dataclass(frozen=True, eq=False)
class Report:
    """What was written.

    ``table`` has one row a balancer and point of the axes; ``reference`` names the balancer that differences are to;
    ``missing`` are the runs that the experiment has planned and never started; ``complete`` says that none is and that
    every row has every seed.
    """

    folder: Path
    table: pd.DataFrame
    rows: list[Row]
    reference: str
    start: int
    rule: str
    warnings: list[str]
    missing: list[str]

    @property
    def window(self) -> str:
        """The tail window in words; ``start`` is its first step."""
        return window_of(self.start, int(self.table["steps"].iloc[0]))

    @property
    def page(self) -> Path:
        return self.folder / "index.html"

    @property
    def complete(self) -> bool:
        return bool(self.table["complete"].all()) and not self.missing


def build_report(folder: Path, out: Path | None = None, **settings: Any) -> Report:
    """Read the runs of the experiment in ``folder`` and write the report to ``out`` (``folder/report``).

    ``settings`` are ``tail`` (the share of the steps that the table averages over, from the end), ``axes`` and
    ``reference``; what is not given, or None, is as in the configs of the runs (``report``).

    Raises:
        ValueError: if the folder is not an experiment's, no run is complete, or the runs cannot be compared.
    """
    given = {key: value for key, value in settings.items() if value is not None}
    runs = [_with_settings(run, given) for run in load_runs(folder)]
    refuse_incomparable(runs)
    rows = group_rows(runs)
    complete = [run for row in rows for run in row.complete]
    if not complete:
        raise ValueError(f"{folder} holds no complete run: {'; '.join(run.describe() for run in runs)}")
    tail = _setting(complete[0], "tail", DEFAULT_TAIL)
    if not isinstance(tail, int | float):
        raise ValueError(f"report.tail: expected a share of the steps, got {tail!r} in {complete[0].folder}")
    start = tail_start(complete[0].steps, tail)
    references = references_of(rows, given.get("reference"))
    ledger = read_ledger(folder)
    missing = {name: entry.label for name, entry in ledger.items() if run_state(folder / name) == RunState.NEW}
    seeds = {run.seed for run in runs} | {int(found[1]) for name in missing if (found := re.search(r"-s(\d+)-", name))}
    table = make_table(rows, references, seeds, start)
    reference = _common_name(references)
    report = Report(
        folder=out if out is not None else folder / "report",
        table=table,
        rows=rows,
        reference=reference,
        start=start,
        rule=rule_text(table, reference, window_of(start, complete[0].steps)),
        warnings=[
            *_row_warnings(table),
            *(f"{label}: planned, never started" for label in missing.values()),
            *_setting_warnings(complete, rows),
            *run_warnings(rows, start),
            *environment_warnings(runs),
        ],
        missing=list(missing.values()),
    )
    _write(report)
    return report


def window_of(start: int, steps: int) -> str:
    """The tail window in words."""
    return f"steps {start} to {steps}"


def _with_settings(run: Run, given: Mapping[str, Any]) -> Run:
    settings: dict[str, Any] = {**(run.config.get("report") or {}), **given}
    return replace(run, config=run.config | {"report": settings})


def _setting(run: Run, key: str, default: Any = None) -> Any:
    return (run.config.get("report") or {}).get(key, default)


def _setting_warnings(complete: Sequence[Run], rows: Sequence[Row]) -> list[str]:
    """Where the runs do not agree on how they are to be read, and a reference that is not there."""
    found = []
    for key in ("tail", "reference"):
        values = list(dict.fromkeys(str(_setting(run, key)) for run in complete))
        if len(values) > 1:
            found.append(f"the runs have several report.{key} ({', '.join(values)}); the first is taken")
    named = _setting(complete[0], "reference")
    if named and not _is_named(rows, named):
        found.append(f"report.reference: there is no row {named!r}; the first of a block is taken")
    return found


def _is_named(rows: Sequence[Row], name: str) -> bool:
    return any(name in (row.label, row.balancer, row.name) for row in rows)


def references_of(rows: Sequence[Row], given: str | None = None) -> dict[str, Row]:
    """For each row, by its label, the one that its differences are to; none where its block has no complete run.

    It is the row of the same block that is ``given`` or that ``report.reference`` names, ``eqb`` by default; where a
    block lacks it, its first complete one. Where no block has two rows, the rows are compared with one another.

    Raises:
        ValueError: if ``given`` names a row that no block has.
    """
    if given and not _is_named(rows, given):
        known = ", ".join(dict.fromkeys(row.balancer for row in rows))
        raise ValueError(f"reference: expected one of the rows {known}, got {given!r}")
    named = next((name for row in rows for run in row.complete if (name := _setting(run, "reference"))), None)
    alone = len({row.block for row in rows}) == len(rows)
    peers = {row.label: [r for r in rows if r.complete and (alone or r.block == row.block)] for row in rows}
    return {label: _first_named(found, named or REFERENCE) for label, found in peers.items() if found}


def _first_named(rows: Sequence[Row], name: str) -> Row:
    """The row of that label or name, the label first; the first row where there is none."""
    by_label = [row for row in rows if name in (row.label, row.balancer)]
    return next(iter([*by_label, *(row for row in rows if row.name == name), *rows]))


def _common_name(references: Mapping[str, Row]) -> str:
    """What to call the references in a heading."""
    chosen = list(references.values())
    if len({row.label for row in chosen}) == 1:
        return chosen[0].label
    return chosen[0].balancer if len({row.balancer for row in chosen}) == 1 else "the first row of the block"


def measure(run: Run, start: int) -> dict[str, float]:
    """The figures of one run over its tail window; NaN for what was not measured there."""
    keys = (*SPREAD_OVER_SEEDS, "tokens_per_s", "dead_share")
    return {key: tail_mean(run.metrics["step"], run.metrics[key], start) for key in keys}


def make_table(rows: Sequence[Row], references: Mapping[str, Row], seeds: set[int], start: int) -> pd.DataFrame:
    """One record a row: means over its complete runs, and differences to its reference, paired over ``seeds``."""
    return pd.DataFrame([_record(row, references.get(row.label), seeds, start) for row in rows])


def _record(row: Row, reference: Row | None, seeds: set[int], start: int) -> dict[str, Any]:
    measured = {run.seed: measure(run, start) for run in row.complete}
    against = {run.seed: measure(run, start) for run in reference.complete} if reference else {}
    is_reference = row is reference
    record: dict[str, Any] = {"balancer": row.label, "seeds": len(measured)}
    for key in SPREAD_OVER_SEEDS:
        record[key], record[f"{key}_std"] = mean_and_std([values[key] for values in measured.values()])
    record["tokens"] = int(row.complete[0].metrics["tokens"].iloc[-1]) if measured else pd.NA
    record["tokens_per_s"], _ = mean_and_std([values["tokens_per_s"] for values in measured.values()])
    for key in SPREAD_OVER_SEEDS:
        record |= _difference(key, {} if is_reference else measured, against)
    record["dead_share"], _ = mean_and_std([values["dead_share"] for values in measured.values()])
    record["steps"] = row.runs[0].steps
    record["complete"] = seeds == measured.keys()
    record["note"] = _note(row, seeds)
    record |= {"reference": reference.label if reference else "", **row.point}
    return record | {"is_reference": is_reference, "seeds_expected": len(seeds), "block": row.block}


def _difference(key: str, measured: Mapping[int, dict], against: Mapping[int, dict]) -> dict[str, Any]:
    own = {seed: values[key] for seed, values in measured.items()}
    found = paired_difference(own, {seed: values[key] for seed, values in against.items()})
    return {
        f"d_{key}": found.mean,
        f"d_{key}_low": found.low,
        f"d_{key}_high": found.high,
        f"d_{key}_n": found.num_pairs,
        f"d_{key}_real": found.real,
    }


def _note(row: Row, seeds: set[int]) -> str:
    """Which seeds a row lacks and why; empty if none."""
    lost = {run.seed: run.describe() for run in row.runs if not run.complete}
    lost |= {seed: f"s{seed} missing" for seed in seeds - {run.seed for run in row.runs}}
    if not lost:
        return ""
    return f"{len(row.complete)} of {len(seeds)} seeds: {', '.join(lost[seed] for seed in sorted(lost))}"


def rule_text(table: pd.DataFrame, reference: str, window: str) -> str:
    """The rule by which the table is to be read, in words."""
    intervals = int(sum((table[f"d_{key}_n"] >= MIN_SEEDS).sum() for key in SPREAD_OVER_SEEDS))
    count = (
        f"{intervals} intervals are given and not corrected for their number: where nothing differs, "
        f"about one in {round(1 / (1 - LEVEL))} excludes 0 by chance."
        if intervals
        else f"No interval is given: no row shares {MIN_SEEDS} complete seeds with {reference}."
    )
    where = " of the same block (the values in brackets)" if table["reference"].nunique() > 1 else ""
    return (
        "MaxVio = max load / mean load - 1, of the worst MoE layer: global over all tokens of a step, local over one "
        f"microbatch of one rank. MaxVio and validation bits per byte are means over {window}, then mean ± sample "
        f"standard deviation over the complete seeds. Differences are to {reference}{where}, paired over the seeds "
        f"that both rows have, with two-sided {LEVEL:.0%} t intervals [low, high]. One is called real ({tables.REAL}) "
        f"only if at least {MIN_SEEDS} seeds are paired and the interval excludes 0; fewer are marked (n=...), "
        f"in the terminal {tables.TOO_FEW}. {count}"
    )


def _row_warnings(table: pd.DataFrame) -> list[str]:
    return [f"{record['balancer']}: {record['note']}" for _, record in table.iterrows() if record["note"]]


def run_warnings(rows: Sequence[Row], start: int) -> list[str]:
    """What a reader must know of single complete runs: skipped steps, clamped margins, no validation in the window."""
    found = []
    for row in rows:
        for run in row.complete:
            who, tail = f"{row.label} s{run.seed}", run.metrics[run.metrics["step"] >= start]
            if (skipped := run.metrics["skipped"].max()) > 0:
                found.append(f"{who}: {skipped:.0f} steps skipped, their gradients were not finite")
            if (clamped := tail["clamped_share"].max()) > 0:
                found.append(f"{who}: up to {clamped:.2g} of the margins were clamped in the tail window")
            if math.isnan(tail["val_bpb"].mean()):
                found.append(f"{who}: no validation in the tail window, so no val BPB; widen --tail")
    return found


def _write(report: Report) -> None:
    """Make every file beside its place and move them in at the end, so that a failure leaves the old report whole."""
    report.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=report.folder) as name:
        new = Path(name)
        figures = plots.draw_all(report.rows, new, report.start)
        report.table.drop(columns=INTERNAL).to_csv(new / "table.csv", index=False)
        head, body = tables.header(report.reference), tables.cells(report.table)
        (new / "table.md").write_text(_markdown(report, head, body), encoding="utf-8")
        caption = " ".join([report.rule, *(f"Warning: {text}." for text in report.warnings)])
        short = tables.cells(report.table, notes=False)
        (new / "table.tex").write_text(tables.latex(head, short, caption) + "\n", encoding="utf-8")
        (new / "index.html").write_text(page.render(report, head, body, figures), encoding="utf-8")
        for file in sorted(new.iterdir()):
            os.replace(file, report.folder / file.name)


def _markdown(report: Report, head: list[str], body: list[list[str]]) -> str:
    parts = [tables.markdown(head, body), report.rule, *(f"- Warning: {text}" for text in report.warnings)]
    paper = tables.markdown(tables.PAPER_HEADER, tables.PAPER_ROWS)
    return "\n\n".join([*parts, f"**{tables.PAPER_TITLE}.** {tables.PAPER_NOTE}", paper]) + "\n"


def print_table(report: Report, console: Console) -> None:
    """Show the table, its rule, the warnings and where the page is."""
    console.print(tables.terminal(report.table, report.reference, speed=console.width >= 100))
    console.print(report.rule, style="dim", markup=False, highlight=False)
    for text in report.warnings:
        console.print(f"warning: {text}", style="yellow", markup=False, highlight=False)
    console.print(f"report: {report.page}", markup=False, highlight=False, soft_wrap=True)


def main(argv: list[str] | None = None) -> int:
    """The command ``equipoise-report``; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="equipoise-report",
        description="The table and figures of an experiment.",
        epilog="Exit status: 0; 2 if there is nothing to report or nothing can be compared; 3 if a seed is missing.",
    )
    parser.add_argument("folder", type=Path, help="folder of the experiment, e.g. runs/paper_table")
    parser.add_argument("--out", type=Path, help="where to write (default: FOLDER/report)")
    parser.add_argument("--tail", type=float, help="share of the steps to average over, from the end (default: config)")
    parser.add_argument(
        "--axes", help="keys that rows may differ in, e.g. model.width,model.num_experts; a block a point"
    )
    parser.add_argument("--reference", help="label of the row that differences are to (default: config, or eqb)")
    arguments = parser.parse_args(argv)
    axes = None if arguments.axes is None else [axis for axis in arguments.axes.split(",") if axis]
    try:
        report = build_report(
            arguments.folder, arguments.out, tail=arguments.tail, axes=axes, reference=arguments.reference
        )
    except (ValueError, OSError) as error:
        print(f"equipoise-report: {error}", file=sys.stderr)
        return 2
    # without a terminal rich takes 80 columns, too few for the table
    print_table(report, Console(width=None if sys.stdout.isatty() else 100))
    return 0 if report.complete else INCOMPLETE


if __name__ == "__main__":
    raise SystemExit(main())
