"""The GPU benchmark: its checks hold in the interpreter, they can fail, and without a GPU it says so."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from equipoise.bench import gpu
from equipoise.kernels.fused import radix, route, route_backward

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
SIZES = gpu.Sizes(512, 60, 6)


def test_checks_pass() -> None:
    assert set(gpu.check(SIZES, DEVICE)) == {"exact", "fast", "logit", "softmax"}


def test_ops_pass_opcheck() -> None:
    gpu.check_ops(DEVICE)


def spoil(module: Any, name: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    original = getattr(module, name)
    return lambda *args, **options: change(original(*args, **options))


def move_one(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    experts, *others = results
    experts[0, 0] = (experts[0, 0] + 1) % 60
    return experts, *others


@pytest.mark.parametrize(
    ("module", "name", "change", "message"),
    [
        (route, "route", move_one, "other experts without a near tie"),
        (route, "route", lambda results: (*results[:2], results[2] + 1e-3, results[3]), "cutoff differ"),
        (radix, "radix_counts", lambda counts: counts.roll(1, 1), "quantile is wrong"),
        (route_backward, "route_backward", lambda gradient: gradient * 1.001, "gradient is off"),
    ],
    ids=["experts", "cutoff", "selection", "gradient"],
)
def test_a_wrong_kernel_is_found(
    module: Any, name: str, change: Callable[[Any], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, spoil(module, name, change))
    with pytest.raises(RuntimeError, match=message):
        gpu.check(SIZES, DEVICE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        gpu.main([])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graph_and_large_addresses() -> None:
    gpu.check_graph(SIZES)
    gpu.check_large(DEVICE)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "REPEATS", 3)
    gpu.main(["--out", str(tmp_path / "gpu.json")])
    record = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert all(row["us"] > 0 for row in record["rows"])
