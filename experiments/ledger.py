"""What an experiment has planned: ``ledger.json`` beside its run folders, written before the first job starts.

What became of a job stands in its own folder (``runs.run_state``); the ledger knows of those that never made one.
"""

import contextlib
import fcntl
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from .runs import open_lock, read_json, remove_drafts, write_json

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
    except (ValueError, KeyError, TypeError, AttributeError) as error:
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
    handle = open_lock(experiment)
    try:
        # on a disk without locks there is nothing to wait for
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
            remove_drafts(experiment)
        yield
    finally:
        os.close(handle)
