"""What a load costs: steps of the expert-parallel model on gloo ranks, or the slowest device's experts on one card.

``L`` layers, ``E`` experts, ``P`` ranks or devices, ``T`` tokens of a microbatch, ``K`` experts a token.
"""

import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..experiments.build import make_optimizer
from ..experiments.model import Model, ModelConfig
from ..experiments.moe import Experts
from ..experiments.parallel import ParallelConfig, clip_gradients, join_ranks, wrap
from ..experiments.runs import write_json
from ..experiments.sweep.ranks import run_ranks
from ..experiments.train import language_loss
from .price_loads import laid_out, scaled

# learning rate 0: the weights stay, and with them the numbers that are multiplied
OPTIM = {"optim": {"learning_rate": 0.0, "betas": [0.9, 0.95], "weight_decay": 0.1}}
TASK, RESULT = "task.pt", "seconds.json"


@dataclass(frozen=True)
class Seconds:
    """By load and repetition: on the clock, and of the processor."""

    wall: list[list[float]]
    processor: list[list[float]]


def measure_ranks(loads: Sequence[Tensor], num_ranks: int, sizes: dict[str, Any], repeats: int) -> Seconds:
    """Seconds of a training step on ``P`` gloo ranks under each of the ``loads [L, E]``, by load and repetition.

    ``processor`` is that of the rank that took most: about what the step takes if every rank has a core of its own.

    Every rank holds ``E/P`` experts and brings one microbatch, its share of the sequences, with exactly that load in
    proportion.

    Args:
        loads: of any total.
        num_ranks: must divide the numbers of experts and sequences.
        sizes: ``width``, ``expert_width``, ``num_heads``, ``top_k``, ``sequences`` of a step and their ``length``.
        repeats: measurements of each load, after one that is thrown away.

    Raises:
        RankError: a rank failed.
    """
    with tempfile.TemporaryDirectory(prefix="equipoise-") as place:
        folder = Path(place)
        torch.save(
            {"loads": torch.stack(list(loads)), "ranks": num_ranks, "sizes": sizes, "repeats": repeats}, folder / TASK
        )
        run_ranks(take_part, folder, num_ranks)
        return Seconds(**json.loads((folder / RESULT).read_text(encoding="utf-8")))


def take_part(folder: str) -> None:
    """One rank of ``measure_ranks``."""
    task = torch.load(Path(folder) / TASK)
    sizes, loads_NLE = task["sizes"], task["loads"]
    sizes["sequences"] //= task["ranks"]
    parallel = ParallelConfig(strategy="fsdp", ranks=task["ranks"], ep=task["ranks"])
    with join_ranks(parallel) as ranks:
        model = make_model(sizes, *loads_NLE.shape[1:])
        experts = [layer.experts for layer in model.layers()]
        replica = wrap(model, ranks, parallel.strategy, units=list(model.blocks), experts=experts)
        step = make_step(model, replica, sizes, ranks.rank)
        calls = [forced_experts(load_LE, sizes) for load_LE in loads_NLE]
        own = time_in_turn([partial(step, forced) for forced in calls], task["repeats"], dist.barrier)
        most = [ranks.max(torch.tensor(times, dtype=torch.float64)).tolist() for times in (own.wall, own.processor)]
        if ranks.first:
            write_json(Path(folder) / RESULT, asdict(Seconds(*most)))


def make_model(sizes: dict[str, Any], num_layers: int, num_experts: int) -> Model:
    """A model of mixture-of-experts layers without balancers, the same weights on every rank."""
    shape = {name: sizes[name] for name in ("width", "expert_width", "num_heads", "top_k")}
    model = Model(ModelConfig(num_layers=num_layers, num_experts=num_experts, **shape))
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def make_step(model: Model, replica: nn.Module, sizes: dict[str, Any], rank: int) -> Callable[[Tensor], None]:
    """A training step as a function of the experts ``[L, T, K]`` that are forced on its one microbatch."""
    optimizer = make_optimizer(OPTIM, model)
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(256, (sizes["sequences"], sizes["length"] + 1), generator=generator)

    def step(forced: Tensor) -> None:
        language_loss(replica(tokens[:, :-1], forced=forced), tokens).backward()
        clip_gradients(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def forced_experts(load_LE: Tensor, sizes: dict[str, Any]) -> Tensor:
    """Experts ``[L, T, K]`` of a microbatch that has this load."""
    num_tokens = sizes["sequences"] * sizes["length"]
    return torch.stack([laid_out(counts, num_tokens) for counts in scaled(load_LE, num_tokens, sizes["top_k"])])


def time_in_turn(calls: Sequence[Callable[[], Any]], repeats: int, wait: Callable[[], Any]) -> Seconds:
    """Seconds of each call in each round after the first, in an order drawn anew, the same on all ranks.

    ``wait`` is called before and after: when it returns, all that was asked for is done everywhere.
    """
    seconds = Seconds([[] for _ in calls], [[] for _ in calls])
    generator = random.Random(0)
    for turn in range(1 + repeats):
        for index in generator.sample(range(len(calls)), len(calls)):
            wait()
            started, own = time.perf_counter(), time.process_time()
            calls[index]()
            own = time.process_time() - own
            wait()
            if turn:
                seconds.wall[index].append(time.perf_counter() - started)
                seconds.processor[index].append(own)
    return seconds


def measure_card(
    loads: Sequence[Tensor], num_devices: int, sizes: dict[str, Any], repeats: int, device: str = "cuda"
) -> Seconds:
    """Seconds of the slowest device's experts, forward and backward in bf16, on one card, as ``measure_ranks``.

    The card plays the device that has most to do for the microbatches of ``P`` devices: its ``E/P`` experts and their
    rows, one layer after the other. Nothing is sent.
    """
    num_local = loads[0].shape[1] // num_devices
    experts = Experts(num_local, sizes["width"], sizes["expert_width"]).to(device, torch.bfloat16)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.02)
    num_tokens = sizes["sequences"] * sizes["length"]
    rows = torch.randn(num_tokens * sizes["top_k"], sizes["width"], device=device, dtype=torch.bfloat16)
    busiest = [busiest_device(scaled(load_LE, num_tokens, sizes["top_k"]), num_devices).to(device) for load_LE in loads]

    def run(counts_LE: Tensor, totals: Sequence[int]) -> None:
        for counts, total in zip(counts_LE, totals, strict=True):
            x = rows[:total].detach().requires_grad_()
            y = experts(x, counts)
            y.backward(y.detach())
        experts.zero_grad()

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    # the host must know the sizes; before the clock starts
    calls = [partial(run, each, each.sum(-1).tolist()) for each in busiest]
    return time_in_turn(calls, repeats, wait)


def busiest_device(counts_LE: Tensor, num_devices: int) -> Tensor:
    """The counts ``[L, E/P]`` of the device that has most to do in each layer, experts in order on the devices.

    >>> busiest_device(torch.tensor([[1, 2, 5, 0], [4, 0, 0, 1]]), 2).tolist()
    [[5, 0], [4, 0]]
    """
    counts_LPE = counts_LE.unflatten(-1, (num_devices, -1))
    slowest_L = counts_LPE.sum(-1).argmax(-1)
    return counts_LPE[torch.arange(len(counts_LE)), slowest_L]
