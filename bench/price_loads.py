"""Loads to put a price on: those of runs, and a ladder from balance to collapse.

``L`` mixture-of-experts layers, ``E`` experts, ``T`` tokens, ``K`` experts a token, ``N`` loads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..experiments.capture import captured_steps, read_step
from ..experiments.report.comparison import Row, group_rows, refuse_incomparable
from ..experiments.report.reading import Run, load_runs
from ..experiments.report.statistics import tail_start
from ..kernels import route

LADDER = "ladder"
EXPONENTS = (0.0, 0.5, 1.0, 1.5, 4.0)
# where the early steps begin, as a share of all
EARLY = 0.05
# what is measured takes the first layers of a deep model
MOST_LAYERS = 2
# share of the assignments of a captured step that may differ when it is routed again: a kernel for another device
# decides near ties in its own way
NEAR_TIES = 1e-3


@dataclass(frozen=True, eq=False)
class Point:
    """One load ``[L, E]`` int64, whose it is (the label of a row) and where it comes from."""

    label: str
    origin: str
    load_LE: Tensor


def read_rows(folder: Path) -> list[Row]:
    """The rows of an experiment that have a complete run with mixture-of-experts layers, all of one shape.

    Raises:
        ValueError: no such run, or runs that cannot be compared.
    """
    runs = load_runs(folder)
    refuse_incomparable(runs)
    rows = [row for row in group_rows(runs) if row.complete]
    shapes = {shape_of(run) for row in rows for run in row.complete}
    if len(shapes) != 1 or 0 in next(iter(shapes)):
        found = ", ".join(map(str, sorted(shapes))) or "no complete run"
        raise ValueError(f"{folder}: expected complete runs of one (layers, experts, experts a token), got {found}")
    return rows


def shape_of(run: Run) -> tuple[int, int, int]:
    """Mixture-of-experts layers, experts and experts a token."""
    model = run.config["model"]
    return model["num_layers"] - model["num_dense_layers"], model["num_experts"], model["top_k"]


def step_loads(run: Run) -> Tensor:
    """The load of every step over all its tokens, ``[steps, L, E]`` int64.

    Raises:
        ValueError: a record that cannot be read, or with a step, layer or expert missing.
    """
    path = run.folder / "load.parquet"
    try:
        record = pd.read_parquet(path, columns=["step", "layer", "expert", "count"])
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path} cannot be read as a record of loads: {error}") from error
    counts = record.sort_values(["step", "layer", "expert"])["count"].to_numpy(dtype=np.int64)
    layers, experts, _ = shape_of(run)
    if counts.size != run.steps * layers * experts:
        raise ValueError(f"{path}: expected {run.steps} steps of {layers} x {experts} counts, got {counts.size} counts")
    return torch.tensor(counts).view(run.steps, layers, experts)


def microbatch_loads(run: Run, steps: Sequence[int]) -> Tensor:
    """The loads of all microbatches of ``steps``, which the run has captured, ``[N, L, E]`` in the order of the steps.

    The captured logits are routed again, under the bias of the step before.

    Raises:
        ValueError: captured logits that cannot be read, or that do not give the recorded load.
    """
    record = pd.read_parquet(run.folder / "load.parquet", columns=["step", "layer", "expert", "bias"])
    layers, experts, top_k = shape_of(run)
    after = torch.tensor(record.sort_values(["step", "layer", "expert"])["bias"].to_numpy(dtype=np.float32))
    bias = torch.cat([torch.zeros(1, layers, experts), after.nan_to_num(0.0).view(-1, layers, experts)])
    recorded, found = step_loads(run), []
    options = {name: run.config["model"][name] for name in ("selection", "gate")}
    for step in steps:
        logits = read_step(run.folder, step, run.config["parallel"]["ranks"]).flatten(0, 1)
        by_layer = [
            torch.stack([route(z, bias[step - 1, layer], top_k, **options).load for z in logits[:, layer]])
            for layer in range(layers)
        ]
        found.append(torch.stack(by_layer, dim=1).long())
        apart = (found[-1].sum(0) - recorded[step - 1]).abs().sum() / (2 * recorded[step - 1].sum())
        if apart > NEAR_TIES:
            raise ValueError(
                f"{run.folder}: the captured logits of step {step} do not give the load in load.parquet, "
                f"{apart:.2%} of the assignments differ"
            )
    return torch.cat(found)


def tail_loads(run: Run) -> tuple[Tensor, Tensor | None]:
    """The loads ``[N, L, E]`` of the steps of the tail window, and those of their microbatches where captured."""
    start = tail_start(run.steps, run.config["report"]["tail"])
    kept = [step for step in captured_steps(run.folder, run.config["parallel"]["ranks"]) if step >= start]
    return step_loads(run)[start - 1 :], microbatch_loads(run, kept) if kept else None


def points_of(row: Row, number: int) -> list[Point]:
    """``number`` loads of a row, spread evenly from early steps to the last, the seeds taking turns.

    Of a run with captured logits these are loads of a microbatch, the first one of a step, else of a whole step.
    """
    points = []
    for turn in range(number):
        run = row.complete[turn % len(row.complete)]
        kept = captured_steps(run.folder, run.config["parallel"]["ranks"])
        steps = kept or range(1, run.steps + 1)
        # the first step is the same for all balancers
        step = steps[round((len(steps) - 1) * (EARLY + (1 - EARLY) * turn / max(number - 1, 1)))]
        load_LE = microbatch_loads(run, [step])[0] if kept else step_loads(run)[step - 1]
        kind = "first microbatch of step" if kept else "step"
        points.append(Point(row.label, f"{run.folder.name}, {kind} {step}", load_LE[:MOST_LAYERS]))
    return points


def ladder(num_layers: int, num_experts: int, top_k: int) -> list[Point]:
    """Loads that fall off as ``rank ** -exponent``, no expert above one choice a token: balance to collapse.

    Each exponent twice: busy experts side by side, and shuffled, which changes the devices' loads but not MaxVio.
    """
    points = []
    generator = torch.Generator().manual_seed(0)
    num_layers = min(num_layers, MOST_LAYERS)
    for exponent in EXPONENTS:
        shares = capped(torch.arange(1, num_experts + 1, dtype=torch.float64) ** -exponent, 1 / top_k)
        load_E = (shares * 10**9).round().long()
        shuffled = [load_E[torch.randperm(num_experts, generator=generator)] for _ in range(num_layers)]
        points.append(Point(LADDER, f"exponent {exponent:g}", load_E.expand(num_layers, -1)))
        points.append(Point(LADDER, f"exponent {exponent:g}, shuffled", torch.stack(shuffled)))
    return points


def capped(weights: Tensor, most: float) -> Tensor:
    """Shares ``[E]`` in proportion to ``weights``, but none above ``most``; what is cut goes to the others.

    >>> capped(torch.tensor([8.0, 1.0, 1.0]), 0.5).tolist()
    [0.5, 0.25, 0.25]
    """
    full = torch.zeros(len(weights), dtype=torch.bool)
    while True:
        left = 1 - most * int(full.sum())
        rest = weights.where(~full, 0)
        shares = torch.where(full, most, left * rest / rest.sum().clamp(min=1e-300))
        over = shares > most * (1 + 1e-12)
        if not over.any():
            return shares
        full |= over


def scaled(load: Tensor, num_tokens: int, top_k: int) -> Tensor:
    """Counts ``[..., E]`` int64 of ``T * K`` choices in the proportions of ``load``, by largest remainders.

    Raises:
        ValueError: an expert with more than one choice a token.

    >>> scaled(torch.tensor([10, 6, 4, 0]), 8, 2).tolist()
    [8, 5, 3, 0]
    """
    total = load.sum(-1, keepdim=True)
    exact = load * (num_tokens * top_k)
    counts = exact // total
    missing = num_tokens * top_k - counts.sum(-1, keepdim=True)
    place = (exact % total).argsort(dim=-1, descending=True, stable=True).argsort(-1)
    counts = counts + (place < missing).long()
    if (counts > num_tokens).any():
        raise ValueError(f"an expert takes at most {num_tokens} of {num_tokens} tokens, got {counts.amax().item()}")
    return counts


def laid_out(counts: Tensor, num_tokens: int) -> Tensor:
    """Experts ``[T, K]`` int64 with exactly these ``counts [E]``, none twice for a token.

    The choices of an expert go to tokens one after the other, and on at the first: none comes round twice.

    >>> laid_out(torch.tensor([3, 2, 1]), 3).tolist()
    [[0, 1], [0, 1], [0, 2]]
    """
    experts = torch.arange(len(counts)).repeat_interleave(counts)
    return experts.view(-1, num_tokens).t().contiguous()
