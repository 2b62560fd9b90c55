"""What a row of the bench measures: one estimator on one stream, on virtual ranks and microbatches, step by step.

``L`` layers, ``R`` virtual ranks, ``M`` microbatches of a rank, ``T`` tokens of a step, ``E`` experts.
"""

import itertools
import math
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...balancers import BiasBalancer, max_violation, simulate_ranks
from ...balancers.base import FixedDtype, Solve
from ...kernels import route
from .plan import Row, make_balancer, open_stream
from .streams import Sizes, Stream
from .truth import Truth, pooled_quantile

# up to here the batches of a stream stay in memory, else each is made anew for every row
CACHE_BYTES = 2**30
# [r][l]: of virtual rank r and layer l
Replicas = list[list[BiasBalancer]]


@dataclass(eq=False)
class Outcome:
    """What became of a row.

    Args:
        row: which.
        records: a mapping for each step and layer, step by step.
        biases: ``[L, E]`` fp32 after each step.
        note: whether a frozen batch converged; the error of a row that failed.
        failed: whether it did.
    """

    row: Row
    records: list[dict[str, Any]] = field(default_factory=list)
    biases: list[np.ndarray] = field(default_factory=list)
    note: str = ""
    failed: bool = False


class Batches:
    """The batches of a stream, and what is measured on them under a bias, each measured once.

    Pooled estimators go the same way on any number of ranks, so that most of it is asked for again.

    Args:
        stream: where the batches come from.
        steps: how many will be asked for.
        frozen: every step has the first batch.
    """

    def __init__(self, stream: Stream, steps: int, frozen: bool) -> None:
        sizes = stream.sizes
        self.stream = stream
        self.frozen = frozen
        # the last step asks for the batch after it too
        size = 4 * sizes.num_layers * sizes.num_tokens * sizes.num_experts * (1 if frozen else steps + 1)
        self._batch = lru_cache(maxsize=None if size <= CACHE_BYTES else 2)(stream.batch)
        self._truths: dict[tuple[int, int, bytes], Truth] = {}
        self._violations: dict[tuple[int, int, bytes], float] = {}

    def __contains__(self, step: int) -> bool:
        return self.frozen or self.stream.num_steps is None or step <= self.stream.num_steps

    def __getitem__(self, step: int) -> Tensor:
        """``[L, T, E]`` fp32."""
        return self._batch(1 if self.frozen else step)

    def truth(self, step: int, layer: int, bias: Tensor) -> Truth:
        """The fp64 target of a layer's batch that ``bias [E]`` routes."""
        key = self._key(step, layer, bias)
        if key not in self._truths:
            sizes = self.stream.sizes
            logits = self[step][layer].numpy()
            self._truths[key] = pooled_quantile(logits, bias.numpy(), sizes.top_k, sizes.gate, sizes.selection)
        return self._truths[key]

    def violation(self, step: int, layer: int, bias: Tensor) -> float:
        """MaxVio of the load of a layer's batch under ``bias [E]``; NaN where the stream has ended."""
        key = self._key(step, layer, bias)
        if key not in self._violations:
            if step not in self:
                return math.nan
            sizes = self.stream.sizes
            routing = route(self[step][layer], bias, sizes.top_k, gate=sizes.gate, selection=sizes.selection)
            self._violations[key] = max_violation(routing.load).item()
        return self._violations[key]

    def take_load(self, step: int, layer: int, bias: Tensor, load: Tensor) -> None:
        """Take over a load that has been counted already."""
        self._violations[self._key(step, layer, bias)] = max_violation(load).item()

    def _key(self, step: int, layer: int, bias: Tensor) -> tuple[int, int, bytes]:
        return 1 if self.frozen else step, layer, bias.numpy().tobytes()


def run_rows(config: dict[str, Any], rows: Sequence[Row], begin: Callable[[Row], None]) -> Iterator[Outcome]:
    """Run rows of one stream and one seed, grouped by estimator, each on a trajectory of its own.

    Args:
        config: resolved.
        rows: as ``plan.check`` gives them.
        begin: called before each row.
    """
    stream = open_stream(config, rows[0].stream, rows[0].seed)
    steps = min(config["steps"], stream.num_steps or config["steps"])
    batches = Batches(stream, steps, config["mode"] == "frozen")
    for _, partitions in itertools.groupby(rows, lambda row: row.estimator):
        outcomes = []
        for row in partitions:
            begin(row)
            outcomes.append(_run_row(config["estimators"][row.estimator], row, batches, steps))
        _fill_spread([outcome for outcome in outcomes if not outcome.failed])
        yield from outcomes


def _run_row(section: Any, row: Row, batches: Batches, steps: int) -> Outcome:
    outcome = Outcome(row)
    try:
        for records, biases in _trajectory(section, row, batches, steps):
            outcome.records += records
            outcome.biases.append(biases)
            if batches.frozen and max(record["moved"] for record in records) == 0:
                break
    # a balancer of the user's may raise anything, and the other rows are not to be lost
    except Exception as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        return Outcome(row, note=f"{type(error).__name__}: {error}", failed=True)
    for record in outcome.records:
        bias = torch.from_numpy(outcome.biases[record["step"] - 1][record["layer"]])
        # but for the last step, the step after it has counted this load
        record["maxvio_next"] = batches.violation(record["step"] + 1, record["layer"], bias)
    if batches.frozen:
        outcome.note = describe_convergence([np.zeros_like(outcome.biases[0]), *outcome.biases])
    return outcome


def _trajectory(
    section: Any, row: Row, batches: Batches, steps: int
) -> Generator[tuple[list[dict[str, Any]], np.ndarray], None, None]:
    """The records of a step and the biases ``[L, E]`` after it, step by step."""
    sizes = batches.stream.sizes
    replicas = [
        [make_balancer(row.estimator, section, sizes) for _ in range(sizes.num_layers)] for _ in range(row.ranks)
    ]
    meters = [[Meter(balancer) for balancer in layers] for layers in replicas]
    for step in range(1, steps + 1):
        old = _biases(replicas)
        for meter in itertools.chain.from_iterable(meters):
            meter.reset()
        parts = batches[step].unflatten(1, (row.ranks, row.microbatches, -1))
        started = time.perf_counter()
        loads = _step(replicas, parts, sizes)
        seconds = (time.perf_counter() - started) / sizes.num_layers
        new = _biases(replicas)
        records = []
        for layer in range(sizes.num_layers):
            batches.take_load(step, layer, old[layer], loads[layer])
            costs = {
                "bytes": meters[0][layer].bytes,
                "rounds": meters[0][layer].rounds,
                "memory": max(layers[layer].memory for layers in meters),
                "seconds": seconds,
            }
            quality = _quality(batches, step, layer, old[layer], new[layer])
            records.append({"step": step, "layer": layer, **quality, **costs, **_shares(replicas[0][layer])})
        yield records, new.numpy()


def _step(replicas: Replicas, parts: Tensor, sizes: Sizes) -> Tensor:
    """One optimizer step of all virtual ranks; the load, ``[L, E]`` int64."""

    def observe_again() -> None:
        feed(replicas, parts, sizes)

    loads = feed(replicas, parts, sizes)
    simulate_ranks(replicas, observe_again=observe_again)
    return loads


def feed(replicas: Replicas, parts: Tensor, sizes: Sizes) -> Tensor:
    """Route a step as training routers do, each virtual rank its microbatches.

    Args:
        replicas: of each rank and layer.
        parts: ``[L, R, M, T / (R * M), E]``.
        sizes: of the stream.

    Returns:
        The load of each layer over all ranks, ``[L, E]`` int64.
    """
    loads = torch.zeros(sizes.num_layers, sizes.num_experts, dtype=torch.int64)
    for rank, layers in enumerate(replicas):
        for layer, balancer in enumerate(layers):
            for logits in parts[layer, rank]:
                routing = route(
                    logits,
                    balancer.bias,
                    balancer.top_k,
                    tally=balancer.tally,
                    gate=sizes.gate,
                    selection=sizes.selection,
                )
                balancer.observe(routing)
                loads[layer] += routing.load
    return loads


def _quality(batches: Batches, step: int, layer: int, old: Tensor, new: Tensor) -> dict[str, float]:
    truth = batches.truth(step, layer, old)
    error = np.abs(_centred(new.double().numpy()) - _centred(truth.quantile))
    return {
        "error_max": float(error.max()),
        "error_mean": float(error.mean()),
        "noise": truth.noise,
        "moved": (new - old).abs().max().item(),
        "maxvio_before": batches.violation(step, layer, old),
        "maxvio_same": batches.violation(step, layer, new),
    }


def _shares(balancer: BiasBalancer) -> dict[str, float]:
    found = balancer.diagnostics()
    return {name: float(found.get(name, math.nan)) for name in ("fallback_share", "candidate_share")}


def _centred(values: np.ndarray) -> np.ndarray:
    return values - values.mean()


def _biases(replicas: Replicas) -> Tensor:
    """A copy of the biases of rank 0, ``[L, E]``."""
    return torch.stack([balancer.bias for balancer in replicas[0]])


class Meter:
    """Bytes and rounds that a balancer puts into all-reduces, and the bytes of its state, measured in ``solve``."""

    def __init__(self, balancer: BiasBalancer) -> None:
        self.balancer = balancer
        self._solve = balancer.solve
        self.reset()
        balancer.solve = self.solve  # type: ignore[method-assign]

    def reset(self) -> None:
        """Start a step."""
        self.bytes = self.rounds = self.memory = 0

    def solve(self) -> Solve:
        """The balancer's own, watched."""
        self.memory = max(self.memory, state_bytes(self.balancer))
        coroutine = self._solve()
        try:
            statistic = next(coroutine)
            while True:
                self.rounds += 1
                self.bytes += statistic.nbytes
                statistic = coroutine.send((yield statistic))
        except StopIteration as stop:
            return stop.value


def state_bytes(balancer: BiasBalancer) -> int:
    """Bytes of the statistics that a balancer holds."""
    holders = [module for module in balancer.modules() if isinstance(module, FixedDtype)]
    return sum(getattr(holder, name).nbytes for holder in holders for name in holder._scratch)


def _fill_spread(outcomes: Sequence[Outcome]) -> None:
    """How far the biases of all partitions lie apart, after each step and for each layer."""
    steps = max((len(outcome.biases) for outcome in outcomes), default=0)
    # where a frozen batch has converged, the bias stays
    ways = [outcome.biases + outcome.biases[-1:] * (steps - len(outcome.biases)) for outcome in outcomes]
    for outcome in outcomes:
        for record in outcome.records:
            biases = np.stack([way[record["step"] - 1][record["layer"]] for way in ways]).astype(np.float64)
            record["spread"] = float((biases.max(0) - biases.min(0)).max())


def describe_convergence(biases: Sequence[np.ndarray]) -> str:
    """Whether the biases on one batch, the first before step 1, came to rest, in words.

    >>> rest, other = np.zeros((1, 2)), np.ones((1, 2))
    >>> describe_convergence([other, rest, rest])
    'converged after 1 steps'
    >>> describe_convergence([rest, other, rest, other])
    'not converged in 3 steps: a cycle of 2'
    """
    steps = len(biases) - 1
    before = [step for step in range(steps) if np.array_equal(biases[step], biases[steps])]
    if not before:
        return f"not converged in {steps} steps"
    if before[-1] == steps - 1:
        return f"converged after {steps - 1} steps"
    return f"not converged in {steps} steps: a cycle of {steps - before[-1]}"
