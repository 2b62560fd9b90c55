"""One job of a sweep, what runs it, and why it did not complete."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..runs import run_label


class Trainer(Protocol):
    """What runs a job: the module ``experiments.train``, or a stand-in in tests."""

    def validate(self, config: dict[str, Any]) -> None:
        """Raise ``ValueError`` for a config that cannot be trained."""

    def main(self, run_folder: str) -> None:
        """Run one rank. The ranks are new processes, so it must be importable by its name."""


@dataclass(frozen=True)
class Job:
    """One run: ``index`` counts from 1 within the sweep, ``config`` is resolved to the last number.

    ``settings`` tell it apart from others of the same balancer and seed.
    """

    index: int
    config: dict[str, Any]
    folder: Path
    settings: str = ""

    @property
    def label(self) -> str:
        """Name for people: balancer, seed and, where they are not enough, ``settings``."""
        return f"{run_label(self.config)} {self.settings}".strip()


@dataclass(frozen=True)
class Failure:
    """Why a job did not complete, in one line, and the file with the rest."""

    label: str
    cause: str
    log: Path | None = None

    @property
    def detail(self) -> str:
        return f"{self.cause} (log: {self.log})" if self.log else self.cause
