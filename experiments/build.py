"""From a resolved config to model, data and learning rate; a wrong config is found here, before any training."""

import math
from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from ..kernels import backend
from .checks import check_choice, check_number, check_switch, check_whole
from .data import Batches, Corpus, validation_sequences
from .model import Model, ModelConfig
from .parallel import ParallelConfig
from .runs import flatten
from .tracker import check_login

NUM_BYTES = 256
SCHEDULES = ("cosine", "linear", "constant")


def check(config: dict[str, Any]) -> None:
    """Refuse a config that cannot be trained.

    Raises:
        ValueError: what was given and what was expected.
    """
    backend.check()
    with torch.device("meta"):
        make_model(config)
    _check_shards(config["model"], make_parallel(config))
    _check_optim(config["optim"])
    check_whole("validation.every", config["validation"]["every"])
    check_whole("checkpoint.every", config["checkpoint"]["every"])
    check_switch("checkpoint.keep", config["checkpoint"]["keep"])
    check_switch("capture", config["capture"])
    if config["capture"] and config["model"]["num_dense_layers"] == config["model"]["num_layers"]:
        raise ValueError("capture=true keeps router logits, and this model has no mixture-of-experts layer")
    check_whole("capture_every", config["capture_every"])
    _check_report(config)
    check_choice("tracker.mode", config["tracker"]["mode"], ("offline", "online", "none"))
    check_choice("tracker.metrics", config["tracker"]["metrics"], ("brief", "full"))
    check_login(config)
    if config["model"]["vocabulary"] < NUM_BYTES:
        raise ValueError(f"model.vocabulary must hold all {NUM_BYTES} bytes, got {config['model']['vocabulary']}")
    make_data(config)


def make_model(config: dict[str, Any]) -> Model:
    """The model with its balancers; weights not yet drawn.

    Raises:
        ValueError: unknown or missing keys, sizes that do not fit, a balancer that nothing uses.
    """
    sizes = _section(ModelConfig, config, "model")
    balancer = config["balancer"]
    unknown = set(balancer) - {"name", "bias", "gradient"}
    if unknown:
        raise ValueError(f"balancer has the keys name, bias and gradient, got {', '.join(sorted(unknown))} too")
    return Model(sizes, _maker(balancer, "bias"), _maker(balancer, "gradient"))


def make_parallel(config: dict[str, Any]) -> ParallelConfig:
    """How the ranks share the work.

    Raises:
        ValueError: unknown or missing keys, sizes that do not fit.
    """
    return _section(ParallelConfig, config, "parallel")


def _section(kind: Callable[..., Any], config: dict[str, Any], name: str) -> Any:
    try:
        return kind(**config[name])
    except TypeError as error:
        raise ValueError(f"{name}: {_plain(error)}") from error


def _check_shards(model: dict[str, Any], parallel: ParallelConfig) -> None:
    if model["num_dense_layers"] == model["num_layers"]:
        return
    if model["num_experts"] % parallel.ep:
        raise ValueError(f"parallel.ep must divide model.num_experts={model['num_experts']}, got {parallel.ep}")
    for name in ("width", "expert_width"):
        if model[name] % parallel.dp_shard:
            raise ValueError(
                f"parallel.ranks / (dp_replicate * ep) = {parallel.dp_shard} ranks share out the rows of every expert: "
                f"expected a divisor of model.{name}={model[name]}"
            )


def _maker(balancer: dict[str, Any], slot: str) -> Callable[[int, int], Any] | None:
    return partial(construct, f"balancer.{slot}", balancer[slot]) if balancer.get(slot) else None


def construct(where: str, section: Any, *sizes: Any) -> Any:
    """Call the ``_target_`` of a section with its options; a wrong one is an error of the config that says where."""
    if not isinstance(section, dict) or not isinstance(section.get("_target_"), str):
        raise ValueError(f"{where} must be a section with a _target_ (what to call), got {section!r}")
    options = dict(section)
    target = options.pop("_target_")
    try:
        return resolve_name(target)(*sizes, **options)
    except (TypeError, ValueError, ImportError, AttributeError) as error:
        raise ValueError(f"{where}: {_plain(error)} (given: {options})") from error


def make_data(config: dict[str, Any]) -> tuple[Corpus, Batches, Tensor]:
    """The corpus, its training batches and its validation sequences ``[N, S+1]`` int64.

    Raises:
        ValueError: data missing, unreadable, or shorter than one optimizer step.
    """
    data = config["data"]
    corpus = construct("data.source", data["source"])
    length = data["sequence_length"]
    batches = Batches(
        corpus.train,
        sequence_length=length,
        microbatch_sequences=data["microbatch_sequences"],
        microbatches=data["microbatches"],
        seed=config["seed"],
        chunk_sequences=data["chunk_sequences"],
    )
    held_out = validation_sequences(
        corpus.validation, sequence_length=length, num_sequences=data["validation_sequences"]
    )
    return corpus, batches, held_out


def make_optimizer(config: dict[str, Any], model: Model) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices only. Experts are a group of their own: their mesh may be another one."""
    optim = config["optim"]
    experts = [parameter for layer in model.layers() for parameter in layer.experts.parameters()]
    known = {id(parameter) for parameter in experts}
    others = [parameter for parameter in model.parameters() if id(parameter) not in known]
    matrices = [parameter for parameter in others if parameter.dim() > 1]
    vectors = [parameter for parameter in others if parameter.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": optim["weight_decay"]},
        {"params": experts, "weight_decay": optim["weight_decay"]},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=optim["learning_rate"], betas=tuple(optim["betas"]), fused=True)


def learning_rate(optim: dict[str, Any], step: int) -> float:
    """Learning rate of optimizer step ``step`` (from 1): linear warm-up, then decay to ``final`` of the peak.

    >>> optim = {"steps": 10, "learning_rate": 1.0, "warmup": 2, "schedule": "linear", "final": 0.0}
    >>> [learning_rate(optim, step) for step in (1, 2, 6, 10)]
    [0.5, 1.0, 0.5, 0.0]
    """
    peak, warmup = optim["learning_rate"], optim["warmup"]
    if step <= warmup:
        return peak * step / warmup
    done = (step - warmup) / max(optim["steps"] - warmup, 1)
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[optim["schedule"]]
    return peak * (optim["final"] + (1 - optim["final"]) * left)


def _check_report(config: dict[str, Any]) -> None:
    report = config["report"]
    check_number("report.tail", report["tail"], positive=True, high=1)
    axes, reference = report["axes"], report["reference"]
    if not isinstance(axes, list) or not all(isinstance(axis, str) for axis in axes):
        raise ValueError(f"report.axes must be a list of keys such as [model.width], got {axes!r}")
    for axis in axes:
        # what the report knows of a run beside its config may be one too
        known = (*flatten(config), "world_size", "data.sha256")
        if not any(key == axis or key.startswith(f"{axis}.") for key in known):
            raise ValueError(f"report.axes: there is no key {axis!r} in the config")
    if reference is not None and not isinstance(reference, str):
        raise ValueError(f"report.reference must be the label of a row, got {reference!r}")


def _check_optim(optim: dict[str, Any]) -> None:
    check_whole("optim.steps", optim["steps"])
    check_whole("optim.warmup", optim["warmup"], low=0)
    check_number("optim.learning_rate", optim["learning_rate"], positive=True)
    check_number("optim.clip", optim["clip"], positive=True)
    check_number("optim.weight_decay", optim["weight_decay"])
    check_number("optim.final", optim["final"], high=1)
    check_choice("optim.schedule", optim["schedule"], SCHEDULES)
    betas = optim["betas"]
    if not isinstance(betas, list) or len(betas) != 2:
        raise ValueError(f"optim.betas must be two numbers, got {betas!r}")
    for beta in betas:
        check_number("optim.betas", beta, high=0.9999999)


def _plain(error: Exception) -> str:
    """A constructor's complaint without the constructor's name."""
    return str(error).split("__init__() ")[-1]
