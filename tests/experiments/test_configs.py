"""Every config composes, what it describes can be built, and what an experiment says does not drift in silence.

``golden/`` holds the resolved default config, what each experiment changes in it, and what it sweeps. After a change
that is meant, write it anew: ``EQUIPOISE_WRITE_GOLDEN=1 .venv/bin/python -m pytest tests/experiments/test_configs.py``.
"""

import math
import os
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import yaml
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, open_dict

from equipoise.experiments import build
from equipoise.experiments.moe import Router
from equipoise.experiments.report.comparison import NEVER_AN_AXIS
from equipoise.experiments.runs import flatten

CONFIGS = files("equipoise.configs")
GOLDEN = Path(__file__).with_name("golden")


def names(group):
    return sorted(path.name[:-5] for path in CONFIGS.joinpath(group).iterdir() if path.name.endswith(".yaml"))


def resolved(*overrides):
    config = composed(*overrides)[0]
    # as the launcher settles it
    if config["parallel"]["ranks"] == "auto":
        config["parallel"]["ranks"] = 2
    return config


def composed(*overrides):
    """The resolved config, and what it sweeps."""
    with initialize_config_module("equipoise.configs", version_base="1.3"):
        config = compose("config", overrides=list(overrides), return_hydra_config=True)
        # some names are made of what was chosen
        HydraConfig.instance().set_config(config)
        sweep = OmegaConf.to_container(config.hydra.sweeper)["params"] or {}
        with open_dict(config):
            del config["hydra"]
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True), sweep


def choices(text):
    return str(text).split(",")


def golden(name):
    """What ``name.yaml`` should hold: for an experiment its changes of the default config and its sweep."""
    default, _ = composed()
    if name == "default":
        return default
    _, sweep = composed(f"experiment={name}")
    config, _ = composed(f"experiment={name}", *(f"{key}={choices(text)[0]}" for key, text in sweep.items()))
    before, after = flatten(default), flatten(config)
    changes = {key: after.get(key, "absent") for key in sorted({*before, *after}) if before.get(key) != after.get(key)}
    return {"changes of the first job": changes, "sweep": sweep}


@pytest.mark.parametrize("name", names("balancer"))
def test_every_preset_builds_and_trains_a_router(name):
    config = resolved(f"balancer={name}")
    assert config["balancer"]["name"] == name
    model = build.make_model(config)
    model.init_weights(torch.Generator().manual_seed(0))
    model(torch.zeros(2, 8, dtype=torch.long)).square().mean().backward()
    for router in model.routers():
        assert (router.bias is not None) == (config["balancer"]["bias"] is not None)
        assert (router.gradient is not None) == (config["balancer"]["gradient"] is not None)
        assert router.weight.grad.isfinite().all()


@pytest.mark.parametrize("slot", ["bias", "gradient"])
def test_every_slot_can_be_changed_alone(slot):
    for name in names(f"balancer/{slot}"):
        config = resolved("balancer=eqb_lei", f"balancer/{slot}={name}")
        routers = list(build.make_model(config).routers())
        assert all(isinstance(router, Router) for router in routers)
        assert (config["balancer"][slot] is None) == (name == "none")
        assert config["balancer"]["gradient" if slot == "bias" else "bias"] is not None


@pytest.mark.parametrize("name", names("experiment"))
def test_every_experiment_composes_and_passes_the_check(name):
    config = resolved(f"experiment={name}")
    build.check(config)
    assert config["name"] == name


@pytest.mark.parametrize("name", ["default", *names("experiment")])
def test_golden_configs(name):
    path, text = GOLDEN / f"{name}.yaml", yaml.safe_dump(golden(name), sort_keys=False)
    if os.environ.get("EQUIPOISE_WRITE_GOLDEN"):
        path.write_text(text)
    assert path.read_text() == text


def test_no_golden_config_is_left_over():
    assert sorted(path.stem for path in GOLDEN.iterdir()) == sorted(["default", *names("experiment")])


@pytest.mark.parametrize("name", names("experiment"))
def test_what_an_experiment_sweeps_is_compared(name):
    """What it sweeps beside balancer and seed are axes that its report knows, and its file says how to start it."""
    default, sweep = composed(f"experiment={name}")
    axes = {key for key in sweep if key != "seed" and not key.startswith("balancer")}
    assert axes <= set(default["report"]["axes"])
    assert NEVER_AN_AXIS not in default["report"]["axes"]
    assert f"equipoise experiment={name}" in CONFIGS.joinpath(f"experiment/{name}.yaml").read_text()


@pytest.mark.parametrize("group", ["model", "optim", "parallel", "tracker"])
def test_every_option_of_a_group_passes_the_check(group, monkeypatch):
    # for tracker=online, which asks for one
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert names(group)
    for name in names(group):
        build.check(resolved(f"{group}={name}"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.top_k=32"], "top_k=32 and num_experts=32"),
        (["model.width=0"], "model.width must be a positive whole number, got 0"),
        (["+model.depth=3"], "model: got an unexpected keyword argument 'depth'"),
        (["+balancer.bias.rank=3"], "balancer.bias: .*'rank'"),
        (["balancer.bias.key=fp8"], "balancer.bias: key must be 'bf16', 'fp32' or 'fixed8' to 'fixed16', got 'fp8'"),
        (["balancer.bias._target_=equipoise.balancers.Nope"], "balancer.bias: .*Nope"),
        (["balancer=histogram_qb", "model.selection=logit"], "HistogramQB needs selection='score'"),
        (["balancer=gshard", "balancer.gradient.coefficient=0"], "balancer.gradient: coefficient must be positive"),
        (["+balancer.extra=1"], "balancer has the keys name, bias and gradient, got extra too"),
        (["model.num_dense_layers=2", "model.dense_width=8"], "no mixture-of-experts layer"),
        (["report.axes=model.width"], "report.axes must be a list of keys such as .*, got 'model.width'"),
        (["report.axes=[model.depth]"], "report.axes: there is no key 'model.depth' in the config"),
        (["report.reference=3"], "report.reference must be the label of a row, got 3"),
        (["optim.steps=0"], "optim.steps must be a positive whole number, got 0"),
        (["optim.learning_rate=-1"], "optim.learning_rate must be a positive number, got -1"),
        (["optim.schedule=step"], "optim.schedule must be one of cosine, linear, constant, got 'step'"),
        (["optim.learning_rate=fast"], "optim.learning_rate must be a positive number, got 'fast'"),
        (["optim.clip=null"], "optim.clip must be a positive number, got None"),
        (["optim.betas=3"], "optim.betas must be two numbers, got 3"),
        (["optim.betas=[0.9,1.5]"], "optim.betas must be a number of at least 0 and at most 1, got 1.5"),
        (["optim.final=2"], "optim.final must be a number of at least 0 and at most 1, got 2"),
        (["report.tail=2"], "report.tail must be a positive number and at most 1, got 2"),
        (["report.tail=x"], "report.tail must be a positive number and at most 1, got 'x'"),
        (["checkpoint.keep=5"], "checkpoint.keep must be true or false, got 5"),
        (["model.vocabulary=10"], "model.vocabulary must hold all 256 bytes, got 10"),
        (["balancer.bias.frozen=maybe"], "balancer.bias: frozen must be true or false, got 'maybe'"),
        (["balancer=lei", "balancer.gradient.eta=abc"], "balancer.gradient: .*given: .*'eta': 'abc'"),
        (["validation.every=0"], "validation.every must be a positive whole number, got 0"),
        (["parallel.strategy=zero"], "parallel.strategy must be one of ddp, fsdp, got 'zero'"),
        (["parallel.recompute=some"], "parallel.recompute must be one of none, selective, full, got 'some'"),
        (["+parallel.ep=2"], "parallel.strategy=ddp every rank holds the whole model.*ep=2"),
        (["parallel=ep", "parallel.ranks=3"], r"must divide parallel.ranks, got 1 \* 2 and 3 ranks"),
        (["parallel=fsdp", "parallel.dp_replicate=0"], "parallel.dp_replicate must be a positive whole number, got 0"),
        (["parallel=ep", "parallel.ep=3", "parallel.ranks=3"], "parallel.ep must divide model.num_experts=32, got 3"),
        (["parallel=fsdp", "parallel.ranks=5"], "expected a divisor of model.width=64"),
        (["+parallel.pp=2"], "parallel: got an unexpected keyword argument 'pp'"),
        (["balancer=eqb", "model.capacity_factor=1.25"], "capacity_factor=1.25 does not go with ExactQB: a quantile"),
        (["parallel.precision=fp8"], "parallel.precision must be one of fp32, bf16, got 'fp8'"),
        (["tracker.mode=maybe"], "tracker.mode must be one of offline, online, none, got 'maybe'"),
        (["data.source=null"], "data.source must be a section with a _target_ .*, got None"),
        (["data.sequence_length=-1"], "sequence_length"),
        (["data=text", "data.path=/no/such/folder"], "/no/such/folder"),
    ],
)
def test_a_bad_config_is_one_clear_error(overrides, message):
    with pytest.raises(ValueError, match=message):
        build.check(resolved(*overrides))


def test_data_shorter_than_a_step_is_refused(tmp_path):
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text("too short")
    with pytest.raises(ValueError, match="tokens"):
        build.check(resolved("data=text", f"data.path={tmp_path}"))


def test_the_bias_is_in_no_optimizer_group():
    config = resolved("balancer=eqb")
    model = build.make_model(config)
    optimizer = build.make_optimizer(config, model)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in model.parameters()}
    assert not any(id(router.bias.bias) in held for router in model.routers())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0]


def test_learning_rate_schedules():
    optim = {"steps": 110, "learning_rate": 2.0, "warmup": 10, "schedule": "cosine", "final": 0.1}
    assert build.learning_rate(optim, 5) == 1.0
    assert build.learning_rate(optim, 10) == 2.0
    assert math.isclose(build.learning_rate(optim, 60), 2 * (0.1 + 0.9 * 0.5))
    assert math.isclose(build.learning_rate(optim, 110), 0.2)
    assert build.learning_rate(optim | {"schedule": "constant"}, 110) == 2.0
    assert build.learning_rate(optim | {"warmup": 0}, 1) < 2.0
