"""``equipoise diff A B``: the keys in which two configs differ, after everything is resolved.

``A`` and ``B`` are each a run folder, a ``.yaml`` file, or words as on the command line of ``equipoise``, in one
argument: overrides (``"balancer=eqb_lei optim.steps=10"``) and names of presets (``paper_table``). ``default`` is no
override. Keys that cannot change a result are left out. What a preset sweeps is part of it. Exit status as that of
diff(1): 0 the same, 1 different, 2 trouble.
"""

import argparse
import difflib
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..runs import FREE, flatten, load_config, same

SAME, DIFFERENT, TROUBLE = 0, 1, 2
DEFAULT = "default"
# names for people: they follow from what they name
LABELS = ("balancer.name",)
SWEEP = "sweep"
ABSENT = "absent"
RANKS = "parallel.ranks"


def main(arguments: Sequence[str]) -> int:
    """Entry of the subcommand; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        a, b = (settings(spec, options.config_dir) for spec in (options.a, options.b))
        _settle_ranks(a, b, options.b)
        _settle_ranks(b, a, options.a)
    except (ValueError, OSError, HydraException, OmegaConfBaseException) as error:
        # whoever composes has the better words for an unknown key
        from ..launch import explain

        print(f"equipoise diff: {explain(error)}", file=sys.stderr)
        return TROUBLE
    found = differences(a, b, everything=options.all)
    if options.json:
        print(json.dumps({"a": options.a, "b": options.b, "differences": found}, indent=2))
    else:
        _print(options.a, options.b, found)
    return DIFFERENT if found else SAME


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="equipoise diff",
        description="List the keys in which two configs differ, after everything is resolved.",
        epilog="Exit status: 0 the same, 1 different, 2 trouble.",
    )
    side = "a run folder, a .yaml file, overrides in quotes, names of presets, or: default"
    parser.add_argument("a", metavar="A", help=side)
    parser.add_argument("b", metavar="B", help="another one of these")
    parser.add_argument("--all", action="store_true", help="list names and keys that cannot change a result too")
    parser.add_argument("--json", action="store_true", help="print JSON; a key that is absent on a side lacks it")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="a folder with presets of your own")
    return parser


def settings(spec: str, config_dir: Path | None = None) -> dict[str, Any]:
    """The resolved config that ``spec`` stands for, flat, with what it sweeps under ``sweep.<key>``.

    Raises:
        ValueError: a folder that is no run's, a file that is no config, an unknown or ambiguous name of a preset.
        HydraException, OmegaConfBaseException: overrides that do not compose.
    """
    path = Path(spec).expanduser()
    if path.is_dir():
        return flatten(load_config(path))
    if path.suffix in (".yaml", ".yml") and "=" not in spec:
        return flatten(_load_file(path))
    if config_dir is not None and not config_dir.is_dir():
        raise ValueError(f"--config-dir: there is no folder {config_dir}")
    return _compose(_overrides(spec, config_dir), config_dir)


def _settle_ranks(config: dict[str, Any], other: Mapping[str, Any], spec: str) -> None:
    """A run folder has the number that ``auto`` became."""
    if config.get(RANKS) == "auto" and isinstance(other.get(RANKS), int) and Path(spec).expanduser().is_dir():
        config[RANKS] = other[RANKS]


def _load_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        config = OmegaConf.load(path)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(config, DictConfig):
        raise ValueError(f"{path}: expected a mapping of settings")
    return cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))


def _overrides(spec: str, config_dir: Path | None) -> list[str]:
    """The words of ``spec`` as overrides of Hydra."""
    try:
        words = [word for word in shlex.split(spec) if word != DEFAULT]
    except ValueError as error:
        raise ValueError(f"{spec!r}: expected words as on the command line; {error}") from error
    bare = [word for word in words if "=" not in word and not word.startswith("~")]
    groups = _presets(config_dir) if bare else {}
    return [f"{_group(word, groups)}={word}" if word in bare else word for word in words]


def _presets(config_dir: Path | None) -> dict[str, list[str]]:
    """The groups that have a preset of a name, by name."""
    found: dict[str, set[str]] = {}
    for root in (files("equipoise.configs"), config_dir):
        if root is not None:
            _collect(root, "", found)
    return {name: sorted(groups) for name, groups in found.items()}


def _collect(folder: Traversable, group: str, found: dict[str, set[str]]) -> None:
    for path in folder.iterdir():
        if path.is_dir() and path.name != "hydra":
            _collect(path, f"{group}/{path.name}".strip("/"), found)
        elif group and path.name.endswith(".yaml"):
            found.setdefault(path.name.removesuffix(".yaml"), set()).add(group)


def _group(name: str, presets: Mapping[str, Sequence[str]]) -> str:
    """The group of the preset ``name``; a group in which another one lies goes before that."""
    groups = presets.get(name, [])
    outer = [group for group in groups if not any(group.startswith(f"{other}/") for other in groups)]
    if len(outer) == 1:
        return outer[0]
    if outer:
        choices = ", ".join(f"{group}={name}" for group in outer)
        raise ValueError(f"{name!r} is the name of several presets; expected one of {choices}")
    near = difflib.get_close_matches(name, presets, n=5, cutoff=0.5) or sorted(presets)
    raise ValueError(
        f"{name!r} is no run folder, no .yaml file, no override and no preset; did you mean one of {', '.join(near)}?"
    )


def _compose(overrides: Sequence[str], config_dir: Path | None) -> dict[str, Any]:
    """Let Hydra compose a config as the command does, but for what it sweeps, which is listed."""
    added = [] if config_dir is None else [f"hydra.searchpath=[{json.dumps(f'file://{config_dir.resolve()}')}]"]
    with initialize_config_module("equipoise.configs", version_base="1.3"):
        config = compose("config", overrides=[*overrides, *added], return_hydra_config=True)
    # presets may speak of what was chosen
    HydraConfig.instance().set_config(config)
    plain = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    resolved = cast(dict[str, Any], OmegaConf.to_container(plain, resolve=True))
    sweep = {f"{SWEEP}.{key}": str(value) for key, value in (config.hydra.sweeper.get("params") or {}).items()}
    if sweep and resolved["beside"]:
        sweep[f"{SWEEP}.beside"] = ",".join(resolved["beside"])
    return flatten(resolved) | sweep


def differences(a: Mapping[str, Any], b: Mapping[str, Any], everything: bool = False) -> dict[str, dict[str, Any]]:
    """The keys whose values differ, in their order: ``{key: {"a": value, "b": value}}``, one that is absent left out.

    >>> differences({"seed": 0, "optim.steps": 3}, {"seed": 0})
    {'optim.steps': {'a': 3}}
    """
    found = {}
    for key in dict.fromkeys([*a, *b]):
        values = {side: flat[key] for side, flat in (("a", a), ("b", b)) if key in flat}
        differ = len(values) == 1 or not same(values["a"], values["b"])
        # an empty section on one side: its keys on the other side say it all
        empty = None in values.values() and any(other.startswith(f"{key}.") for other in (*a, *b))
        if differ and not empty and (everything or not (key.split(".")[0] in FREE or key in LABELS)):
            found[key] = values
    return found


def _print(a: str, b: str, found: Mapping[str, Mapping[str, Any]]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 100)
    if not found:
        console.print(f"no difference between {a} and {b}", markup=False, highlight=False, soft_wrap=True)
        return
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("key", no_wrap=True)
    for title in (a, b):
        table.add_column(Text(title), overflow="fold")
    for key, values in found.items():
        table.add_row(Text(key), *(_cell(key, values, side) for side in ("a", "b")))
    console.print(table)


def _cell(key: str, values: Mapping[str, Any], side: str) -> Text:
    if side not in values:
        return Text(ABSENT, style="dim")
    text = values[side] if isinstance(values[side], str) else json.dumps(values[side])
    # a long list of what is swept may break at spaces
    return Text(text.replace(",", ", ") if key.startswith(f"{SWEEP}.") else text)
