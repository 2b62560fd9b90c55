"""The price of imbalance: loads that are replayed to the last token, tables and fits, and a tiny measurement."""

import doctest
import importlib.util
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise.bench import price, price_loads, price_steps
from equipoise.experiments.report.comparison import Row
from equipoise.experiments.report.reading import load_run
from equipoise.kernels import route

ROOT = Path(__file__).parents[2]
LAYERS, EXPERTS, TOP_K, STEPS = 2, 8, 2, 6
TINY = {"width": 16, "expert_width": 8, "num_heads": 2, "sequences": 4, "length": 6}
SHAPE = {"model.num_layers": LAYERS, "model.num_experts": EXPERTS, "model.top_k": TOP_K, "model.num_dense_layers": 0}


def fake_runs():
    """The module that writes synthetic run folders, by its path: tests are no package."""
    path = ROOT / "tests" / "experiments" / "fake_runs.py"
    spec = importlib.util.spec_from_file_location("fake_runs", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_run(folder, name, seed, loads, bias=None):
    changes = SHAPE | {"model.selection": "score", "model.gate": "sigmoid", "report.tail": 0.5}
    return fake_runs().write_run(folder, name, seed, steps=len(loads), loads=loads, bias=bias, changes=changes)


@pytest.fixture
def experiment(tmp_path):
    """A balanced row and one where the first expert takes every token, the second half; two seeds each."""
    balanced = np.full((STEPS, LAYERS, EXPERTS), 32)
    skewed = balanced * 0
    skewed[..., :3] = 128, 64, 64
    for seed in range(2):
        write_run(tmp_path / "table", "eqb", seed, balanced)
        write_run(tmp_path / "table", "none", seed, skewed)
    return tmp_path / "table"


@pytest.fixture
def captured(tmp_path):
    """A run of six steps, of which two are captured: 2 ranks of 3 microbatches of 16 tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(STEPS, 2, 3, LAYERS, 16, EXPERTS, generator=generator)
    bias = 0.5 * torch.randn(STEPS, LAYERS, EXPERTS, generator=generator)
    before = torch.cat([torch.zeros_like(bias[:1]), bias])
    loads = [
        [route(logits[step, :, :, layer].flatten(0, 2), before[step, layer], TOP_K).load for layer in range(LAYERS)]
        for step in range(STEPS)
    ]
    loads = torch.stack([torch.stack(layers) for layers in loads])
    run = write_run(tmp_path / "table", "eqb", 0, loads.numpy(), bias.numpy())
    for step in (1, 6):
        folder = run / "capture" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        for rank in range(2):
            np.save(folder / f"rank-{rank}.npy", logits[step - 1, rank].numpy())
    return run


@pytest.mark.parametrize("module", [price, price_loads, price_steps])
def test_examples_hold(module):
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed


@pytest.mark.parametrize("load", [[10, 6, 4, 0, 0], [1, 1, 1, 1, 1], [3, 3, 0, 0, 0], [997, 600, 200, 190, 7]])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 64])
def test_experts_are_laid_out_with_exactly_the_load_and_none_twice(load, num_tokens):
    counts = price_loads.scaled(torch.tensor(load), num_tokens, 2)
    experts = price_loads.laid_out(counts, num_tokens)
    assert experts.shape == (num_tokens, 2)
    assert (experts[:, 0] != experts[:, 1]).all()
    assert experts.flatten().bincount(minlength=5).tolist() == counts.tolist()
    wanted = torch.tensor(load) / sum(load) * num_tokens * 2
    assert (counts - wanted).abs().max() < 1


def test_a_load_that_no_routing_has_is_refused():
    with pytest.raises(ValueError, match="an expert takes at most 8 of 8 tokens, got 16"):
        price_loads.scaled(torch.tensor([1, 0, 0]), 8, 2)


def test_the_ladder_leads_from_balance_to_collapse():
    points = price_loads.ladder(LAYERS, EXPERTS, TOP_K)
    found = [price.describe_point(point, 2) for point in points]
    assert found[0]["share"] == pytest.approx(0.5)
    assert found[0]["maxvio"] == pytest.approx(0)
    assert found[-2]["share"] > 0.97
    assert found[-2]["maxvio"] == pytest.approx(EXPERTS / TOP_K - 1, abs=1e-6)
    # shuffled, the same MaxVio costs less
    assert found[-1]["maxvio"] == pytest.approx(found[-2]["maxvio"])
    assert all(one["share"] <= other["share"] + 1e-9 for other, one in zip(found[::2], found[1::2], strict=True))
    for point in points:
        assert (price_loads.scaled(point.load_LE, 4096, TOP_K).sum(-1) == 4096 * TOP_K).all()


def test_a_step_is_routed_as_it_is_told():
    sizes = TINY | {"top_k": TOP_K}
    model = price_steps.make_model(sizes, LAYERS, EXPERTS)
    step = price_steps.make_step(model, model, sizes, 0)
    load = price_loads.ladder(LAYERS, EXPERTS, TOP_K)[9].load_LE
    before = [parameter.clone() for parameter in model.parameters()]
    step(price_steps.forced_experts(load, sizes))
    wanted = price_loads.scaled(load, 24, TOP_K)
    assert torch.stack([router.last.load for router in model.routers()]).tolist() == wanted.tolist()
    assert all(map(torch.equal, before, model.parameters()))


def test_shares_of_the_tail_in_order_and_placed(experiment):
    rows = price_loads.read_rows(experiment)
    assert [row.label for row in rows] == ["none", "eqb"]
    (skewed,), (balanced,) = (price.price_row(row, [2, 4, 8]) for row in rows)
    assert skewed["loads"] == "step"
    kinds = ("contiguous", "placed", "bound")
    skewed, balanced = (
        {count: {kind: row[count][kind] for kind in kinds} for count in ("2", "4", "8")} for row in (skewed, balanced)
    )
    # halves: 256 of 256 in order, and the first expert alone against the other two
    assert skewed["2"] == pytest.approx({"contiguous": 2.0, "placed": 1.0, "bound": 1.0})
    assert skewed["4"] == pytest.approx({"contiguous": 3.0, "placed": 2.0, "bound": 2.0})
    assert skewed["8"] == pytest.approx({"contiguous": 4.0, "placed": 4.0, "bound": 4.0})
    assert balanced["4"] == pytest.approx({"contiguous": 1.0, "placed": 1.0, "bound": 1.0})


def test_captured_logits_give_the_loads_of_microbatches(captured):
    run = load_run(captured)
    local = price_loads.microbatch_loads(run, [1, 6])
    assert local.shape == (2 * 6, LAYERS, EXPERTS)
    assert (local.sum(-1) == 16 * TOP_K).all()
    assert local[6:].sum(0).tolist() == price_loads.step_loads(run)[5].tolist()
    row = Row("eqb", "eqb", {}, (run,))
    kinds = {found["loads"]: found["8"]["contiguous"] for found in price.price_row(row, [8])}
    # of the tail window, steps 4 to 6, one was captured
    for kind, loads in {"step": price_loads.step_loads(run)[3:], "microbatch": local[6:]}.items():
        assert kinds[kind] == pytest.approx((8 * loads.amax(-1) / loads.sum(-1)).mean().item())
    points = price_loads.points_of(row, 2)
    assert [point.origin.partition(", ")[2] for point in points] == [f"first microbatch of step {n}" for n in (1, 6)]
    assert points[1].load_LE.tolist() == local[6].tolist()


def test_captured_logits_of_another_run_are_refused(captured):
    path = captured / "capture" / "step-00000006" / "rank-1.npy"
    np.save(path, -np.load(path))
    with pytest.raises(ValueError, match="the captured logits of step 6 do not give the load"):
        price_loads.tail_loads(load_run(captured))


def test_a_record_with_a_hole_is_refused(experiment):
    run = load_run(sorted(experiment.iterdir())[0])
    fake_runs().write_loads(run.folder / "load.parquet", np.ones((STEPS - 1, LAYERS, EXPERTS), dtype=int))
    with pytest.raises(ValueError, match="expected 6 steps of 2 x 8 counts, got 80 counts"):
        price_loads.step_loads(run)
    (run.folder / "load.parquet").write_bytes(b"not parquet")
    with pytest.raises(ValueError, match="cannot be read as a record of loads"):
        price_loads.step_loads(run)


def test_the_slope_and_its_interval():
    x = np.linspace(0.5, 1, 20)
    noise = np.where(np.arange(20) % 2, 1.0, -1.0)
    fit = price.fit_line(x.tolist(), (10 + 100 * x + noise).tolist())
    assert fit["low"] < 100 < fit["high"]
    assert fit["high"] - fit["low"] < 10
    assert 0.99 < fit["r2"] < 1


def test_the_card_plays_the_slowest_device():
    """On a CPU, where the same code runs: rows and time go with the load of the busiest device."""
    loads = [point.load_LE for point in price_loads.ladder(LAYERS, EXPERTS, TOP_K)[:3]]
    sizes = TINY | {"top_k": TOP_K}
    seconds = price_steps.measure_card(loads, 2, sizes, 2, device="cpu")
    assert np.array(seconds.wall).shape == (3, 2)
    assert (np.array(seconds.wall) > 0).all()


def test_the_command_measures_two_ranks_and_writes_what_it_found(experiment, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(price, "CPU_SIZES", TINY)
    monkeypatch.setattr(price_loads, "EXPONENTS", (0.0, 1.0))
    out, figure = tmp_path / "price.json", tmp_path / "price.png"
    options = ["--ranks", "2", "--points", "2", "--repeats", "2", "--out", str(out), "--figure", str(figure)]
    price.main([str(experiment), *options])
    found = json.loads(out.read_text())
    assert found["prices"][0]["balancer"] == "none"
    points = found["measured"]["2"]["points"]
    assert [point["label"] for point in points] == ["none"] * 2 + ["eqb"] * 2 + ["ladder"] * 4
    assert points[0]["origin"].endswith("step 1")
    for point in points:
        assert 0 < point["wall_ms"]["lower"] <= point["wall_ms"]["upper"]
        assert point["processor_ms"]["median"] > 0
    assert found["measured"]["2"]["fits"].keys() == price.VIEWS.keys()
    assert found["details"]["shape"] == [LAYERS, EXPERTS, TOP_K]
    assert figure.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "P = 2, clock against share" in printed
    assert "2.00 -> 1.00" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "3"], "divide 32 experts and 16 sequences, got 3"),
        (["--ranks", "1"], "must be at least 2"),
        (["/no/such/folder"], "no such folder: /no/such/folder"),
    ],
)
def test_bad_arguments_are_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        price.main(words)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_script_knows_it():
    result = subprocess.run([ROOT / "scripts" / "bench", "prices"], capture_output=True, text=True, check=False)
    assert "|price " in result.stderr
