"""The command ``equipoise``: Hydra composes the config of every job, then ``sweep/jobs.py`` checks and runs them.

``equipoise status`` and ``equipoise diff`` are commands of their own, see ``sweep/status.py`` and ``sweep/diff.py``.
"""

import contextlib
import importlib
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from .sweep.job import Trainer
from .sweep.plugins import has_plugin

SUBCOMMANDS = ("status", "diff")
# exit status of a command that was stopped by Ctrl-C, as shells have it
STOPPED = 130


@dataclass
class Composed:
    """The resolved configs of all jobs, and whether they are a sweep."""

    configs: list[dict[str, Any]] = field(default_factory=list)
    sweep: bool = False


def main(trainer: Trainer | None = None) -> int:
    """Entry of the command; its arguments are Hydra's or those of a subcommand.

    ``trainer`` stands in for ``experiments.train`` in tests.

    Returns the exit status: 0 if every job is complete, 1 if one is not, 130 if stopped. Errors that a user can cause
    are printed without a trace, which ``HYDRA_FULL_ERROR=1`` shows.
    """
    if len(sys.argv) > 1 and sys.argv[1] in SUBCOMMANDS:
        return importlib.import_module(f".sweep.{sys.argv[1]}", __package__).main(sys.argv[2:])
    signal.signal(signal.SIGTERM, interrupt)
    try:
        composed = compose(trainer)
        return _run(composed, trainer) if composed.configs else 0
    except KeyboardInterrupt:
        print("equipoise: stopped; the same command goes on from the last checkpoints", file=sys.stderr)
        return STOPPED
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(f"equipoise: {explain(error)}", file=sys.stderr)
        return 1


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Handler of a signal: as Ctrl-C."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def _run(composed: Composed, trainer: Trainer | None) -> int:
    # torch takes seconds to import; --help and --cfg do without
    from .sweep.jobs import run_all

    return run_all(composed.configs, sweep=composed.sweep, trainer=trainer)


def compose(trainer: Trainer | None = None) -> Composed:
    """Let Hydra read the command line and compose all jobs; ``--cfg``, ``--help`` and the like compose none.

    With a launcher or a sweeper from a plugin (Slurm, a search) jobs run where and when the plugin calls for them.

    Raises:
        HydraException, OmegaConfBaseException: for an unknown key or preset, a wrong override, a missing value.
        ValueError: ``beside`` that is no list, ``beside`` of a single run.
    """
    composed = Composed()
    beside: set[tuple[str, ...]] = set()

    def task(config: DictConfig) -> float | None:
        resolved = resolve(config)
        settings = HydraConfig.get()
        if has_plugin(settings):
            # Hydra calls a launcher for a sweep only; without one the job would be trained here
            if settings.mode != RunMode.MULTIRUN:
                raise ValueError("a launcher or a sweeper of a plugin runs sweeps: expected -m beside it")
            return _run_for_plugin(resolved, trainer)
        composed.sweep = settings.mode == RunMode.MULTIRUN
        composed.configs.append(resolved)
        presets = _beside(resolved)
        if presets and not composed.sweep:
            raise ValueError(f"beside={presets} adds jobs to a sweep, and this is a single run: expected -m")
        for preset in presets:
            overrides = _without_balancer(settings.overrides.task)
            # the presets may lie in a folder that the command line names
            overrides += [text for text in settings.overrides.hydra if text.startswith("hydra.searchpath=")]
            # to compose a config takes a tenth of a second
            if (preset, *overrides) not in beside:
                beside.add((preset, *overrides))
                composed.configs.append(resolve(hydra.compose("config", [*overrides, f"balancer={preset}"])))
        return None

    with raising_hydra(), _without_record_of_dry_runs():
        hydra.main(version_base="1.3", config_path="pkg://equipoise.configs", config_name="config")(task)()
    # a preset may be both swept and beside
    unique = {json.dumps(config, sort_keys=True): config for config in composed.configs}
    return Composed(list(unique.values()), composed.sweep)


@contextlib.contextmanager
def _without_record_of_dry_runs() -> Iterator[None]:
    """Let Hydra write its ``multirun.yaml`` of a dry run, which nothing turns off, where it is thrown away."""
    before = sys.argv
    with tempfile.TemporaryDirectory(prefix="equipoise-") as place:
        dry = [number for number, text in enumerate(before) if re.fullmatch(r"\+*dry_run=true", text, re.IGNORECASE)]
        if dry:
            # beside the other overrides: an option such as -m may come last
            sys.argv = [*before[: dry[0]], f"hydra.sweep.dir={json.dumps(place)}", *before[dry[0] :]]
        try:
            yield
        finally:
            sys.argv = before


def resolve(config: DictConfig) -> dict[str, Any]:
    """A composed config without interpolations.

    Raises:
        OmegaConfBaseException: for a missing value.
    """
    return cast(dict[str, Any], OmegaConf.to_container(config, resolve=True, throw_on_missing=True))


def _beside(config: dict[str, Any]) -> list[str]:
    presets = config["beside"]
    if not isinstance(presets, list) or not all(isinstance(preset, str) for preset in presets):
        raise ValueError(f"beside: expected a list of presets of balancer, say [eqb], got {presets!r}")
    return presets


def _without_balancer(overrides: Iterable[str]) -> list[str]:
    return [text for text in overrides if not re.match(r"[+~]*balancer([./=@]|$)", text)]


@contextlib.contextmanager
def raising_hydra() -> Iterator[None]:
    """Make Hydra raise its errors: by itself it prints them, without the keys that would be valid, and exits."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        del os.environ["HYDRA_FULL_ERROR"]
        if before is not None:
            os.environ["HYDRA_FULL_ERROR"] = before


def _run_for_plugin(config: dict[str, Any], trainer: Trainer | None) -> float | None:
    """Run one job and return its bits per byte, which a search minimises."""
    from .sweep.jobs import run_one

    return run_one(config, trainer)


def explain(error: BaseException) -> str:
    """The message of an error; where a key is unknown, with the keys that exist beside it."""
    # where Hydra has looked is of use to its developers
    message = str(error).split("\nConfig search path")[0].strip()
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and isinstance(cause.parent_node, DictConfig):
        parent, _, key = str(cause.full_key).rpartition(".")
        known = ", ".join(sorted(str(name) for name in cause.parent_node if name != "hydra"))
        place = f"in {parent}" if parent else "at the top"
        expected = f"expected one of {known}" if known else f"it is empty, choose {parent.replace('.', '/')}=... first"
        return f"{message.splitlines()[0]}\nthere is no key {key!r} {place}: {expected}"
    if isinstance(cause, MissingMandatoryValue | InterpolationToMissingValueError):
        return f"{message.splitlines()[0].rpartition(': ')[2]} is missing: it has no default, give it a value"
    # OmegaConf adds lines for its developers
    detail = (
        str(cause).strip().splitlines()[0] if isinstance(cause, OmegaConfBaseException) and cause is not error else ""
    )
    return f"{message}\n{detail}".strip()


if __name__ == "__main__":
    sys.exit(main())
