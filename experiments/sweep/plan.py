"""What a sweep will do, before it does it, counted from its configs. ``estimate.py`` measures."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from rich.console import Console

from ...balancers.base import FixedDtype
from .. import build
from ..model import Model
from ..runs import FREE, RunState, checkpoint_step, flatten, run_label, run_state
from .job import Job
from .progress import print_line

FP32_BYTES = 4
FLOPS_RULE = (
    "FLOPs a token, forward and backward: 6 x the active parameters that multiply (all but embedding and norms) + "
    "12 x layers x width x sequence_length for attention; recompute=full adds the forward of the blocks"
)


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters: all; those ``active`` for a token; of these, in matrices other than the embedding,
    ``multiplying``; of these, in the ``head``."""

    total: int
    active: int
    multiplying: int
    head: int


def count_parameters(model: Model) -> Parameters:
    """Count the parameters of a model, which may be on the meta device."""
    counts = model.count_parameters()
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)
    multiplying = counts["active"] - vectors - model.embedding.weight.numel()
    return Parameters(counts["total"], counts["active"], multiplying, model.head.weight.numel())


def count_flops(
    parameters: Parameters, *, layers: int, width: int, sequence_length: int, recompute: str = "none"
) -> int:
    """FLOPs of forward and backward per token: two a multiplication and addition, twice as many back as forth.

    Attention counts all pairs of positions, though half of them are masked, as is the custom; ``recompute=full`` runs
    the blocks once more (torch stops before the last product of each), ``selective`` keeps their products.

    >>> count_flops(Parameters(100, 80, 50, 10), layers=1, width=4, sequence_length=8)
    684
    >>> count_flops(Parameters(100, 80, 50, 10), layers=1, width=4, sequence_length=8, recompute="full")
    892

    Reference: Chowdhery et al., arXiv 2204.02311, appendix B.
    """
    attention = 4 * layers * width * sequence_length
    again = 2 * (parameters.multiplying - parameters.head) + attention if recompute == "full" else 0
    return 3 * (2 * parameters.multiplying + attention) + again


def count_memory(config: Mapping[str, Any]) -> dict[str, int]:
    """Bytes a rank holds through a step, by what they are; activations are not among them.

    Weights, gradients and AdamW's two moments are fp32. DDP keeps a second copy of the gradients in its buckets; FSDP
    shares everything out over ``dp_shard * ep`` ranks. Balancers: biases, accumulators and the margins of a step.
    """
    parallel = build.make_parallel(dict(config))
    model = make_model(config)
    share = -(-sum(parameter.numel() for parameter in model.parameters()) // (parallel.dp_shard * parallel.ep))
    for router in model.routers():
        if router.bias is not None:
            router.bias.reserve(tokens_per_step(config) // parallel.ranks)
    held = {"weights": share, "gradients": share, "buckets of DDP": share, "moments of AdamW": 2 * share}
    if parallel.strategy != "ddp":
        del held["buckets of DDP"]
    return {name: FP32_BYTES * number for name, number in held.items()} | {"balancers": _balancer_bytes(model)}


def _balancer_bytes(model: Model) -> int:
    modules = [module for module in model.modules() if isinstance(module, FixedDtype)]
    tensors = [getattr(module, name) for module in modules for name in module._scratch]
    return sum(tensor.nbytes for tensor in (*tensors, *model.buffers()))


def make_model(config: Mapping[str, Any]) -> Model:
    """The model of a config without its weights, on the meta device."""
    with torch.device("meta"):
        return build.make_model(dict(config))


def tokens_per_step(config: Mapping[str, Any]) -> int:
    """Tokens of an optimizer step, over all ranks."""
    data = config["data"]
    return data["microbatches"] * data["microbatch_sequences"] * data["sequence_length"]


def varying(configs: Sequence[Mapping[str, Any]], leave_out: Iterable[str] = ()) -> list[str]:
    """The dotted keys whose values differ, but for sections to ``leave_out`` and what cannot change a result.

    >>> varying([{"seed": 0, "optim": {"steps": 3}}, {"seed": 1, "optim": {"steps": 3}}])
    ['seed']
    """
    flats = [flatten(config) for config in configs]
    keys = dict.fromkeys(key for flat in flats for key in flat if key.split(".")[0] not in {*FREE, *leave_out})
    return [key for key in keys if len({_text(flat.get(key)) for flat in flats}) > 1]


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def distinguish(configs: Sequence[Mapping[str, Any]]) -> tuple[list[str], dict[str, int]]:
    """What tells runs of one balancer and seed apart, for each of them; and what is swept, with numbers of values.

    >>> configs = [{"balancer": {"name": "lei", "eta": eta}, "seed": 0} for eta in (1, 2)]
    >>> distinguish(configs)
    (['eta=1', 'eta=2'], {'balancer.eta': 2})
    """
    labels = [run_label(config) for config in configs]
    members: dict[str, list[Mapping[str, Any]]] = {label: [] for label in labels}
    for config, label in zip(configs, labels, strict=True):
        members[label].append(config)
    alike = {label: varying(group) for label, group in members.items()}
    flats = [flatten(config) for config in configs]
    settings = [
        " ".join(_setting(flat, key) for key in alike[label]) for flat, label in zip(flats, labels, strict=True)
    ]
    keys = ["balancer.name", "seed", *dict.fromkeys(key for keys in alike.values() for key in keys)]
    numbers = {key: len({_text(flat[key]) for flat in flats if key in flat}) for key in keys}
    return settings, {key.removesuffix(".name"): number for key, number in numbers.items() if number > 1}


def _setting(flat: Mapping[str, Any], key: str) -> str:
    return f"{key.rpartition('.')[2]}={flat.get(key)}"


@dataclass(frozen=True, eq=False)
class Group:
    """Jobs that differ in nothing but balancer and seed, so that one stands for all."""

    jobs: list[Job]

    @property
    def config(self) -> dict[str, Any]:
        return self.jobs[0].config

    @property
    def left(self) -> list[Job]:
        """Those that are not done."""
        return [job for job in self.jobs if run_state(job.folder) != RunState.DONE]

    @property
    def steps(self) -> int:
        return self.config["optim"]["steps"]

    @property
    def tokens(self) -> int:
        """Of a run."""
        return self.steps * tokens_per_step(self.config)

    @cached_property
    def parameters(self) -> Parameters:
        return count_parameters(make_model(self.config))

    @property
    def ranks(self) -> int:
        return self.config["parallel"]["ranks"]

    @property
    def flops(self) -> int:
        """Per token."""
        model, recompute = self.config["model"], self.config["parallel"]["recompute"]
        length = self.config["data"]["sequence_length"]
        sizes = {"layers": model["num_layers"], "width": model["width"], "sequence_length": length}
        return count_flops(self.parameters, recompute=recompute, **sizes)

    @cached_property
    def memory(self) -> dict[str, int]:
        """Of the job that holds most, see ``count_memory``."""
        counted = {_text(job.config["balancer"]): job.config for job in self.jobs}
        return max((count_memory(config) for config in counted.values()), key=lambda held: sum(held.values()))


def make_groups(jobs: Iterable[Job]) -> list[Group]:
    """Jobs that differ in more than balancer and seed, apart."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        rest = {key: value for key, value in job.config.items() if key not in {*FREE, "balancer", "seed"}}
        groups.setdefault(_text(rest), []).append(job)
    return [Group(members) for members in groups.values()]


def describe_jobs(jobs: Sequence[Job], total: int) -> str:
    """``24 in runs/table: 20 to run, 3 done, 1 to resume (eqb-s1 from step 50)``; ``total`` counts the refused too."""
    steps = {job.label: checkpoint_step(job.folder) for job in jobs if run_state(job.folder) == RunState.CUT}
    resumed = [f"{label} from step {step}" for label, step in steps.items() if step]
    done = sum(run_state(job.folder) == RunState.DONE for job in jobs)
    counts = {"to run": len(jobs) - done - len(resumed), "done": done, "to resume": len(resumed)}
    parts = [f"{number} {what}" for what, number in (counts | {"refused": total - len(jobs)}).items() if number]
    if resumed:
        shown = ", ".join(resumed[:3]) + ", ..." * (len(resumed) > 3)
        parts = [f"{part} ({shown})" if part.endswith("to resume") else part for part in parts]
    places = ", ".join(dict.fromkeys(str(job.folder.parent) for job in jobs))
    return f"{total} in {places}: {', '.join(parts)}"


def describe_sweep(jobs: Sequence[Job]) -> str:
    """``balancer (8), seed (3)``: what differs over jobs, and how many values there are; or nothing."""
    swept = distinguish([job.config for job in jobs])[1]
    return ", ".join(f"{key} ({number})" for key, number in swept.items()) or "nothing"


def span(values: Iterable[float], show: Callable[[Any], str] = "{:,}".format) -> str:
    """A number, or the smallest and the largest of several.

    >>> span([1000, 1000]), span([3, 1, 2])
    ('1,000', '1 to 3')
    """
    low, high = min(values := list(values)), max(values)
    return show(low) if show(low) == show(high) else f"{show(low)} to {show(high)}"


def describe_parameters(groups: Sequence[Group]) -> str:
    """``484,416 total, 254,016 active for a token``"""
    counts = [group.parameters for group in groups]
    return f"{span(count.total for count in counts)} total, {span(count.active for count in counts)} active for a token"


def print_plan(jobs: Sequence[Job], total: int, console: Console) -> None:
    """Say in a few lines what a sweep will do; ``total`` counts the jobs that were refused too."""
    groups = make_groups(jobs)
    print_line(console, f"jobs: {describe_jobs(jobs, total)}")
    ranks, steps = span(group.ranks for group in groups), span(group.steps for group in groups)
    tokens = span(group.tokens for group in groups)
    print_line(console, f"swept: {describe_sweep(jobs)}; ranks {ranks}, steps {steps}, tokens a run {tokens}")
    print_line(console, f"parameters: {describe_parameters(groups)}")
