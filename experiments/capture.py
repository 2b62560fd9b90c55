"""The router logits of a run on disk, to be replayed: ``<run>/capture/step-00000012/rank-0.npy``.

Each file is fp32 ``[M, L, T, E]``: ``M`` microbatches of a rank in their order, ``L`` mixture-of-experts layers, ``T``
tokens of a microbatch, ``E`` experts; steps count from 1. A step takes ``4 * L * E`` bytes a token over all ranks:
0.5 MB with the default config, 0.5 TB with 64 layers of 1024 experts and 2**21 tokens.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .moe import Router

FOLDER = "capture"


class Capture:
    """Keeps the router logits of every ``every``-th optimizer step on this rank; of none if ``every`` is 0."""

    def __init__(self, run: Path, routers: Sequence[Router], rank: int, every: int) -> None:
        self.run = run
        self.routers = routers
        self.rank = rank
        self.every = every if routers else 0
        self.microbatches: list[Tensor] = []

    def add(self, step: int) -> None:
        """Take in a microbatch of optimizer step ``step`` (from 1), after its forward."""
        if self.every and step % self.every == 0:
            logits = [router.last.logits for router in self.routers if router.last is not None]
            self.microbatches.append(torch.stack(logits).float().cpu())

    def write(self, step: int) -> None:
        """Write what ``add`` took in. A run that was cut and goes on writes the same file again."""
        if not self.microbatches:
            return
        path = _step_folder(self.run, step) / f"rank-{self.rank}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}")
        with draft.open("wb") as file:
            np.save(file, torch.stack(self.microbatches).numpy())
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        self.microbatches = []


def captured_steps(run: Path, num_ranks: int) -> list[int]:
    """The steps of which all ``num_ranks`` ranks of a run have written their logits, in order."""
    found = (re.fullmatch(r"step-(\d+)", path.name) for path in (run / FOLDER).glob("step-*"))
    steps = sorted(int(match[1]) for match in found if match)
    return [step for step in steps if all(path.exists() for path in _rank_paths(run, step, num_ranks))]


def read_step(run: Path, step: int, num_ranks: int) -> Tensor:
    """The logits of one step, ``[R, M, L, T, E]`` fp32 by rank.

    Raises:
        ValueError: a file that is missing, not of such logits, or of another shape than that of rank 0.
    """
    return torch.stack([torch.from_numpy(array) for array in _arrays(_rank_paths(run, step, num_ranks))])


def _arrays(paths: Sequence[Path]) -> list[np.ndarray]:
    arrays: list[np.ndarray] = []
    for path in paths:
        try:
            array = np.load(path)
        except (OSError, ValueError, EOFError) as error:
            raise ValueError(f"{path} cannot be read as router logits: {error}") from error
        wanted = arrays[0].shape if arrays else array.shape
        if array.ndim != 4 or array.dtype != np.float32 or array.shape != wanted:
            shape = list(wanted) if arrays else "[microbatches, layers, tokens, experts]"
            raise ValueError(f"{path}: expected float32 {shape}, got {array.dtype} {list(array.shape)}")
        arrays.append(array)
    return arrays


def _rank_paths(run: Path, step: int, num_ranks: int) -> list[Path]:
    return [_step_folder(run, step) / f"rank-{rank}.npy" for rank in range(num_ranks)]


def _step_folder(run: Path, step: int) -> Path:
    return run / FOLDER / f"step-{step:08d}"
