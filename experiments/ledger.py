"""What an experiment has planned: ``ledger.json`` beside its run folders, written before the first job starts.

What became of a job stands in its own folder (``runs.run_state``); the ledger knows of those that never made one.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from .runs import read_json, write_json

NAME = "ledger.json"


@dataclass(frozen=True)
class Entry:
    """One planned run.

    Attributes:
        label: name for people.
        steps: optimizer steps.
        command: what starts or resumes it, as a shell takes it.
        place: working directory of the command, absolute.
        host: the machine on which its launcher was started; None if the ranks are started by hand.
        planned: ISO 8601 time at which it was planned first.
    """

    label: str
    steps: int
    command: str
    place: str
    host: str | None
    planned: str


def read_ledger(experiment: Path) -> dict[str, Entry]:
    """The planned runs of the ``experiment``'s folder by the names of their folders; empty if there is no ledger.

    Raises:
        ValueError: the ledger cannot be understood.
    """
    path, known = experiment / NAME, [field.name for field in fields(Entry)]
    try:
        entries = read_json(path).items()
        return {name: Entry(**{key: entry[key] for key in known}) for name, entry in entries}
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} cannot be read as a ledger ({type(error).__name__}: {error}); remove it, and the next start of "
            "the sweep writes a new one"
        ) from error


def record(experiment: Path, planned: Mapping[str, Entry]) -> None:
    """Add planned runs by the names of their folders; one that is known takes its new command and keeps its time.

    Raises:
        ValueError: the ledger that is there cannot be understood.
    """
    experiment.mkdir(parents=True, exist_ok=True)
    with _alone(experiment):
        entries = {name: asdict(entry) for name, entry in read_ledger(experiment).items()}
        for name, entry in planned.items():
            entries[name] = asdict(entry) | {key: entries[name][key] for key in ("planned",) if name in entries}
        write_json(experiment / NAME, entries)


def forget(experiment: Path, names: Collection[str]) -> None:
    """Take planned runs out of the ledger."""
    with _alone(experiment):
        entries = {name: asdict(entry) for name, entry in read_ledger(experiment).items() if name not in names}
        write_json(experiment / NAME, entries)


@contextlib.contextmanager
def _alone(experiment: Path) -> Iterator[None]:
    """One process at a time changes the ledger: jobs of a scheduler start at the same moment."""
    handle = os.open(experiment, os.O_RDONLY)
    try:
        # a file system without locks
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
            # of a process that was killed as it wrote
            for draft in experiment.glob(f".{NAME}.*"):
                draft.unlink()
        yield
    finally:
        os.close(handle)
