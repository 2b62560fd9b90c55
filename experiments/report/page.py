"""The page of the report: one HTML file that holds everything it shows."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
import yaml

from ..runs import FREE, flatten
from . import tables
from .comparison import COMPARED
from .plots import Picture

if TYPE_CHECKING:
    from .command import Report


def render(report: "Report", head: list[str], body: list[list[str]], figures: Sequence[Picture]) -> str:
    """The HTML page, with the pictures inside it."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    template = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True).get_template(
        "page.html.j2"
    )
    run = next(run for row in report.rows for run in row.complete)
    images = [(figure, base64.b64encode(figure.path.read_bytes()).decode("ascii")) for figure in figures]
    shared = {key: value for key, value in run.config.items() if key not in (*COMPARED, *FREE)}
    return template.render(
        title=run.config.get("name", report.folder.parent.name),
        report=report,
        header=head,
        cells=body,
        images=images,
        paper=tables,
        options=[(row.label, flatten(row.runs[0].config["balancer"])) for row in report.rows],
        config=yaml.safe_dump(shared, sort_keys=False),
        environment=yaml.safe_dump(run.environment, sort_keys=False),
        runs=[run for row in report.rows for run in row.runs],
    )
