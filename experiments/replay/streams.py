"""Streams of router logits: drawn from a model of what goes wrong, or captured from a training run.

``L`` layers, ``T`` tokens of a step, ``E`` experts, ``K`` experts a token. The tokens of a step lie in the order in
which ranks hold them: rank ``r`` of ``R`` has the ``r``-th contiguous part, and its microbatches are contiguous parts
of that.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..capture import FOLDER, captured_steps, read_step
from ..checks import check_choice, check_number, check_whole
from ..runs import load_config

# the parts of a step that may have offsets of their own: with 64 ranks one each
CELLS = 64
# tells apart what is drawn once from one seed; what is drawn every step has the step beside it
OFFSETS, SKEW, DRIFT, STEP = range(4)


@dataclass(frozen=True)
class Sizes:
    """What a stream gives.

    Args:
        num_layers, num_tokens, num_experts, top_k: ``L``, ``T`` of a step, ``E``, ``K``.
        gate: how scores follow from logits, ``sigmoid`` or ``softmax``.
        selection: what the bias is added to, ``score`` or ``logit``.

    Raises:
        ValueError: a size that is not positive, ``top_k`` that leaves no cutoff, an unknown gate or selection.
    """

    num_layers: int
    num_tokens: int
    num_experts: int
    top_k: int
    gate: str = "sigmoid"
    selection: str = "score"

    def __post_init__(self) -> None:
        for name, value in (("layers", self.num_layers), ("tokens", self.num_tokens), ("top_k", self.top_k)):
            check_whole(name, value)
        check_whole("num_experts", self.num_experts, low=2)
        check_choice("gate", self.gate, ("sigmoid", "softmax"))
        check_choice("selection", self.selection, ("score", "logit"))
        if self.top_k >= self.num_experts:
            raise ValueError(
                f"top_k must be below num_experts (there is no cutoff otherwise), got top_k={self.top_k} and "
                f"num_experts={self.num_experts}"
            )


class Stream:
    """Router logits, a batch a step; a pure function of seed and step.

    Attributes:
        sizes: what a batch measures.
        num_steps: how many steps there are, None without end.
        seeded: of the class; whether another seed gives other batches.
    """

    seeded = True
    sizes: Sizes
    num_steps: int | None = None

    def batch(self, step: int) -> Tensor:
        """The logits of ``step`` (from 1), ``[L, T, E]`` fp32."""
        raise NotImplementedError


class SyntheticStream(Stream):
    """Offsets per expert, noise per token, and what makes a real stream harder; everything in units of a logit.

    Args:
        sizes, seed: ``L``, ``T``, ``E`` and what all is drawn from. Streams of one seed have the same noise.
        offsets: standard deviation of the experts' offsets.
        noise: standard deviation of a token's noise (its scale, with ``tails``).
        rank_skew: standard deviation of the offsets that each of 64 contiguous cells of the tokens has for good.
        microbatch_skew: standard deviation of the offsets that each cell draws anew every step.
        drift: standard deviation of the step of the random walk that the experts' offsets make.
        tails: degrees of freedom of Student's t, from which the noise comes; None: normal.
        ties: grid to which logits are rounded; 0: none.
        saturation: added to all logits: sigmoid scores come close to 1.
        domain_share: this first share of the tokens belongs to one domain; 0: none.
        domain_experts: number of experts that the domain prefers.
        domain_preference: added to their logits for the tokens of the domain.

    Raises:
        ValueError: a negative spread, a share above 1, more preferred experts than there are, no number.
    """

    def __init__(
        self,
        sizes: Sizes,
        seed: int,
        *,
        offsets: float = 0.5,
        noise: float = 1.0,
        rank_skew: float = 0.0,
        microbatch_skew: float = 0.0,
        drift: float = 0.0,
        tails: float | None = None,
        ties: float = 0.0,
        saturation: float = 0.0,
        domain_share: float = 0.0,
        domain_experts: int = 4,
        domain_preference: float = 3.0,
    ) -> None:
        spreads = {"offsets": offsets, "rank_skew": rank_skew, "microbatch_skew": microbatch_skew, "drift": drift}
        for name, value in {**spreads, "noise": noise, "ties": ties}.items():
            check_number(name, value)
        check_number("domain_share", domain_share, high=1)
        if tails is not None:
            check_number("tails", tails, positive=True)
        for name, value in {"saturation": saturation, "domain_preference": domain_preference}.items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, got {value!r}")
        check_whole("domain_experts", domain_experts)
        if domain_experts > sizes.num_experts:
            raise ValueError(f"domain_experts must be at most num_experts={sizes.num_experts}, got {domain_experts}")
        self.sizes = sizes
        self.seed = seed
        self.noise, self.tails, self.ties = noise, tails, ties
        self.offsets, self.saturation = offsets, saturation
        self.rank_skew, self.microbatch_skew, self.drift = rank_skew, microbatch_skew, drift
        self.domain_share, self.domain_experts, self.domain_preference = domain_share, domain_experts, domain_preference

    def batch(self, step: int) -> Tensor:
        """Noise plus what the experts, the cells and the domain add."""
        sizes = self.sizes
        rng = np.random.default_rng([self.seed, STEP, step])
        logits = rng.standard_normal((sizes.num_layers, sizes.num_tokens, sizes.num_experts), dtype=np.float32)
        logits *= np.float32(self.noise)
        if self.tails is not None:
            # a normal number over the root of chi-square / degrees of freedom
            chi_square = rng.standard_gamma(self.tails / 2, logits.shape, dtype=np.float32)
            chi_square *= np.float32(2 / self.tails)
            logits /= np.sqrt(np.maximum(chi_square, np.finfo(np.float32).tiny, out=chi_square), out=chi_square)
        cells = self._of_cells + self._walked(step)
        if self.microbatch_skew:
            cells = cells + self.microbatch_skew * rng.standard_normal(self._of_cells.shape)
        cells = cells.astype(np.float32)
        starts = -(-np.arange(CELLS + 1) * sizes.num_tokens // CELLS)
        for cell, (first, last) in enumerate(pairwise(starts)):
            logits[:, first:last] += cells[:, cell, None]
        logits[:, : round(self.domain_share * sizes.num_tokens), : self.domain_experts] += self.domain_preference
        if self.ties:
            np.multiply(np.rint(logits / np.float32(self.ties)), np.float32(self.ties), out=logits)
        return torch.from_numpy(logits)

    @cached_property
    def _of_cells(self) -> np.ndarray:
        """What stays: the offsets of the experts and of each cell, ``[L, CELLS, E]``."""
        shape = self.sizes.num_layers, CELLS, self.sizes.num_experts
        experts = self.offsets * np.random.default_rng([self.seed, OFFSETS]).standard_normal((shape[0], 1, shape[2]))
        cells = self.rank_skew * np.random.default_rng([self.seed, SKEW]).standard_normal(shape)
        return experts + cells + self.saturation

    def _walked(self, step: int) -> np.ndarray:
        """How far the offsets have drifted before ``step``, ``[L, 1, E]``."""
        shape = step - 1, self.sizes.num_layers, 1, self.sizes.num_experts
        # a longer walk starts with the same steps
        return self.drift * np.random.default_rng([self.seed, DRIFT]).standard_normal(shape).sum(0)


class CapturedStream(Stream):
    """The logits that a training run with ``capture=true`` has left, see ``experiments/capture.py``.

    The tokens of a step are those of rank 0, one microbatch after the other, then those of rank 1, and so on. Steps at
    the end that some rank has not written are left out.

    Args:
        sizes, seed: not used: a run has its own.
        folder: of the run, or of an experiment with one run.

    Raises:
        ValueError: no run or several, no capture, a shard that is missing, unreadable or of another shape than others.
    """

    seeded = False

    def __init__(self, sizes: Sizes, seed: int, *, folder: str) -> None:
        self.folder = _only_run(Path(folder).expanduser())
        config = load_config(self.folder)
        if not {"model", "parallel"} <= config.keys():
            raise ValueError(f"{self.folder} holds no training run: expected a run with capture=true")
        self.num_ranks = config["parallel"]["ranks"]
        self.steps = captured_steps(self.folder, self.num_ranks)
        if not self.steps:
            raise ValueError(
                f"{self.folder} holds no step of router logits of all {self.num_ranks} ranks: "
                "expected a run with capture=true"
            )
        found = {int(path.name[5:]) for path in (self.folder / FOLDER).glob("step-*") if path.name[5:].isdigit()}
        if broken := sorted(step for step in found - {*self.steps} if step < self.steps[-1]):
            raise ValueError(
                f"{self.folder / FOLDER}: step {broken[0]} lacks a shard, expected one of each of {self.num_ranks} "
                "ranks, as later steps have them"
            )
        self.num_steps = len(self.steps)
        self.shape = read_step(self.folder, self.steps[0], self.num_ranks).shape
        ranks, microbatches, num_layers, num_tokens, num_experts = self.shape
        model = config["model"]
        self.sizes = Sizes(
            num_layers,
            ranks * microbatches * num_tokens,
            num_experts,
            model["top_k"],
            gate=model["gate"],
            selection=model["selection"],
        )

    def batch(self, step: int) -> Tensor:
        """The tokens of all ranks, one rank after the other.

        Raises:
            ValueError: a shard that is missing, unreadable or of another shape than those of the first step.
        """
        logits = read_step(self.folder, self.steps[step - 1], self.num_ranks)
        if logits.shape != self.shape:
            raise ValueError(
                f"{self.folder / FOLDER}: the shards of step {self.steps[step - 1]} are ranks, microbatches, layers, "
                f"tokens and experts {list(logits.shape)}, expected {list(self.shape)}, as in the first step"
            )
        return logits.permute(2, 0, 1, 3, 4).flatten(1, 3)


def _only_run(folder: Path) -> Path:
    """The folder itself, or the run in it if it is an experiment's and has one."""
    runs = sorted(path.parent for path in folder.glob("*/config.yaml"))
    if (folder / "config.yaml").exists() or not runs:
        return folder
    if len(runs) > 1:
        raise ValueError(f"{folder} holds {len(runs)} runs: expected one of them, say {runs[0]}")
    return runs[0]
