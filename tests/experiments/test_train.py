"""Runs of a tiny model: two real ranks from end to end, and one rank in this process for what needs a hand inside."""

import copy
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from equipoise.experiments import moe, train
from equipoise.experiments.build import make_model
from equipoise.experiments.measure import Meter
from equipoise.experiments.parallel import ParallelConfig, Ranks, join_ranks
from equipoise.experiments.tracker import Tracker
from equipoise.kernels import route

SMALL = {"width": 16, "num_heads": 2, "num_layers": 2, "num_experts": 8, "top_k": 2, "expert_width": 8}
TIMES = ("seconds", "tokens_per_s")
TINY = [
    *("model.width=16", "model.num_heads=2", "model.num_layers=2", "model.num_experts=8", "model.top_k=2"),
    *("model.expert_width=8", "model.shared_width=8", "data.sequence_length=32", "data.microbatch_sequences=2"),
    *("data.microbatches=4", "data.validation_sequences=8", "optim.steps=12", "optim.warmup=2", "tracker=none"),
    *("optim.learning_rate=1e-2", "validation.every=6", "checkpoint.every=4"),
]


def write_run(folder, *overrides, ranks=2):
    with initialize_config_module("equipoise.configs", version_base="1.3"):
        config = compose("config", overrides=[*TINY, f"parallel.ranks={ranks}", *overrides])
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(OmegaConf.to_container(config, resolve=True)))
    return folder


def torchrun(folder, ranks=2):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*command, "-m", "equipoise.experiments.train", str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def timeless(folder):
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows(folder)]


@pytest.fixture
def alone(monkeypatch):
    """This process as the only rank of a job."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    values = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """A complete run of two ranks."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "eqb_lei", "balancer=eqb_lei", "tracker=offline")
    result = torchrun(folder)
    assert result.returncode == 0, result.stderr
    return folder


def test_two_ranks_learn_and_leave_a_complete_record(two_ranks):
    record = rows(two_ranks)
    assert [row["step"] for row in record] == list(range(1, 13))
    assert record[-1]["loss"] < record[0]["loss"] - 0.5
    assert record[-1]["tokens"] == 12 * 4 * 2 * 32
    assert [row["step"] for row in record if row["val_bpb"] is not None] == [6, 12]
    summary = json.loads((two_ranks / "summary.json").read_text())
    assert summary["val_bpb"] == record[-1]["val_bpb"]
    assert summary["steps"] == 12
    environment = json.loads((two_ranks / "environment.json").read_text())
    assert environment["world_size"] == 2
    assert environment["parameters"]["active"] < environment["parameters"]["total"]
    assert len(environment["data"]["sha256"]) == 64
    assert list((two_ranks / "wandb").glob("offline-run-*"))


def test_every_token_is_counted_once_over_ranks_and_microbatches(two_ranks):
    loads = pd.read_parquet(two_ranks / "load.parquet")
    totals = loads.groupby(["step", "layer"])["count"].sum()
    assert len(totals) == 12 * 2
    assert (totals == 4 * 2 * 32 * 2).all()
    last = loads[(loads.step == 12)].groupby("layer")["count"]
    wanted = (last.max() / last.mean() - 1).tolist()
    assert rows(two_ranks)[-1]["layers"]["global_maxvio"] == pytest.approx(wanted)


def test_resume_gives_the_bits_of_a_run_that_was_not_cut(two_ranks, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(two_ranks, cut)
    (cut / "summary.json").unlink()
    shutil.rmtree(cut / "checkpoints" / "step-12")
    record = (cut / "metrics.jsonl").read_text().splitlines(keepends=True)
    # what a crash leaves behind: rows after the checkpoint, the last one half written
    (cut / "metrics.jsonl").write_text("".join(record[:10]) + record[10][:40])
    assert torchrun(cut).returncode == 0
    assert timeless(cut) == timeless(two_ranks)
    both = [pd.read_parquet(folder / "load.parquet") for folder in (cut, two_ranks)]
    pd.testing.assert_frame_equal(*both)


SHARDED = {
    "fsdp": ["parallel=fsdp", "parallel.recompute=full"],
    "ep": ["parallel=ep", "parallel.recompute=selective"],
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", SHARDED)
def test_e11_sharded_runs_take_the_steps_of_replicas_and_resume_to_the_same_bits(two_ranks, tmp_path, layout):
    folder = write_run(tmp_path / "run", "balancer=eqb_lei", *SHARDED[layout])
    result = torchrun(folder)
    assert result.returncode == 0, result.stderr
    for sharded, replicated in zip(rows(folder)[:6], rows(two_ranks), strict=False):
        for name in ("loss", "grad_norm", "bias_norm", "global_maxvio", "local_maxvio", "intervention"):
            assert sharded[name] == pytest.approx(replicated[name], rel=1e-3), name
    assert rows(folder)[5]["val_loss"] == pytest.approx(rows(two_ranks)[5]["val_loss"], rel=1e-4)
    axes = json.loads((folder / "environment.json").read_text())["mesh"]
    assert axes == {"dp_replicate": 1, "dp_shard": 1, "ep": 1, "cp": 1, "tp": 1} | (
        {"ep": 2} if layout == "ep" else {"dp_shard": 2}
    )
    whole = timeless(folder)
    # as if it had been killed after step 11: the checkpoint of step 8 is the last
    (folder / "summary.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "step-12")
    result = torchrun(folder)
    assert result.returncode == 0, result.stderr
    assert timeless(folder) == whole


def candidates_beside_full(folder, run, *options, ranks):
    """A run of the full selection and one of candidates, by ``run``: their rows, without those that only one has."""
    folders = [
        write_run(folder / name, f"balancer={name}", "balancer/gradient=lei", "optim.steps=3", *options, ranks=ranks)
        for name in ("eqb", "eqb_cut")
    ]
    for each in folders:
        run(each)
    full, lean = map(timeless, folders)
    shares = {name: [row.pop(name) for row in lean] for name in ("fallback_share", "candidate_share")}
    assert shares["fallback_share"][0] > 0
    assert all(0 < share <= 1 for share in shares["candidate_share"])
    pd.testing.assert_frame_equal(*(pd.read_parquet(each / "load.parquet") for each in folders))
    return full, lean


@pytest.mark.parametrize("options", [["parallel.recompute=full"], ["parallel=fsdp"]], ids=["ddp", "fsdp"])
def test_candidates_train_to_the_bits_of_the_full_selection(tmp_path, alone, options):
    """Forwards that are observed again leave no trace: no count, and no parameter that FSDP2 has gathered too early."""
    full, lean = candidates_beside_full(tmp_path, lambda folder: train.main(str(folder)), *options, ranks=1)
    assert lean == full


@pytest.mark.slow
def test_candidates_train_to_the_same_bits_with_experts_on_other_ranks(tmp_path):
    def run(folder):
        result = torchrun(folder)
        assert result.returncode == 0, result.stderr

    full, lean = candidates_beside_full(tmp_path, run, *SHARDED["ep"], ranks=2)
    assert lean == full


def test_experts_that_drop_report_the_share(tmp_path, alone):
    options = ["balancer=signed_count", "model.capacity_factor=1.0", "optim.steps=2"]
    folder = write_run(tmp_path / "run", *options, ranks=1)
    train.main(str(folder))
    assert 0 < rows(folder)[0]["dropped_share"] < 1


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(two_ranks, tmp_path):
    again = write_run(tmp_path / "again", "balancer=eqb_lei")
    assert torchrun(again).returncode == 0
    assert timeless(again) == timeless(two_ranks)
    other = write_run(tmp_path / "other", "balancer=eqb_lei", "seed=1", "optim.steps=1", ranks=1)
    assert torchrun(other, ranks=1).returncode == 0
    assert rows(other)[0]["loss"] != rows(two_ranks)[0]["loss"]


def test_g2_one_rank_takes_the_same_steps_as_two(tmp_path, alone):
    """Gradients of loss, auxiliary loss, injection and z-loss, logged values, and validation over uneven shards."""
    options = ["balancer=eqb_gshard", "balancer.gradient.coefficient=0.5", "model.z_loss=0.1", "optim.steps=3"]
    options += ["validation.every=1", "data.validation_sequences=5"]
    two = write_run(tmp_path / "two", *options)
    assert torchrun(two).returncode == 0
    one = write_run(tmp_path / "one", *options, ranks=1)
    train.main(str(one))
    for left, right in zip(rows(one), rows(two), strict=True):
        assert left["layers"] == right["layers"]
        for name in ("loss", "grad_norm", "bias_norm", "balance_loss", "z_loss", "intervention", "val_loss"):
            assert left[name] == pytest.approx(right[name], rel=1e-4), name
    assert rows(one)[0]["balance_loss"] > 1


def test_fewer_validation_sequences_than_ranks(tmp_path):
    folder = write_run(tmp_path / "run", "data.validation_sequences=1", "optim.steps=1", "optim.warmup=1")
    assert torchrun(folder).returncode == 0
    assert rows(folder)[0]["val_bpb"] > 0


def test_a_step_that_is_not_finite_is_skipped_and_leaves_the_bias(tmp_path, alone, monkeypatch):
    folder = write_run(tmp_path / "run", "balancer=eqb", "optim.steps=3", "checkpoint.every=1", ranks=1)
    plain, calls = train.language_loss, []

    def poisoned(logits, tokens):
        calls.append(1)
        # the second step: microbatches 5 to 8 of training
        return plain(logits, tokens) * (float("inf") if len(calls) == 6 else 1)

    monkeypatch.setattr(train, "language_loss", poisoned)
    train.main(str(folder))
    record = rows(folder)
    assert [row["skipped"] for row in record] == [0, 1, 1]
    assert record[1]["bias_norm"] == record[0]["bias_norm"] != record[2]["bias_norm"]
    assert record[1]["loss"] is None
    assert record[2]["loss"] < 7
    assert json.loads((folder / "summary.json").read_text())["skipped"] == 1


def test_bf16_autocast_and_every_gradient_scope_train(tmp_path, alone):
    for scope in ("sequence", "global"):
        options = ["balancer=eqb_gshard", f"balancer.gradient.scope={scope}", "model.z_loss=1e-3", "optim.steps=4"]
        folder = write_run(tmp_path / scope, *options, "parallel.precision=bf16", "optim.warmup=0", ranks=1)
        train.main(str(folder))
        record = rows(folder)
        assert record[-1]["loss"] < record[0]["loss"]
        assert record[-1]["balance_loss"] >= 1 - 1e-3


def test_a_dense_model_has_no_balance_to_measure(tmp_path, alone):
    options = ["balancer=none", "model.num_dense_layers=2", "model.dense_width=8", "optim.steps=2"]
    folder = write_run(tmp_path / "dense", *options, ranks=1)
    train.main(str(folder))
    assert rows(folder)[-1]["val_bpb"] > 0
    assert rows(folder)[-1]["global_maxvio"] is None


def test_e11_a_checkpoint_without_its_bias_is_refused(tmp_path, alone):
    folder = write_run(tmp_path / "run", "balancer=none", "optim.steps=1", ranks=1)
    train.main(str(folder))
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["balancer"]["bias"] = {"_target_": "equipoise.balancers.SignedCount"}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ValueError, match=r"step-1 lacks 2 tensors of this model: .*router\.bias\.bias"):
        train.main(str(folder))


def test_a_half_written_checkpoint_is_not_used(tmp_path, alone, monkeypatch):
    folder = write_run(tmp_path / "run", "balancer=eqb", "optim.steps=8", ranks=1)

    def full_disk(state, checkpoint_id):
        if checkpoint_id.name == ".step-8":
            raise OSError("No space left on device")
        return save(state, checkpoint_id=checkpoint_id)

    save = dcp.save
    monkeypatch.setattr(dcp, "save", full_disk)
    with pytest.raises(OSError, match="No space left"):
        train.main(str(folder))
    assert not (folder / "summary.json").exists()
    monkeypatch.setattr(dcp, "save", save)
    train.main(str(folder))
    assert [row["step"] for row in rows(folder)] == list(range(1, 9))
    assert (folder / "checkpoints" / "step-8").is_dir()


def test_a_rank_outside_torchrun_or_in_another_world_says_so(tmp_path, alone, monkeypatch):
    folder = write_run(tmp_path / "run", ranks=2)
    with pytest.raises(ValueError, match=r"parallel\.ranks is 2, but torchrun has started 1 ranks"):
        train.main(str(folder))
    monkeypatch.delenv("RANK")
    with pytest.raises(ValueError, match="started by `equipoise` or by torchrun"):
        train.main(str(folder))


def test_local_and_global_maxvio_of_the_worked_cells(alone):
    """Four cells that each send everything to a different one of 4 experts: local 3, global 0."""
    with initialize_config_module("equipoise.configs", version_base="1.3"):
        config = OmegaConf.to_container(
            compose(
                "config", overrides=["balancer=none", "model.num_experts=4", "model.top_k=1", "model.normalise=false"]
            ),
            resolve=True,
        )
    model = make_model(config)
    model.init_weights(torch.Generator().manual_seed(0))
    model(torch.zeros(1, 6, dtype=torch.long))
    routers = list(model.routers())
    with join_ranks(ParallelConfig("ddp", ranks=1)) as ranks:
        meter = Meter(list(model.layers()), ranks)
        for cell in range(4):
            load = torch.zeros(4, dtype=torch.int32)
            load[cell] = 6
            for router in routers:
                router.last = dataclasses.replace(router.last, load=load)
            meter.add(torch.tensor(float(cell)))
        row, load_LE, bias_LE = meter.finish()
    assert row["loss"] == 1.5
    assert (row["local_maxvio"], row["local_maxvio_max"], row["global_maxvio"]) == (3.0, 3.0, 0.0)
    assert row["device_maxvio"] == {"2": 0.0}
    assert load_LE.tolist() == [[6] * 4] * len(routers)
    assert bias_LE.shape == (len(routers), 4)
    assert bias_LE.isnan().all()


def test_tracker_drops_what_comes_after_the_checkpoint(tmp_path):
    config = {"tracker": {"mode": "none"}, "balancer": {"name": "eqb"}}
    tracker = Tracker(tmp_path, config, 0)
    for step in range(1, 7):
        tracker.log({"step": step, "loss": float("nan")}, torch.full((2, 3), step), torch.zeros(2, 3))
        if step % 2 == 0:
            tracker.flush()
    Tracker(tmp_path, config, 4)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]
    assert rows(tmp_path)[0]["loss"] is None
    assert pd.read_parquet(tmp_path / "load.parquet").step.max() == 4


def train_and_watch(folder, alone_monkeypatch, kernels, *overrides):
    """Every routing of a run, and its last biases."""
    seen, models = [], []

    def watched(logits, bias, top_k, **options):
        routing = route(logits, bias, top_k, **options)
        seen.append((routing.detach(), None if bias is None else bias.clone()))
        return routing

    make = train.build.make_model
    with alone_monkeypatch.context() as patch:
        patch.setenv("EQUIPOISE_KERNELS", kernels)
        patch.setattr(moe, "route", watched)
        patch.setattr(train.build, "make_model", lambda config: models.append(make(config)) or models[-1])
        train.main(str(write_run(folder, "optim.steps=6", "validation.every=100", *overrides, ranks=1)))
    return seen, [router.bias.bias for router in models[-1].routers() if router.bias is not None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("balancer", "selection"),
    [("eqb_lei", "score"), ("histogram_qb", "score"), ("rank_averaged_qb", "logit"), ("eqb_gshard", "logit")],
)
def test_the_triton_kernels_train_to_the_same_experts_and_biases(
    tmp_path, alone, monkeypatch, interpreter, balancer, selection
):
    """In the interpreter, whose exponentials differ from torch's in the last place; near ties are named if any."""
    overrides = [f"balancer={balancer}", f"model.selection={selection}"]
    expected, expected_biases = train_and_watch(tmp_path / "torch", monkeypatch, "torch", *overrides)
    actual, biases = train_and_watch(tmp_path / "triton", monkeypatch, "triton", *overrides)
    assert len(actual) == len(expected) > 6 * 4 * 2
    near_ties = 0
    for (ours, _), (reference, bias) in zip(actual, expected, strict=True):
        unbiased = reference.scores if selection == "score" else reference.logits
        top = (unbiased + bias).topk(3, dim=-1).values
        near = ((top[:, :-1] - top[:, 1:]) < 1e-5).any(-1)
        differs = (ours.experts != reference.experts).any(-1)
        assert not (differs & ~near).any()
        near_ties += int(differs.sum())
    print(f"{balancer}, {selection}: {near_ties} near-tie rows with other experts")
    assert near_ties == 0
    for ours, reference in zip(biases, expected_biases, strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=0 if "eqb" in balancer else 1e-6)
        assert ours.any()


def test_s11_a_model_in_process_groups_can_be_copied_for_a_teacher(alone):
    model = make_model(
        {"model": SMALL, "balancer": {"bias": None, "gradient": {"_target_": "equipoise.balancers.LEI"}}}
    )
    with join_ranks(ParallelConfig("ddp", ranks=1)) as ranks:
        for router in model.routers():
            router.gradient.token_shards = router.gradient.microbatch_shards = ranks.token_shards
        teacher = copy.deepcopy(model)
        for ours, copied in zip(model.routers(), teacher.routers(), strict=True):
            assert copied.gradient is not ours.gradient
            assert copied.gradient.token_shards is copied.gradient.microbatch_shards is ranks.token_shards
            copied.gradient.eta = 1.0
            assert ours.gradient.eta == 1e-5


def test_ranks_describe_themselves(alone):
    with join_ranks(ParallelConfig("ddp", ranks=1)) as ranks:
        assert isinstance(ranks, Ranks)
        assert ranks.first
        assert ranks.sum(torch.tensor([2.0])).item() == 2.0


def test_ranks_that_read_different_configs_are_refused(monkeypatch):
    """On several machines each torchrun command names a run folder; a wrong one would train two runs as one."""
    others = [{"seed": 0, "optim": {"steps": 3}}, {"seed": 0, "optim": {"steps": 4}}]
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda found, _: found.__setitem__(slice(None), others))
    ranks = SimpleNamespace(world_size=2)
    with pytest.raises(ValueError, match=r"ranks 0 and 1 read different configs: optim\.steps is 3 and 4"):
        train.refuse_other_configs(others[0], ranks)
    others[1] = others[0]
    train.refuse_other_configs(others[0], ranks)
