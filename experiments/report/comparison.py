"""Refuse runs that cannot be compared, group the rest into rows.

Runs in one table may differ only in ``balancer``, ``seed`` and the axes that the experiment names (``report.axes``);
everything else that can change a result must be equal, and the refusal names the key and both values. A row is one
resolved ``balancer`` section at one point of the axes, its runs are the seeds; the rows of one point are a block, and
differences are taken within it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

from ..runs import FREE, flatten
from .reading import OPTIONAL, Run

# the order of the default experiment; presets that it does not know follow alphabetically
ORDER = (
    "none",
    "signed_count",
    "gshard",
    "gshard_global",
    "lei",
    "rank_averaged_qb",
    "histogram_qb",
    "eqb",
    "eqb_fp32",
    "eqb_gshard",
    "eqb_lei",
)
COMPARED = ("balancer", "seed")
ABSENT = "absent"
# two lengths of a schedule cannot be read at one fraction and one step
NEVER_AN_AXIS = "optim.steps"


@dataclass(frozen=True, eq=False)
class Row:
    """One balancer at one point of the axes: its runs, one a seed, in the order of the seeds.

    ``balancer`` is its label among the rows of its block, ``point`` the values that set the block apart by key, and
    ``label`` both of them, as the table shows it.
    """

    balancer: str
    name: str
    point: dict[str, Any]
    runs: tuple[Run, ...]

    @property
    def block(self) -> str:
        """The point in words, with the last part of each key; empty if there is one block only."""
        return ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.point.items())

    @property
    def label(self) -> str:
        return f"{self.balancer} [{self.block}]" if self.point else self.balancer

    @property
    def complete(self) -> list[Run]:
        return [run for run in self.runs if run.complete]


def axes_of(runs: Sequence[Run]) -> list[str]:
    """The axes that the experiment names beside the balancer: ``report.axes`` of its runs, together.

    Raises:
        ValueError: if they are not a list of keys of the config, or the length of the schedule is one.
    """
    axes: dict[str, None] = {}
    for run in runs:
        named = (run.config.get("report") or {}).get("axes") or []
        if not isinstance(named, list) or not all(isinstance(axis, str) for axis in named):
            raise ValueError(f"report.axes: expected a list of keys such as [model.width], got {named!r}")
        axes |= dict.fromkeys(named)
    settings = {key for run in runs for key in (*flatten(run.config), *_machine(run))}
    for axis in axes:
        if not any(_is_under(key, axis) for key in settings):
            raise ValueError(f"report.axes: no run has a key {axis!r}")
        if _is_under(NEVER_AN_AXIS, axis):
            raise ValueError(f"report.axes: {axis} would compare runs at different fractions of their schedules")
    return list(axes)


def _is_under(key: str, axis: str) -> bool:
    return key == axis or key.startswith(f"{axis}.")


def refuse_incomparable(runs: Sequence[Run]) -> None:
    """Check that the runs differ in nothing but what is compared.

    Raises:
        ValueError: naming every key (five at most) with two values and the runs that have them.
    """
    axes = axes_of(runs)
    # a run that failed before it wrote its environment or a step has nothing to disagree with
    facts = (
        {run.folder.name: _settings(run) for run in runs},
        {run.folder.name: _machine(run) for run in runs if run.environment},
        {run.folder.name: _schema(run) for run in runs if run.recorded},
    )
    free = (*axes, "world_size") if any(_is_under("parallel.ranks", axis) for axis in axes) else axes
    allowed = {
        key for fact in facts for values in fact.values() for key in values if any(_is_under(key, a) for a in free)
    }
    lines = {key: line for fact in facts for key, line in differences(fact).items() if key not in allowed}
    if not lines:
        return
    found = list(lines.values())
    why = f" {_fractions(runs)}" if NEVER_AN_AXIS in lines else ""
    raise ValueError(
        f"runs in one table may differ only in {', '.join([*COMPARED, *axes])}, but these differ in more: "
        f"{'; '.join(found[:5])}{'; ...' if len(found) > 5 else ''}.{why} Give each comparison a name= of its own, or "
        "name in report.axes what is compared"
    )


def _settings(run: Run) -> dict[str, Any]:
    return flatten({key: value for key, value in run.config.items() if key not in (*COMPARED, *FREE)})


def _machine(run: Run) -> dict[str, Any]:
    return {
        "data.sha256": (run.environment.get("data") or {}).get("sha256"),
        "world_size": run.environment.get("world_size"),
        # folders that were written before schemas were numbered
        "metric_schema": run.environment.get("metric_schema", 1),
    }


def _schema(run: Run) -> dict[str, str]:
    return {f"metrics.{key}": "recorded" if key in run.recorded else ABSENT for key in OPTIONAL}


def _fractions(runs: Sequence[Run]) -> str:
    """Why runs with schedules of two lengths cannot be read together."""
    short, long = min(run.steps for run in runs), max(run.steps for run in runs)
    return f"Step {short} is the end of one schedule and {short / long:.0%} of another."


def as_json(value: Any) -> str:
    """What a hash of the config sees of a value: two that are one to it are the same setting."""
    return json.dumps(value, sort_keys=True, default=str)


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose value is not the same everywhere, in their order; null is a value, and 1 is not 1.0.

    >>> differing([{"lr": 1, "x": 0, "y": None}, {"lr": 1.0, "x": 0}])
    ['lr', 'y']
    """
    return [key for key in dict.fromkeys(key for own in settings for key in own) if len(_values(key, settings)) > 1]


def _values(key: str, settings: Sequence[Mapping[str, Any]]) -> set[str]:
    return {as_json(own[key]) if key in own else ABSENT for own in settings}


def differences(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """For each key whose value is not the same everywhere, a line with two values and who has them.

    >>> differences({"a": {"lr": 1, "x": 0}, "b": {"lr": 2, "x": 0}})
    {'lr': 'lr: 1 in a, 2 in b'}
    """
    found = {}
    for key in sorted(differing(list(settings.values()))):
        owners: dict[str, str] = {}
        for owner, values in settings.items():
            owners.setdefault(as_json(values[key]) if key in values else ABSENT, owner)
        two = list(owners.values())[:2]
        found[key] = f"{key}: " + ", ".join(f"{settings[owner].get(key, ABSENT)} in {owner}" for owner in two)
    return found


def environment_warnings(runs: Iterable[Run]) -> list[str]:
    """What differs between the machines of the runs and may matter a little: versions of torch, commit, devices."""
    seen = {
        run.folder.name: {
            "torch": (run.environment.get("versions") or {}).get("torch"),
            "commit": run.environment.get("commit"),
            "devices": run.environment.get("devices"),
        }
        for run in runs
        if run.environment
    }
    return [f"the runs were not made alike: {line}" for line in differences(seen).values()]


def group_rows(runs: Sequence[Run]) -> list[Row]:
    """Group runs by their resolved ``balancer`` section and their point of the axes, in the order of the table.

    Raises:
        ValueError: if a row has a seed twice, two rows read alike, or ``report.axes`` names what no run has.
    """
    keys = _telling(runs, axes_of(runs))
    groups: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        place = [run.config["balancer"], _point(run, keys)]
        groups.setdefault(as_json(place), []).append(run)
    rivals = [group[0].config["balancer"] for group in groups.values()]
    rows = []
    for group in groups.values():
        balancer = group[0].config["balancer"]
        label = label_of(balancer, rivals)
        rows.append(Row(label, str(balancer["name"]), _point(group[0], keys), tuple(group)))
        _refuse_twice(group)
    _refuse_alike(rows)
    return sorted(rows, key=_position)


def _point(run: Run, keys: Iterable[str]) -> dict[str, Any]:
    facts = flatten(run.config) | _machine(run)
    return {key: facts.get(key, ABSENT) for key in keys}


def _telling(runs: Sequence[Run], axes: Sequence[str]) -> list[str]:
    """The keys under ``axes`` that set points apart; one that follows from those before it tells nothing new."""
    facts = [flatten(run.config) | _machine(run) for run in runs]
    keys: list[str] = []
    for key in (
        key for axis in axes for key in sorted({key for fact in facts for key in fact}) if _is_under(key, axis)
    ):
        before, after = (
            {as_json([fact.get(k, ABSENT) for k in wider]) for fact in facts} for wider in (keys, [*keys, key])
        )
        if len(after) > len(before):
            keys.append(key)
    return keys


def _refuse_twice(group: Sequence[Run]) -> None:
    for first, second in pairwise(group):
        if first.seed == second.seed:
            raise ValueError(
                f"seed {first.seed} of {first.config['balancer']['name']} is there twice: "
                f"{first.folder.name} and {second.folder.name}; remove one or give it a name= of its own"
            )


def _refuse_alike(rows: Sequence[Row]) -> None:
    """Everything is looked up by label and block, so a text may stand for one row and for one point only."""
    for one, other in combinations(rows, 2):
        if one.label == other.label or (one.block == other.block and as_json(one.point) != as_json(other.point)):
            names = " and ".join(row.runs[0].folder.name for row in (one, other))
            keys = differing([flatten(row.runs[0].config["balancer"]) | row.point for row in (one, other)])
            raise ValueError(
                f"{names} differ in {', '.join(keys)}, but their values read alike (as 1 and '1' do): expected rows "
                "that can be told apart; remove one or give it a name= of its own"
            )


def label_of(balancer: Mapping[str, Any], rivals: Iterable[Mapping[str, Any]]) -> str:
    """The balancer's name, with the options that set it apart where others have the same name.

    >>> one, two = {"name": "lei", "gradient": {"eta": 1e-05}}, {"name": "lei", "gradient": {"eta": 2e-05}}
    >>> label_of(one, [one]), label_of(two, [one, two])
    ('lei', 'lei (eta=2e-05)')
    """
    own = flatten(balancer)
    namesakes = [flatten(rival) for rival in rivals if rival["name"] == balancer["name"]]
    keys = sorted(differing(namesakes))
    # the last part of a key says enough, unless another one ends in it too
    lasts = [key.rpartition(".")[2] for key in keys]
    short = {key: last if lasts.count(last) == 1 else key for key, last in zip(keys, lasts, strict=True)}
    options = ", ".join(f"{short[key]}={own[key]}" for key in keys if key in own)
    return f"{balancer['name']} ({options})" if options else str(balancer["name"])


def _position(row: Row) -> tuple[list[tuple[float, str]], int, str, list[tuple[float, str]]]:
    """Order of the table: by block, in it the presets' own order, then name and options; numbers by their size."""
    rank = ORDER.index(row.name) if row.name in ORDER else len(ORDER)
    options = sorted(flatten(row.runs[0].config["balancer"]).items())
    return _by_size(row.point.items()), rank, row.name, _by_size(item for item in options if item[0] != "name")


def _by_size(items: Iterable[tuple[str, Any]]) -> list[tuple[float, str]]:
    return [(float(v) if isinstance(v, int | float) else float("inf"), f"{k}={v}") for k, v in items]
