"""The benchmarks on tiny sizes: what they write, and that they refuse to time what is not equal."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from equipoise.bench import cpu, step

ROOT = Path(__file__).parents[2]
TINY = {"num_tokens": 500, "num_experts": 8, "top_k": 2, "num_bins": 20}
COMPARISONS = {"selection_vs_kthvalue", "histogram_vs_scatter_add", "route_vs_topk"}


def test_cpu_writes_ratios_and_what_they_are_made_of(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "SIZES", TINY)
    cpu.main(["--repeats", "3", "--threads", "1", "--out", str(tmp_path / "cpu.json")])
    result = json.loads((tmp_path / "cpu.json").read_text())
    assert result["details"].keys() == COMPARISONS
    assert result["sizes"] == TINY
    assert result["threads"] == 1
    assert {"cpu", "date", "versions"} <= result.keys()
    for name in COMPARISONS:
        assert isinstance(result[name], float)
        assert result["details"][name]["ratio"]["median"] == result[name] > 0
        assert result["details"][name]["ours_ms"].keys() == {"median", "lower", "upper"}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("uniform_counts", lambda *_: (torch.zeros(8, 20, dtype=torch.int32), None)),
        ("run_locally", lambda _: torch.zeros(8)),
        ("topk_route", lambda logits, _, top_k: (logits.topk(top_k).indices, torch.zeros(500, 2), torch.zeros(500))),
    ],
)
def test_cpu_refuses_to_time_unequal_results(name, wrong, monkeypatch):
    monkeypatch.setattr(cpu, name, wrong)
    with pytest.raises(ValueError, match="different results"):
        cpu.measure(1, **TINY)


def test_step_writes_a_ratio_of_every_preset(tmp_path):
    step.main(["--rounds", "1", "--ranks", "8", "--out", str(tmp_path / "step.json")])
    result = json.loads((tmp_path / "step.json").read_text())
    details = result.pop("details")
    assert list(result) == step.presets()
    assert result["none"] == 1.0
    assert all(isinstance(ratio, float) and ratio > 0 for ratio in result.values())
    assert details["steps"].keys() == result.keys()
    assert {"rounds", "ranks", "threads", "versions"} <= details.keys()


def test_every_step_starts_from_the_same_state():
    config = step.load("eqb_lei")
    torch.manual_seed(0)
    timed = step.Step(config, [torch.randint(256, (2, 17)) for _ in range(2)])
    before = [parameter.clone() for parameter in timed.model.parameters()]
    for piece in range(3):
        assert timed.run(piece) > 0
    routed = [router.last.experts for router in timed.model.routers()]
    assert all(router.bias.bias.eq(0).all() for router in timed.model.routers())
    for piece in range(3):
        timed.run(piece)
    assert all(map(torch.equal, before, timed.model.parameters()))
    again = [router.last.experts for router in timed.model.routers()]
    assert all(map(torch.equal, routed, again))
    assert all(router.bias.bias.eq(0).all() for router in timed.model.routers())


def test_an_unknown_benchmark_is_named_and_the_others_are_listed():
    result = subprocess.run([ROOT / "scripts" / "bench", "gpus"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "aot|cpu|step|gpu" in result.stderr
    assert "'gpus'" in result.stderr
