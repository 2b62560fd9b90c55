"""The router logits of a run: routed again they give the recorded load, and a resumed run writes them again."""

import shutil

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from equipoise.experiments import build, capture, moe, train
from equipoise.experiments.sweep.ranks import run_ranks
from equipoise.kernels import route

RANKS, MICROBATCHES, LAYERS, TOKENS, EXPERTS, TOP_K, STEPS = 2, 2, 2, 64, 8, 2, 5
TINY = [
    *("model.width=16", "model.num_heads=2", f"model.num_layers={LAYERS}", f"model.num_experts={EXPERTS}"),
    *(f"model.top_k={TOP_K}", "model.expert_width=8", "model.shared_width=8", "data.sequence_length=32"),
    *("data.microbatch_sequences=2", f"data.microbatches={RANKS * MICROBATCHES}", "data.validation_sequences=2"),
    *(f"optim.steps={STEPS}", "optim.learning_rate=1e-2", "tracker=none", "checkpoint.every=3"),
    *(f"parallel.ranks={RANKS}", "balancer=eqb", "capture=true", "capture_every=2"),
]
KEPT = [2, 4]


def resolved(*overrides):
    with initialize_config_module("equipoise.configs", version_base="1.3"):
        return OmegaConf.to_container(compose("config", overrides=[*TINY, *overrides]), resolve=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Activation checkpointing forwards the layers a second time, which must not be kept."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.yaml").write_text(yaml.safe_dump(resolved("parallel.recompute=full")))
    run_ranks(train.main, folder, RANKS)
    return folder


def test_captured_logits_under_the_bias_before_give_the_recorded_load(run):
    record = pd.read_parquet(run / "load.parquet").sort_values(["step", "layer", "expert"])
    load = torch.tensor(record["count"].to_numpy()).view(STEPS, LAYERS, EXPERTS)
    after = torch.tensor(record["bias"].to_numpy()).view(STEPS, LAYERS, EXPERTS)
    assert after[-1].abs().max() > 0.01
    assert capture.captured_steps(run, RANKS) == KEPT
    for step in KEPT:
        logits = capture.read_step(run, step, RANKS)
        assert logits.shape == (RANKS, MICROBATCHES, LAYERS, TOKENS, EXPERTS)
        for layer in range(LAYERS):
            routing = route(logits[:, :, layer].flatten(0, 2), after[step - 2, layer], TOP_K)
            assert routing.load.tolist() == load[step - 1, layer].tolist()


def test_a_resumed_run_writes_the_same_files(run, tmp_path):
    cut = tmp_path / "cut"
    shutil.copytree(run, cut)
    (cut / "summary.json").unlink()
    shutil.rmtree(cut / "checkpoints" / f"step-{STEPS}")
    (cut / "capture" / "step-00000004" / "rank-1.npy").unlink()
    # what a rank leaves that was killed as it wrote
    (cut / "capture" / "step-00000004" / ".rank-1.npy").write_bytes(b"half")
    assert capture.captured_steps(cut, RANKS) == [2]
    run_ranks(train.main, cut, RANKS)
    files = sorted(path.relative_to(run) for path in (run / "capture").rglob("*"))
    assert files == sorted(path.relative_to(cut) for path in (cut / "capture").rglob("*"))
    assert len(files) == len(KEPT) * (1 + RANKS)
    assert all((run / path).read_bytes() == (cut / path).read_bytes() for path in files if path.suffix)


@pytest.mark.parametrize(("num_routers", "every"), [(1, 0), (0, 1)])
def test_nothing_is_kept_unless_asked_for_nor_without_a_router(num_routers, every, tmp_path):
    routers = [moe.Router(4, EXPERTS, TOP_K) for _ in range(num_routers)]
    for router in routers:
        torch.nn.init.zeros_(router.weight)
        router(torch.zeros(3, 4))
    recorder = capture.Capture(tmp_path, routers, 0, every)
    recorder.add(1)
    recorder.write(1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (None, r"rank-1.npy cannot be read as router logits"),
        (np.zeros((1, 1, 2, 3)), r"rank-1.npy: expected float32 \[1, 1, 2, 4\], got float64 \[1, 1, 2, 3\]"),
    ],
)
def test_files_that_are_not_logits_are_named(array, message, tmp_path):
    folder = tmp_path / "capture" / "step-00000001"
    folder.mkdir(parents=True)
    np.save(folder / "rank-0.npy", np.zeros((1, 1, 2, 4), np.float32))
    if array is None:
        (folder / "rank-1.npy").write_bytes(b"")
    else:
        np.save(folder / "rank-1.npy", array)
    with pytest.raises(ValueError, match=message):
        capture.read_step(tmp_path, 1, 2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("capture=maybe", "capture must be true or false, got 'maybe'"),
        ("capture_every=0", "capture_every must be a positive whole number, got 0"),
    ],
)
def test_bad_options_are_refused(override, message):
    with pytest.raises(ValueError, match=message):
        build.check(resolved(override))
