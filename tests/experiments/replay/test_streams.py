import shutil
from importlib.resources import files

import numpy as np
import pytest
import torch
import yaml
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from equipoise.experiments.replay.streams import CELLS, CapturedStream, Sizes, SyntheticStream

SIZES = Sizes(num_layers=2, num_tokens=2 * CELLS, num_experts=6, top_k=2)
STILL = {"offsets": 0.0, "noise": 0.0}


def stream(seed=0, sizes=SIZES, **options):
    return SyntheticStream(sizes, seed, **options)


def test_a_batch_is_a_pure_function_of_seed_and_step():
    options = {"rank_skew": 1.0, "microbatch_skew": 1.0, "drift": 1.0, "tails": 3.0}
    first, other = stream(**options), stream(**options)
    # in another order
    later = other.batch(3)
    assert torch.equal(first.batch(1), other.batch(1))
    assert torch.equal(first.batch(3), later)
    assert not torch.equal(first.batch(1), first.batch(2))
    assert not torch.equal(first.batch(1), stream(1, **options).batch(1))
    assert later.shape == (2, 2 * CELLS, 6)
    assert later.dtype == torch.float32


def test_streams_of_one_seed_share_their_noise():
    plain, skewed = stream().batch(2), stream(rank_skew=1.0).batch(2)
    # a cell of two tokens has one offset
    difference = (skewed - plain).unflatten(1, (CELLS, 2))
    torch.testing.assert_close(difference[:, :, 0], difference[:, :, 1])
    assert difference.std() > 0.8


def test_offsets_of_ranks_stay_and_those_of_microbatches_do_not():
    for_good = stream(**STILL, rank_skew=2.0)
    assert torch.equal(for_good.batch(1), for_good.batch(2))
    cells = for_good.batch(1).unflatten(1, (CELLS, 2))
    assert torch.equal(cells[:, :, 0], cells[:, :, 1])
    assert cells[:, :, 0].std(1).mean() == pytest.approx(2.0, rel=0.2)
    fresh = stream(**STILL, microbatch_skew=2.0)
    assert (fresh.batch(1) - fresh.batch(2)).std() == pytest.approx(2.0 * 2**0.5, rel=0.2)


def test_drift_is_a_random_walk_that_all_tokens_take():
    walk = stream(**STILL, drift=0.5, sizes=Sizes(1, CELLS, 400, 2))
    places = torch.stack([walk.batch(step)[0] for step in (1, 2, 3, 10)])
    assert not places[0].any()
    assert torch.equal(places, places[:, :1].expand_as(places))
    assert (places[2] - places[1]).std() == pytest.approx(0.5, rel=0.15)
    assert places[3].std() == pytest.approx(0.5 * 3, rel=0.15)


def test_tails_ties_saturation_and_the_domain():
    sizes = Sizes(1, 64 * CELLS, 6, 2)
    assert (stream(sizes=sizes).batch(1).abs() > 6).sum() == 0
    assert (stream(sizes=sizes, tails=2.0).batch(1).abs() > 6).double().mean() > 0.01
    tied = stream(ties=0.25).batch(1)
    assert torch.equal(tied * 4, (tied * 4).round())
    torch.testing.assert_close(stream(saturation=8.0).batch(1), stream().batch(1) + 8)
    added = stream(domain_share=0.25, domain_experts=2, domain_preference=3.0).batch(1) - stream().batch(1)
    expected = torch.zeros_like(added)
    expected[:, : CELLS // 2, :2] = 3
    torch.testing.assert_close(added, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_tokens", [1, 63, 65, 200])
def test_tokens_that_do_not_divide_into_cells(num_tokens):
    batch = stream(sizes=Sizes(1, num_tokens, 6, 2), **STILL, rank_skew=1.0).batch(1)
    cells = [batch[0, token] for token in range(num_tokens)]
    assert batch.abs().amin(-1).amin() > 0
    assert len({tuple(cell.tolist()) for cell in cells}) == min(num_tokens, CELLS)


def test_every_preset_gives_its_stream():
    names = sorted(path.name[:-5] for path in files("equipoise.configs").joinpath("stream").iterdir())
    names.remove("captured")
    with initialize_config_module("equipoise.configs", version_base="1.3"):
        config = compose("replay", overrides=[f"+stream@streams.my_{name}={name}" for name in names])
    for name in names:
        options = OmegaConf.to_container(config.streams[f"my_{name}"])
        assert options.pop("_target_").endswith("SyntheticStream")
        batch = stream(**options).batch(2)
        assert batch.isfinite().all()
        assert torch.equal(batch, stream().batch(2)) == (name == "even")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"noise": -1.0}, "noise must be a number of at least 0, got -1.0"),
        ({"tails": 0}, "tails must be a positive number, got 0"),
        ({"domain_share": 1.5}, "domain_share must be a number of at least 0 and at most 1, got 1.5"),
        ({"domain_experts": 7}, "domain_experts must be at most num_experts=6, got 7"),
        ({"saturation": "much"}, "saturation must be a finite number, got 'much'"),
    ],
)
def test_wrong_options(options, text):
    with pytest.raises(ValueError, match=text):
        stream(**options)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"num_tokens": 0}, "tokens must be a positive whole number, got 0"),
        ({"top_k": 6}, "got top_k=6 and num_experts=6"),
        ({"gate": "relu"}, "gate must be one of sigmoid, softmax, got 'relu'"),
        ({"selection": "rank"}, "selection must be one of score, logit, got 'rank'"),
    ],
)
def test_wrong_sizes(sizes, text):
    with pytest.raises(ValueError, match=text):
        Sizes(**{"num_layers": 1, "num_tokens": 8, "num_experts": 6, "top_k": 2} | sizes)


@pytest.fixture
def capture(tmp_path):
    """Three captured steps of two ranks with three microbatches of two layers, four tokens and five experts."""
    run = tmp_path / "experiment" / "eqb-s0"
    run.mkdir(parents=True)
    model = {"num_experts": 5, "top_k": 2, "gate": "softmax", "selection": "logit"}
    (run / "config.yaml").write_text(yaml.safe_dump({"model": model, "parallel": {"ranks": 2}}))
    for step in (2, 4, 10):
        for rank in range(2):
            write_shard(run, step, rank, shard(step, rank))
    return run


def test_the_only_run_of_an_experiment_is_found(capture):
    assert torch.equal(captured(capture.parent).batch(1), captured(capture).batch(1))
    shutil.copytree(capture, capture.with_name("eqb-s1"))
    with pytest.raises(ValueError, match=r"holds 2 runs: expected one of them, say .*eqb-s0"):
        CapturedStream(SIZES, 0, folder=str(capture.parent))


def captured(folder):
    return CapturedStream(SIZES, 0, folder=str(folder))


def shard(step, rank):
    return np.random.default_rng([step, rank]).standard_normal((3, 2, 4, 5), dtype=np.float32)


def shard_path(folder, step, rank):
    return folder / "capture" / f"step-{step:08d}" / f"rank-{rank}.npy"


def write_shard(folder, step, rank, values):
    path = shard_path(folder, step, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, values)


def test_a_captured_batch_has_the_tokens_in_the_order_of_ranks_and_microbatches(capture):
    captured = CapturedStream(SIZES, 0, folder=str(capture))
    assert captured.sizes == Sizes(2, 2 * 3 * 4, 5, 2, gate="softmax", selection="logit")
    assert captured.num_steps == 3
    for number, step in ((1, 2), (2, 4), (3, 10)):
        batch = captured.batch(number)
        for rank in range(2):
            for microbatch in range(3):
                tokens = slice(4 * (3 * rank + microbatch), 4 * (3 * rank + microbatch + 1))
                assert np.array_equal(batch[:, tokens], shard(step, rank)[microbatch])


def test_steps_at_the_end_that_a_rank_lacks_are_left_out(capture):
    shard_path(capture, 10, 1).unlink()
    assert CapturedStream(SIZES, 0, folder=str(capture)).num_steps == 2


def test_a_capture_with_a_hole_is_refused(capture):
    shard_path(capture, 4, 0).unlink()
    with pytest.raises(ValueError, match="step 4 lacks a shard, expected one of each of 2 ranks"):
        CapturedStream(SIZES, 0, folder=str(capture))


def test_shards_of_another_shape_or_kind_are_refused(capture):
    write_shard(capture, 4, 1, shard(4, 1)[:2])
    with pytest.raises(ValueError, match=r"rank-1.npy.* expected float32 \[3, 2, 4, 5\]|rank-1.npy: expected"):
        CapturedStream(SIZES, 0, folder=str(capture)).batch(2)
    write_shard(capture, 4, 0, shard(4, 0)[:2])
    with pytest.raises(ValueError, match=r"step 4 are .* \[2, 2, 2, 4, 5\], expected \[2, 3, 2, 4, 5\]"):
        CapturedStream(SIZES, 0, folder=str(capture)).batch(2)
    shard_path(capture, 2, 0).write_bytes(b"cut")
    with pytest.raises(ValueError, match=r"rank-0.npy cannot be read"):
        CapturedStream(SIZES, 0, folder=str(capture))


def test_a_run_without_capture_and_a_folder_that_is_no_run(capture, tmp_path):
    for step in (2, 4, 10):
        shard_path(capture, step, 0).unlink()
    with pytest.raises(ValueError, match="no step of router logits of all 2 ranks: expected a run with capture=true"):
        CapturedStream(SIZES, 0, folder=str(capture))
    with pytest.raises(ValueError, match="is not a run folder"):
        CapturedStream(SIZES, 0, folder=str(tmp_path / "nothing"))
