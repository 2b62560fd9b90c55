"""Which number a comparison sweeps: the one option in which rows of the same balancer differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..runs import flatten
from .comparison import Row, differing


@dataclass(frozen=True, eq=False)
class Sweep:
    """``lines`` are the rows of each swept balancer by its name, with the option's value, in its order.

    ``others`` are the rows that do not have the option.
    """

    key: str
    lines: dict[str, list[tuple[float, Row]]]
    others: list[Row]

    @property
    def logarithmic(self) -> bool:
        """Whether the values can be shown on a logarithmic axis."""
        return all(value > 0 for line in self.lines.values() for value, _ in line)


def find_sweep(rows: Sequence[Row]) -> Sweep | None:
    """The swept option; None if the rows of a name differ in more than one, in one that is no number, or in none."""
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(row.name, []).append(row)
    swept = {name: family for name, family in families.items() if len(family) > 1}
    keys = {_swept_key(family) for family in swept.values()}
    key = keys.pop() if len(keys) == 1 else None
    if key is None:
        return None
    lines = {
        name: sorted(((float(_options(row)[key]), row) for row in family), key=lambda point: point[0])
        for name, family in swept.items()
    }
    return Sweep(key, lines, [row for row in rows if row.name not in swept])


def _swept_key(family: Sequence[Row]) -> str | None:
    options = [_options(row) for row in family]
    keys = differing(options)
    if len(keys) != 1:
        return None
    values = [own.get(keys[0]) for own in options]
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return keys[0] if numbers else None


def _options(row: Row) -> dict[str, Any]:
    """What sets a row apart from others of its name."""
    return flatten(row.runs[0].config["balancer"]) | row.point
