"""The report of a replay: ``table.csv``, ``table.md``, the figures and a page, one file that needs no network."""

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..report.base import asset, embedded, sort_value, template
from ..report.plots import Picture
from ..report.tables import markdown, wrapped
from ..runs import load_config, read_json
from .answers import QUESTIONS, Facts, candidate_rows, steps_to_settle
from .figures import draw_all
from .table import (
    COLUMNS,
    MIN_SEEDS,
    PARTITION,
    SUMMARY,
    at_ranks,
    cells,
    heading,
    make_table,
    matrix,
    names,
    number,
    read_steps,
    summary,
    window_words,
)

# options of a synthetic stream by which ranks or microbatches differ
SKEWS = ("rank_skew", "microbatch_skew", "domain_share")
# columns of the summary that a terminal has no room for
WIDE = ("time_ratio", "candidate_share")
RANGE_WORDS = "A range is over the streams."
# a cell: its text and what it is sorted by
Cell = tuple[str, float | None]


def write_report(folder: Path) -> Path:
    """Write ``<folder>/report`` from ``config.yaml``, ``environment.json`` and ``steps.parquet``; returns the page.

    Every file is made beside its place and moved in at the end, so that a failure leaves the old report whole.

    Raises:
        ValueError: if one of the first or the last is missing, or one is not what a replay leaves.
    """
    frame, config = read_steps(folder), load_config(folder)
    facts, environment = facts_of(config), read_json(folder / "environment.json")
    report = folder / "report"
    report.mkdir(parents=True, exist_ok=True)
    table = make_table(frame)
    answers = [question.answer(frame, facts) for question in QUESTIONS]
    with tempfile.TemporaryDirectory(prefix=".new-", dir=report) as name:
        new = Path(name)
        pictures = draw_all(frame, facts, new)
        table.to_csv(new / "table.csv", index=False)
        (new / "table.md").write_text(_markdown(frame, table, config, answers), encoding="utf-8")
        page = _render(frame, table, facts, config, environment, answers, pictures)
        (new / "index.html").write_text(page, encoding="utf-8")
        for file in sorted(new.iterdir()):
            os.replace(file, report / file.name)
    return report / "index.html"


def print_summary(folder: Path, console: Console) -> None:
    """Print one row an estimator at the largest number of ranks, and the answers.

    Raises:
        ValueError: as ``write_report``.
    """
    frame, config = read_steps(folder), load_config(folder)
    facts = facts_of(config)
    grid = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
    grid.title = f"{_table_words(frame)}. {RANGE_WORDS}"
    shown = [place for place, key in enumerate(SUMMARY) if key not in WIDE]
    grid.add_column(heading(SUMMARY[0]), no_wrap=True)
    for place in shown[1:]:
        grid.add_column(heading(SUMMARY[place]), justify="right")
    for line in summary(_main_rows(frame, make_table(frame))):
        grid.add_row(Text(wrapped(line[0], 16)), *(Text(line[place]) for place in shown[1:]))
    console.print(grid)
    for text in warnings(frame, config):
        console.print(f"warning: {text}", style="yellow", markup=False, highlight=False)
    for question in QUESTIONS:
        console.print(question.text, style="bold", markup=False, highlight=False)
        console.print(question.answer(frame, facts), markup=False, highlight=False)


def facts_of(config: dict[str, Any]) -> Facts:
    """What the answers take from the config."""
    streams = {name: options or {} for name, options in (config.get("streams") or {}).items()}
    # a captured stream has the experts of its run
    captured = any("folder" in options for options in streams.values())
    return Facts(
        frozen=config.get("mode") == "frozen",
        num_experts=None if captured else config.get("num_experts"),
        skewed=[name for name, options in streams.items() if any(options.get(key) for key in SKEWS)],
    )


def warnings(frame: pd.DataFrame, config: dict[str, Any]) -> list[str]:
    """What a reader must know: few seeds, and runs that are missing."""
    found = []
    seeds = frame.groupby("stream", sort=False)["seed"].nunique()
    if few := [f"{name} ({count})" for name, count in seeds.items() if count < MIN_SEEDS]:
        found.append(f"fewer than {MIN_SEEDS} seeds, which say little of the spread over seeds: {', '.join(few)}")
    parts = frame[["stream", "seed", *PARTITION]].drop_duplicates()
    runs = frame[["estimator", "stream", "seed", *PARTITION]].drop_duplicates()["estimator"].value_counts()
    for name in dict.fromkeys([*names(frame, "estimator"), *(config.get("estimators") or {})]):
        if runs.get(name, 0) < len(parts):
            found.append(f"{name}: {runs.get(name, 0)} of {len(parts)} runs are there")
    found += [f"stream {name} missing" for name in config.get("streams") or {} if name not in set(frame["stream"])]
    return found


def _main_rows(frame: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the largest number of ranks, which are what is shown first."""
    return at_ranks(table, frame["ranks"].max())


def _table_words(frame: pd.DataFrame) -> str:
    main = _main_rows(frame, frame)
    microbatches = main["microbatches"].iloc[0]
    return (
        f"{main['ranks'].iloc[0]} virtual ranks with {microbatches} microbatch{'es' if microbatches > 1 else ''} each; "
        f"means over {window_words(frame)} and the layers, ± sample standard deviation over "
        f"{frame.groupby('stream')['seed'].nunique().max()} seeds"
    )


def _cells_of(record: pd.Series) -> list[Cell]:
    """The cells of one row, each with the raw number of its column."""
    values = [record[column.key] for column in COLUMNS]
    return [
        (text, None if isinstance(value, str) or pd.isna(value) else float(value))
        for text, value in zip(cells(record), values, strict=True)
    ]


def _rows_of(table: pd.DataFrame) -> list[list[Cell]]:
    """The rows, with the place of its stream to sort a stream by."""
    places = {name: float(place) for place, name in enumerate(names(table, "stream"))}
    rows = [_cells_of(record) for _, record in table.iterrows()]
    return [[row[0], (row[1][0], places[row[1][0]]), *row[2:]] for row in rows]


def _without_partition(line: Sequence[Any]) -> list[Any]:
    """The cells of a row, or the headings, but for those of the partition."""
    return [cell for cell, column in zip(line, COLUMNS, strict=True) if column.key not in PARTITION]


def _summary_rows(frame: pd.DataFrame, table: pd.DataFrame) -> list[list[Cell]]:
    """A range is sorted by its lower end."""
    return [[(cell, sort_value(cell)) for cell in line] for line in summary(_main_rows(frame, table))]


def _grid(wide: pd.DataFrame, absent: str = "-") -> dict[str, Any]:
    """A matrix of estimators and streams as a small table."""
    rows = [
        [(str(name), None), *((absent, None) if pd.isna(value) else (number(value), float(value)) for value in line)]
        for name, line in zip(wide.index, wide.to_numpy(), strict=True)
    ]
    return {"header": ["estimator", *wide.columns], "rows": rows}


def _details(frame: pd.DataFrame, table: pd.DataFrame, facts: Facts) -> dict[str, dict[str, Any]]:
    """The small tables that stand below some answers, by the key of the question."""
    found: dict[str, dict[str, Any]] = {
        "precision": _grid(matrix(_main_rows(frame, table), "noise_ratio"))
        | {"caption": "Mean error / sampling noise; bold: below 1", "below": 1.0}
    }
    candidates = candidate_rows(frame)
    if not candidates.empty:
        rows = [
            [(text, None if isinstance(value, str) else value) for text, value in zip(*record, strict=True)]
            for record in zip(candidates.map(_words).to_numpy().tolist(), candidates.to_numpy().tolist(), strict=True)
        ]
        caption = "Shares of the layers and steps, of the experts and of the pairs, over all seeds and partitions"
        found["fallback"] = {"header": list(candidates.columns), "rows": rows, "caption": caption}
    if facts.frozen:
        found["steps"] = _grid(steps_to_settle(frame), "moves") | {
            "caption": "Step from which on the bias stands still, of the slowest seed and layer"
        }
    return found


def _words(value: Any) -> str:
    return value if isinstance(value, str) else number(value)


def _render(
    frame: pd.DataFrame,
    table: pd.DataFrame,
    facts: Facts,
    config: dict[str, Any],
    environment: dict[str, Any],
    answers: Sequence[str],
    pictures: Sequence[Picture],
) -> str:
    by_name = {picture.path.stem: (picture, embedded(picture.path)) for picture in pictures}
    details = _details(frame, table, facts)
    questions = [
        {
            "key": question.key,
            "text": question.text,
            "answer": answer,
            "pictures": [by_name[name] for name in question.pictures if name in by_name],
            "details": details.get(question.key),
        }
        for question, answer in zip(QUESTIONS, answers, strict=True)
    ]
    return template(Path(__file__).with_name("page.html.j2")).render(
        title=config.get("name", "replay"),
        style=asset("page.css"),
        script=asset("table.js"),
        facts=facts,
        words=_table_words(frame),
        window=window_words(frame),
        questions=questions,
        summary={"header": [heading(key) for key in SUMMARY], "rows": _summary_rows(frame, table)},
        range_words=RANGE_WORDS,
        columns=COLUMNS,
        main={
            "header": _without_partition([column.heading for column in COLUMNS]),
            "rows": [_without_partition(row) for row in _rows_of(_main_rows(frame, table))],
        },
        all_rows=_rows_of(table),
        warnings=warnings(frame, config),
        config=yaml.safe_dump(config, sort_keys=False),
        environment=json.dumps(environment, indent=2, ensure_ascii=False),
    )


def _markdown(frame: pd.DataFrame, table: pd.DataFrame, config: dict[str, Any], answers: Sequence[str]) -> str:
    body = [cells(record) for _, record in _main_rows(frame, table).iterrows()]
    parts = [_table_words(frame) + ":", markdown([column.heading for column in COLUMNS], body)]
    parts += ["\n".join(f"- {column.heading}: {column.meaning}" for column in COLUMNS)]
    parts += [f"- Warning: {text}" for text in warnings(frame, config)]
    parts += [f"**{question.text}** {answer}" for question, answer in zip(QUESTIONS, answers, strict=True)]
    return "\n\n".join(parts) + "\n"
