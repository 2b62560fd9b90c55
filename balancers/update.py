"""Drives the coroutines of all layers in lockstep: one stacked collective per round, whatever the number of layers."""

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .base import Balancer, BiasBalancer, GradientBalancer, Solve

# yields the statistics of all layers, receives their sums over token shards, returns the solutions of all layers
Rounds = Generator[list[Tensor], list[Tensor], list[Tensor]]
Statistic = TypeVar("Statistic")
Result = TypeVar("Result")
# attributes of a balancer that are no settings: ranks may differ in them
OWN_OF_A_RANK = frozenset({"training", "loss_scale", "token_shards", "microbatch_shards", "last_value", "pooled_load"})


@torch.no_grad()
def update_balancers(
    balancers: nn.Module | Iterable[Balancer],
    group: dist.ProcessGroup | None = None,
    *,
    observe_again: Callable[[], None] | None = None,
) -> None:
    """One update of every bias, once per optimizer step, after ``backward`` of its last microbatch.

    Every rank of the group must call it with the same layers, also one that saw no token. Gradient balancers are reset.

    Args:
        balancers: a model whose balancers are found in module order, or the balancers.
        group: process group of the ranks that hold different tokens (token shards); None is the default group if
            ``torch.distributed`` is initialised, else this process alone.
        observe_again: runs the forwards of this step once more, in training mode and on the same tokens; called without
            gradients, on every rank, when an estimator that keeps little has kept too little (``ExactQB`` with
            ``fallback="observe"``). Nothing else counts what it routes. An FSDP2 model must be resharded afterwards:
            its next forward would run on parameters gathered before the optimizer's step.

    Raises:
        ValueError: something in ``balancers`` is none, or needs ``observe_again``.
    """
    found = _find(balancers)
    active = [balancer for balancer in found if isinstance(balancer, BiasBalancer) and not balancer.frozen]

    def solve(balancers: Sequence[Sequence[BiasBalancer]]) -> list[Tensor]:
        rounds = lockstep([replicas[0].solve() for replicas in balancers])
        return drive(rounds, lambda statistics: sum_over_shards(statistics, group))

    _adopt_solutions([[balancer] for balancer in active], solve, observe_again)
    reset_balancers(found)


def _adopt_solutions(
    layers: Sequence[Sequence[BiasBalancer]],
    solve: Callable[[Sequence[Sequence[BiasBalancer]]], list[Tensor]],
    observe_again: Callable[[], None] | None,
) -> None:
    """Solve all layers, those again that were incomplete, and move their biases.

    ``layers[l]`` are the replicas of layer ``l`` in this process.
    """
    for balancer in (replicas[0] for replicas in layers):
        if balancer.may_observe_again and observe_again is None:
            raise ValueError(
                f"{type(balancer).__name__} may need the forwards of a step once more: expected observe_again=, "
                "a function that runs them, or its fallback='keep'"
            )
    solutions = dict(enumerate(solve(layers)))
    lacking = [layer for layer, replicas in enumerate(layers) if replicas[0].incomplete]
    if lacking and observe_again is not None:
        for balancer in (balancer for layer in lacking for balancer in layers[layer]):
            balancer.reopen()
        observe_again()
        solutions |= zip(lacking, solve([layers[layer] for layer in lacking]), strict=True)
    for layer, replicas in enumerate(layers):
        for balancer in replicas:
            balancer.adopt(solutions[layer])


def check_replicas(balancers: nn.Module | Iterable[Balancer], group: dist.ProcessGroup | None = None) -> None:
    """Make sure, once before training, that every rank would take part in the same collectives with the same bias.

    Ranks with other layers or settings hang in an update or give wrong sums. A collective over ``group``, as in
    ``update_balancers``; nothing to do in one process.

    Raises:
        ValueError: on every rank alike, with the first difference in number, classes, settings (``frozen`` is one) or
            bias of the balancers, and the ranks that have it.
    """
    mine = [_describe(balancer) for balancer in _find(balancers)]
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    described: list[Any] = [None] * len(ranks)
    dist.all_gather_object(described, mine, group)
    for what, values in _compare(described):
        if len(set(values)) > 1:
            other = next(value for value in values if value != values[0])
            others = [rank for rank, value in zip(ranks, values, strict=True) if value == other]
            raise ValueError(
                f"every rank must have the same balancers, got {what} {values[0]} on rank {ranks[0]} and {other} on "
                f"ranks {others}"
            )


def _describe(balancer: Balancer) -> dict[str, str]:
    """Class, settings (numbers, words, switches), shapes of what is summed and a digest of the bias, in words."""
    kind = type(balancer)
    settings = {
        name: repr(value)
        for name, value in vars(balancer).items()
        if isinstance(value, str | int | float | None) and not name.startswith("_") and name not in OWN_OF_A_RANK
    }
    shapes = {name: str(tuple(getattr(balancer, name).shape)) for name in balancer.accumulators}
    described = {"class": f"{kind.__module__}.{kind.__qualname__}", **settings, **shapes}
    if isinstance(balancer, BiasBalancer):
        described["bias"] = hashlib.sha256(balancer.bias.cpu().numpy().tobytes()).hexdigest()[:16]
    return described


def _compare(described: Sequence[list[dict[str, str]]]) -> Iterator[tuple[str, list[str]]]:
    """Names of what must be equal, in order, and what each rank has."""
    yield "number of balancers", [str(len(layers)) for layers in described]
    for index, replicas in enumerate(zip(*described, strict=True)):
        for name in dict.fromkeys(name for replica in replicas for name in replica):
            yield f"balancer {index}: {name}", [replica.get(name, "nothing") for replica in replicas]


def reset_balancers(balancers: nn.Module | Iterable[Balancer]) -> None:
    """Drop what was observed of an optimizer step that is aborted or skipped; biases stay."""
    for balancer in _find(balancers):
        balancer.reset()


@torch.no_grad()
def simulate_ranks(ranks: Sequence[Sequence[BiasBalancer]], *, observe_again: Callable[[], None] | None = None) -> None:
    """One update as ``update_balancers`` would make it over ``len(ranks)`` token shards, in this process.

    Args:
        ranks: ``ranks[r][l]`` is the balancer of layer ``l`` on virtual rank ``r``; afterwards every replica of a
            layer has the same new bias.
        observe_again: as in ``update_balancers``, for all virtual ranks in one call.

    Raises:
        ValueError: ranks with different numbers of layers, a layer that is frozen on some ranks only, something that
            is no bias balancer or needs ``observe_again``.
    """
    if len({len(layers) for layers in ranks}) > 1:
        raise ValueError(f"every rank must have the same layers, got {[len(layers) for layers in ranks]} balancers")
    for balancer in (balancer for layers in ranks for balancer in layers):
        if not isinstance(balancer, BiasBalancer):
            raise ValueError(f"expected bias balancers, got {type(balancer).__name__} among them")
    if any(len({balancer.frozen for balancer in replicas}) > 1 for replicas in zip(*ranks, strict=True)):
        raise ValueError("the replicas of a layer must be frozen on all ranks or on none")
    active = [[balancer for balancer in layers if not balancer.frozen] for layers in ranks]

    def solve(layers: Sequence[Sequence[BiasBalancer]]) -> list[Tensor]:
        return run_locally(lockstep([_over_ranks([balancer.solve() for balancer in replicas]) for replicas in layers]))

    _adopt_solutions(list(zip(*active, strict=True)), solve, observe_again)
    for layers in ranks:
        reset_balancers(layers)


def drive(coroutine: Generator[Statistic, Statistic, Result], answer: Callable[[Statistic], Statistic]) -> Result:
    """Run a coroutine to its end, answering every statistic that it yields; returns what it returns."""
    try:
        statistic = next(coroutine)
        while True:
            statistic = coroutine.send(answer(statistic))
    except StopIteration as stop:
        return stop.value


def run_locally(coroutine: Generator[Statistic, Statistic, Result]) -> Result:
    """Run a coroutine on this process alone: every sum is the statistic itself."""
    return drive(coroutine, lambda statistic: statistic)


def lockstep(solves: Sequence[Solve]) -> Rounds:
    """Join the coroutines of all layers: each round yields what every unfinished layer yields."""
    solutions: dict[int, Tensor] = {}
    waiting: dict[int, Tensor] = {}

    def advance(layer: int, total: Tensor | None) -> None:
        try:
            waiting[layer] = solves[layer].send(total)  # type: ignore[arg-type]
        except StopIteration as stop:
            waiting.pop(layer, None)
            solutions[layer] = stop.value

    for layer in range(len(solves)):
        advance(layer, None)
    while waiting:
        layers = list(waiting)
        totals = yield [waiting[layer] for layer in layers]
        for layer, total in zip(layers, totals, strict=True):
            advance(layer, total)
    return [solutions[layer] for layer in range(len(solves))]


def sum_over_shards(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Sums over the token shards in one collective per dtype; the given tensors keep their values."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return list(tensors)
    sums: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        members = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        stacked = torch.cat([tensors[index].flatten() for index in members])
        dist.all_reduce(stacked, group=group)
        parts = stacked.split([tensors[index].numel() for index in members])
        sums.update((index, part.view_as(tensors[index])) for index, part in zip(members, parts, strict=True))
    return [sums[index] for index in range(len(tensors))]


def pool_load(balancer: GradientBalancer, load: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The load of a forward summed over ``group``, like ``load``, which keeps its values.

    A recomputation must not communicate and gets the sum of the last forward that counted. Only a second backward pass
    through re-entrant checkpointing uses it, see ``GateWeights``.
    """
    if balancer.counts_forward():
        balancer.pooled_load = sum_over_shards([load], group)[0]
    pooled = balancer.pooled_load
    return load if pooled is None or pooled.shape != load.shape else pooled


def _over_ranks(solves: Sequence[Solve]) -> Solve:
    """One coroutine for the replicas of a layer: yields the sum of what they yield."""
    rounds = lockstep(solves)
    try:
        statistics = next(rounds)
        while True:
            total = yield torch.stack(statistics).sum(0, dtype=statistics[0].dtype)
            statistics = rounds.send([total] * len(statistics))
    except StopIteration as stop:
        return stop.value[0]


def _find(balancers: nn.Module | Iterable[Balancer]) -> list[Balancer]:
    if isinstance(balancers, nn.Module):
        return [module for module in balancers.modules() if isinstance(module, Balancer)]
    found = list(balancers)
    for each in found:
        if not isinstance(each, Balancer):
            raise ValueError(f"expected a model or balancers, got {type(each).__name__} among them")
    return found
