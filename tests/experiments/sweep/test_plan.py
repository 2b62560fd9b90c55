"""What is counted before a sweep, and the dry run."""

import copy
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from rich.console import Console
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from equipoise.experiments import launch, runs
from equipoise.experiments.model import Model, ModelConfig
from equipoise.experiments.sweep import estimate, jobs, plan
from equipoise.experiments.sweep.estimate import Measurement
from equipoise.experiments.sweep.job import Job
from equipoise.experiments.sweep.progress import format_seconds
from equipoise.experiments.sweep.ranks import RankError

TRAINER = SimpleNamespace(validate=lambda config: None, main=None)


@pytest.fixture(scope="module")
def default() -> dict[str, Any]:
    """The default config."""
    with initialize_config_module("equipoise.configs", version_base="1.3"):
        return OmegaConf.to_container(compose("config", overrides=["tracker=none"]), resolve=True)


def changed(config: dict[str, Any], **values: Any) -> dict[str, Any]:
    """A copy; ``optim__steps=3`` sets ``optim.steps``."""
    config = copy.deepcopy(config)
    for key, value in values.items():
        *path, last = key.split("__")
        section = config
        for name in path:
            section = section[name]
        section[last] = value
    return config


# counting


def dense_model(layers: int = 2) -> Model:
    sizes = ModelConfig(
        width=32,
        num_heads=2,
        num_layers=layers,
        num_experts=4,
        top_k=2,
        expert_width=16,
        num_dense_layers=layers,
        dense_width=48,
    )
    model = Model(sizes)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_flops_are_those_that_torch_counts(recompute: str) -> None:
    layers, width, length = 2, 32, 16
    model = dense_model(layers)
    model.set_recompute(recompute)
    # the only attention that torch's counter knows on a CPU
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(3, length, dtype=torch.long)).sum().backward()
    sizes = {"layers": layers, "width": width, "sequence_length": length}
    counted = plan.count_flops(plan.count_parameters(model), **sizes, recompute=recompute)
    # a recomputation stops before the last product of a block
    skipped = 2 * layers * 48 * width if recompute == "full" else 0
    assert (counted - skipped) * 3 * length == counter.get_total_flops()


def test_flops_of_an_expert_layer_count_the_active_experts(default: dict[str, Any]) -> None:
    model = plan.make_model(default)
    counted = plan.count_parameters(model)
    # head; per layer: queries to values, out, router, 4 experts, shared expert
    a_layer = 4 * 64 * 64 + 32 * 64 + 4 * (64 * 64 + 32 * 64) + (64 * 128 + 64 * 64)
    assert counted.multiplying == 256 * 64 + 2 * a_layer
    assert counted.head == 256 * 64
    assert {"total": counted.total, "active": counted.active} == model.count_parameters()


@pytest.mark.parametrize(
    ("changes", "shards", "copies"),
    [
        ({"parallel__ranks": 2}, 1, 5),
        ({"parallel": {"strategy": "fsdp", "ranks": 8, "dp_replicate": 2, "ep": 2}}, 4, 4),
    ],
)
def test_memory(default: dict[str, Any], changes: dict[str, Any], shards: int, copies: int) -> None:
    config = changed(default, **changes)
    held = plan.count_memory(config)
    parameters = plan.make_model(config).count_parameters()["total"]
    balancers = held.pop("balancers")
    assert sum(held.values()) == 4 * copies * parameters // shards
    # two layers: margins of all tokens of this rank in bf16, and the bias
    tokens = 8 * 2 * 128 // config["parallel"]["ranks"]
    assert 2 * (2 * tokens * 32 + 4 * 32) <= balancers <= 2 * (2 * tokens * 32 + 4 * 32) + 100


# what tells jobs apart


def make_jobs(configs: list[dict[str, Any]]) -> list[Job]:
    return jobs.check(configs, TRAINER, Console(file=io.StringIO()))[0]


@pytest.fixture
def sweep(default: dict[str, Any], tmp_path: Path) -> list[Job]:
    """Two widths of experts, two seeds; one run is done, one has a checkpoint."""
    base = changed(default, runs=str(tmp_path), name="table", parallel__ranks=2, optim__steps=10, validation__every=4)
    found = make_jobs([changed(base, seed=seed, model__expert_width=width) for width in (16, 32) for seed in (0, 1)])
    for job in found[:2]:
        runs.open_run(job.folder, job.config)
    runs.write_json(found[0].folder / "summary.json", {})
    (found[1].folder / "checkpoints" / "step-8").mkdir(parents=True)
    return found


def test_settings_tell_jobs_apart(sweep: list[Job]) -> None:
    assert [job.label for job in sweep] == [
        f"eqb-s{seed} expert_width={width}" for width in (16, 32) for seed in (0, 1)
    ]
    assert plan.describe_sweep(sweep) == "seed (2), model.expert_width (2)"
    assert [[job.index for job in group.jobs] for group in plan.make_groups(sweep)] == [[1, 2], [3, 4]]


def test_jobs_of_one_label_are_compared_once(sweep: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    compared, varying = [], plan.varying
    monkeypatch.setattr(plan, "varying", lambda configs: compared.append(len(configs)) or varying(configs))
    assert plan.distinguish([job.config for job in sweep])[0] == [job.settings for job in sweep]
    assert compared == [2, 2]


def test_jobs_are_counted_by_state(sweep: list[Job], tmp_path: Path) -> None:
    assert plan.describe_jobs(sweep, 5) == (
        f"5 in {tmp_path}/table: 2 to run, 1 done, 1 to resume (eqb-s1 expert_width=16 from step 8), 1 refused"
    )


# the dry run


# seconds of the fake clock
NOW = 1_000_000.0


def leave(seconds: list[float], validation: float) -> Any:
    """Stands in for ranks that start at ``NOW``: leaves what a run of these steps leaves, with its times."""

    def run_ranks(main: Any, folder: Path, ranks: int) -> None:
        config = runs.load_config(folder)
        assert config["tracker"]["mode"] == "none"
        assert config["optim"]["steps"] == len(seconds) < config["validation"]["every"]
        (folder / "log" / "1").mkdir(parents=True)
        rows = [json.dumps({"step": step, "seconds": value}) + "\n" for step, value in enumerate(seconds, start=1)]
        (folder / "metrics.jsonl").write_text("".join(rows))
        runs.write_json(folder / "environment.json", {})
        runs.write_json(folder / "summary.json", {"peak_memory_bytes": 5_000_000})
        times = {"log/1": NOW + 2, "environment.json": NOW + 5}
        times["metrics.jsonl"] = times["environment.json"] + sum(seconds) + validation
        for name, when in times.items():
            os.utime(folder / name, (when, when))

    return run_ranks


def dry_run(found: list[Job], **options: Any) -> tuple[bool, str]:
    out = io.StringIO()
    settings: dict[str, Any] = {"measured": True} | options
    complete = estimate.dry_run(found, len(found), TRAINER, Console(file=out, width=400), **settings)
    return complete, out.getvalue()


def rows_of(text: str) -> dict[str, str]:
    """The rows of the first table."""
    lines = [line.strip() for line in text.splitlines() if line.startswith(" ") and line.strip()]
    return {line[:14].strip(): line[14:].strip() for line in lines}


def test_measurement_from_what_a_run_leaves(sweep: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [4.0, 1.0, 1.0, *([0.5] * 7)]
    monkeypatch.setattr(estimate, "run_ranks", leave(seconds, validation=3.0))
    # when it began and when it ended
    clock = iter([NOW, NOW + 5 + sum(seconds) + 3 + 1.5])
    monkeypatch.setattr(estimate, "time", SimpleNamespace(time=lambda: next(clock)))
    progress = jobs.Progress(Console(file=io.StringIO()), 1)
    found = estimate.measure(1, sweep[2], TRAINER, progress)
    assert found.steps == [0.5] * 7
    assert found.boot == pytest.approx(2)
    # from the ranks to the first step, and what the first three took longer
    assert found.start == pytest.approx(3 + 4.5)
    assert found.validation == pytest.approx(3)
    assert found.end == pytest.approx(1.5)
    assert found.peak_bytes == 5_000_000


def test_time_of_a_run() -> None:
    found = Measurement(boot=9, start=2, steps=[float(n) for n in range(11)], validation=3, end=1, peak_bytes=None)
    assert found.run_seconds(steps=100, validations=2) == (2 + 6 + 1 + 100, 2 + 6 + 1 + 900)


def test_dry_run_prints_the_plan_and_leaves_nothing(
    sweep: list[Job], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(estimate, "run_ranks", leave([1.0] * 10, validation=3.0))
    measured = Measurement(boot=100, start=2, steps=[1.0, 1.0], validation=3, end=1, peak_bytes=5_000_000)
    monkeypatch.setattr(estimate, "_read", lambda folder, began, ended: measured)
    complete, text = dry_run(sweep)
    assert complete
    assert sorted(tmp_path.rglob("*")) == before
    facts = rows_of(text)
    assert facts["steps"] == "10 a run, 40 all"
    assert facts["tokens"] == "20,480 a run, 81,920 all"
    groups = plan.make_groups(sweep)
    totals = [group.parameters.total for group in groups]
    assert facts["parameters"].startswith(f"{totals[0]:,} to {totals[1]:,} total, ")
    flops = sum(2 * 20_480 * group.flops for group in groups)
    assert facts["FLOPs"].endswith(f"{estimate.scientific(flops)} all")
    assert facts["peak memory"] == "5.0 MB a rank, measured"
    # of one job two steps and a validation are left, of two ten and three
    assert facts["time a run"] == "8 s to 22 s, an estimate"
    in_all = format_seconds(100 + (2 + 3 + 1 + 2) + 2 * (2 + 9 + 1 + 10))
    assert facts["time in all"] == f"{in_all}, an estimate, for 3 left"


def test_dry_run_without_a_measurement(sweep: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    def run_ranks(main: Any, folder: Path, ranks: int) -> None:
        raise RankError("ValueError: no room", 1, folder / "log/1/rank1.err")

    monkeypatch.setattr(estimate, "run_ranks", run_ranks)
    complete, text = dry_run(sweep, measured=False)
    assert complete
    assert rows_of(text)["time"] == "no estimate"
    complete, text = dry_run(sweep)
    assert not complete
    assert "no estimate from eqb-s1 expert_width=16: RankError: ValueError: no room" in text
    assert rows_of(text)["time"] == "no estimate"


def test_dry_run_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With real ranks: a few steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(
        "sys.argv", ["equipoise", "experiment=smoke", "balancer=eqb", "parallel.ranks=1", "dry_run=true"]
    )
    assert launch.main() == 0
    facts = rows_of(capsys.readouterr().out)
    assert facts["jobs"] == "1 in runs/smoke: 1 to run"
    assert facts["peak memory"].endswith("MB a rank, measured")
    assert facts["time in all"].endswith("an estimate, for 1 left")
    assert list(tmp_path.iterdir()) == []
