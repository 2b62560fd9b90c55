"""The page of the report: one HTML file that holds everything it shows and asks no network for anything."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from plotly.offline import get_plotlyjs

from ..runs import FREE, flatten, same
from . import tables
from .base import asset, embedded, sort_value, template
from .comparison import ABSENT, Row, differing
from .interactive import page_data
from .plots import Picture

if TYPE_CHECKING:
    from .command import Report

FOLDER = Path(__file__).parent
# figures that the page draws itself, so that it shows their pictures only without JavaScript
TWINS = ("summary", "curves_global", "curves_local", "loss_vs_balance", "load_heatmap", "sweep")
# of a run's config, what says nothing about its row
ASIDE = ("seed", *FREE)


def render(report: "Report", head: list[str], body: list[list[str]], figures: Sequence[Picture]) -> str:
    """The HTML page: table, plots, configs, and the pictures for readers without JavaScript."""
    complete = [row for row in report.rows if row.complete]
    run = complete[0].complete[0]
    return template(FOLDER / "page.html.j2").render(
        title=run.config.get("name", report.folder.parent.name),
        report=report,
        header=head,
        table=[[(cell, sort_value(cell)) for cell in line] for line in body],
        images=[(figure, embedded(figure.path)) for figure in figures],
        twins=TWINS,
        paper=tables,
        data=page_data(complete, report.start),
        plotly=get_plotlyjs(),
        style=asset("page.css"),
        script="\n".join((asset("table.js"), asset("page.js"))),
        options=row_options(report.rows),
        shared=yaml.safe_dump(shared([_config(row) for row in report.rows]), sort_keys=False),
        configs=_configs(report),
        environment=yaml.safe_dump(run.environment, sort_keys=False),
        runs=[run for row in report.rows for run in row.runs],
    )


def _config(row: Row) -> dict[str, Any]:
    return {key: value for key, value in row.runs[0].config.items() if key not in ASIDE}


def row_options(rows: Sequence[Row]) -> list[tuple[str, dict[str, Any]]]:
    """For each row its label and the keys of its config in which rows differ."""
    configs = [flatten(_config(row)) for row in rows]
    keys = differing(configs)
    return [
        (row.label, {key: own[key] for key in keys if key in own and key != "balancer.name"})
        for row, own in zip(rows, configs, strict=True)
    ]


def shared(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The part of nested mappings that is the same in all of them.

    >>> shared([{"a": 1, "b": {"c": 2, "d": 3}}, {"a": 0, "b": {"c": 2, "d": 4}}])
    {'b': {'c': 2}}
    """
    common: dict[str, Any] = {}
    for key, value in configs[0].items():
        values = [own.get(key, ABSENT) for own in configs]
        if all(same(other, value) for other in values):
            common[key] = value
        elif all(isinstance(other, dict) for other in values) and (inner := shared(values)):
            common[key] = inner
    return common


def _configs(report: "Report") -> list[dict[str, Any]]:
    """The resolved config of each row, and what it changes in that of its reference."""
    by_label = {row.label: row for row in report.rows}
    found = []
    for row, label in zip(report.rows, report.table["reference"], strict=True):
        # none where a block has no complete run
        reference = by_label.get(label)
        changes = [] if reference is None else difference(_config(reference), _config(row))
        text = yaml.safe_dump(_config(row), sort_keys=False)
        title = _config_title(row, reference, len(changes))
        found.append({"label": row.label, "title": title, "reference": reference, "changes": changes, "text": text})
    return found


def _config_title(row: Row, reference: Row | None, changes: int) -> str:
    if reference is None:
        return "config"
    if reference is row:
        return "config of the reference"
    return f"config, {changes} {'key differs' if changes == 1 else 'keys differ'} from {reference.label}"


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The keys in which two configs differ, with both values.

    >>> difference({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}})
    [('a.b', '1', '3'), ('a.c', '2', 'absent')]
    """
    old, new = flatten(before), flatten(after)
    return [(key, str(old.get(key, ABSENT)), str(new.get(key, ABSENT))) for key in differing([old, new])]
