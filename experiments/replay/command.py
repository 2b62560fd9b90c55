"""The command ``equipoise-replay``: every estimator on the same streams of router scores; a table and a page of it.

The folder ``<runs>/<name>/`` then holds ``config.yaml``, ``environment.json``, ``steps.parquet`` (a row for each
stream, estimator, seed, partition, step and layer), ``rows.csv`` (what became of each) and ``report/``. Exit status:
0; 1 if a row failed (it says which) or nothing could be run; 130 if stopped.
"""

import os
import platform
import re
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..checks import check_whole
from ..launch import STOPPED, explain, interrupt, raising_hydra, resolve

if TYPE_CHECKING:
    import pandas as pd

    from .study import Outcome


def main() -> int:
    """Entry of the command; its arguments are Hydra's. Returns the exit status."""
    signal.signal(signal.SIGTERM, interrupt)
    try:
        config = compose()
        return run(config) if config else 0
    except KeyboardInterrupt:
        print("equipoise-replay: stopped, no result was written", file=sys.stderr)
        return STOPPED
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(f"equipoise-replay: {explain(error)}", file=sys.stderr)
        return 1


def compose() -> dict[str, Any]:
    """Let Hydra read the command line; empty after ``--cfg``, ``--help`` and the like.

    Raises:
        HydraException, OmegaConfBaseException: for an unknown key or preset, a wrong override.
        ValueError: a missing value; a sweep; a name in ``only`` that nothing has.
    """
    composed: list[DictConfig] = []
    # Hydra would write a file of its own for a sweep
    if {"-m", "--multirun"} & {*sys.argv}:
        raise ValueError("streams, estimators, seeds, ranks and microbatches are lists of one run: expected no -m")
    with raising_hydra():
        hydra.main(version_base="1.3", config_path="pkg://equipoise.configs", config_name="replay")(composed.append)()
    if not composed:
        return {}
    config = composed[0]
    if missing := sorted(OmegaConf.missing_keys(config)):
        raise ValueError(f"{missing[0]} is missing: it has no default, give it a value")
    return select(resolve(config))


def select(config: dict[str, Any]) -> dict[str, Any]:
    """The config with the streams and the estimators that ``only`` names; all of a kind of which it names none.

    Raises:
        ValueError: ``only`` that is no list, or a name that neither a stream nor an estimator has.
    """
    only = config["only"]
    streams, estimators = config["streams"], config["estimators"]
    if not isinstance(only, list):
        raise ValueError(f"only must be a list of streams and estimators, say [even,eqb], got {only!r}")
    if unknown := [name for name in only if name not in streams and name not in estimators]:
        raise ValueError(
            f"only: there is no stream or estimator {unknown[0]!r}: expected streams of {', '.join(streams)} and "
            f"estimators of {', '.join(estimators)}"
        )
    kept = {
        kind: {name: section for name, section in config[kind].items() if name in only} or config[kind]
        for kind in ("streams", "estimators")
    }
    return config | kept


def run(config: dict[str, Any]) -> int:
    """Run all rows, write the folder and its report; returns the exit status.

    Raises:
        ValueError: a config that cannot be run, a folder that holds something else.
    """
    # torch takes seconds to import; --help and --cfg do without
    from rich.console import Console

    from ..environment import write_environment
    from ..runs import claim, open_run, refuse_other_run
    from .plan import check
    from .workers import run_all

    folder = result_folder(config)
    if config["processes"] != "auto":
        check_whole("processes (or auto)", config["processes"])
    rows = check(config)
    stored = {key: value for key, value in config.items() if key not in ("processes", "only")}
    # without a terminal rich takes 80 columns
    console = Console(width=None if sys.stdout.isatty() else 120)
    refuse_other_run(folder, stored)
    started = datetime.now().astimezone()
    with claim(folder):
        open_run(folder, stored)
        outcomes = run_all(config, rows, console)
        seconds = (datetime.now().astimezone() - started).total_seconds()
        # a run that is stopped leaves the results that are there as they are
        write_environment(folder, started=started.isoformat(timespec="seconds"), seconds=round(seconds, 1))
        write_frames(folder, outcomes)
        print_notes(outcomes, console)
        failed = [outcome for outcome in outcomes if outcome.failed]
        if len(failed) < len(outcomes):
            from .report import print_summary, write_report

            page = write_report(folder)
            print_summary(folder, console)
            console.print(f"report: {page}", markup=False, highlight=False, soft_wrap=True)
    return 1 if failed else 0


def result_folder(config: dict[str, Any]) -> Path:
    """``<runs>/<name>``.

    Raises:
        ValueError: a name that cannot name a folder.
    """
    name = config["name"]
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.+-]*", name):
        raise ValueError(f"name names a folder: expected letters, digits and . _ + -, got {name!r}")
    return Path(str(config["runs"])).expanduser() / name


def write_frames(folder: Path, outcomes: Sequence["Outcome"]) -> None:
    """Write ``steps.parquet`` and ``rows.csv``, each at once."""
    import pandas as pd

    from .table import CONTRACT

    steps = pd.DataFrame(
        [asdict(outcome.row) | record for outcome in outcomes for record in outcome.records], columns=CONTRACT
    )
    rows = pd.DataFrame(
        [asdict(outcome.row) | {"failed": outcome.failed, "note": outcome.note} for outcome in outcomes]
    )
    for name, frame in (("steps.parquet", steps), ("rows.csv", rows)):
        draft = folder / f".{name}.{platform.node()}.{os.getpid()}"
        _write(frame, draft, name)
        draft.replace(folder / name)


def _write(frame: "pd.DataFrame", path: Path, name: str) -> None:
    if name.endswith(".csv"):
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path, index=False)


def print_notes(outcomes: Sequence["Outcome"], console: Any) -> None:
    """Say which rows failed, and by stream and estimator which frozen batches converged."""
    from ..sweep.progress import print_line

    notes: dict[tuple[str, str], Counter[str]] = {}
    for outcome in outcomes:
        if outcome.failed:
            print_line(console, f"failed: {outcome.row.label}: {outcome.note}", "red")
        elif outcome.note:
            notes.setdefault((outcome.row.stream, outcome.row.estimator), Counter())[outcome.note] += 1
    for (stream, estimator), counted in notes.items():
        print_line(console, f"{stream} {estimator}: " + ", ".join(f"{note} ({n})" for note, n in counted.items()))


if __name__ == "__main__":
    sys.exit(main())
