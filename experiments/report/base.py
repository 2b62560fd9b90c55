"""What every page is made of: one template folder, one style, pictures inside the file, cells that sort by number."""

import base64
import re
from functools import cache
from pathlib import Path

import jinja2

FOLDER = Path(__file__).parent


@cache
def template(path: Path) -> jinja2.Template:
    """The template at ``path``; it may extend and import those beside it and those of this folder."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([path.parent, FOLDER]), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment.get_template(path.name)


def asset(name: str) -> str:
    """The text of a style sheet or script of this folder."""
    return (FOLDER / name).read_text(encoding="utf-8")


def embedded(picture: Path) -> str:
    """A picture as text, to stand in a page itself."""
    return base64.b64encode(picture.read_bytes()).decode("ascii")


def sort_value(cell: str) -> float | None:
    """The number that a cell of the table begins with, None if it has none; the reference differs from itself by 0.

    >>> [sort_value(cell) for cell in ("0.840 ± 0.030", "-0.1 [-0.3, +0.1]", "12,345", "2 of 3 seeds: s1 missing")]
    [0.84, -0.1, 12345.0, 2.0]
    >>> [sort_value(cell) for cell in ("-", "eqb", "reference")]
    [None, None, 0.0]
    """
    if cell == "reference":
        return 0.0
    found = re.match(r"[+-]?\d[\d,]*(\.\d+)?", cell)
    return float(found[0].replace(",", "")) if found else None
