"""The kernels run on the GPU where there is one, else in Triton's interpreter; the reference on the same device."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402 - after the check that it is there

from equipoise.kernels import backend  # noqa: E402
from equipoise.kernels.fused import radix, route, route_backward  # noqa: E402
from equipoise.kernels.fused.numerics import PTX, sigmoid  # noqa: E402
from equipoise.kernels.gate import Gate  # noqa: E402

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """``with on("triton"):`` the kernels of that backend."""

    @contextmanager
    def choose(name: str) -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setenv(backend.VARIABLE, name)
            yield

    return choose


@pytest.fixture
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small, and programs so few, that a test's tokens take several of each."""
    monkeypatch.setattr(route, "SCORES_PER_PROGRAM", 512)
    monkeypatch.setattr(route, "MAX_PROGRAMS", 2)
    monkeypatch.setattr(radix, "KEYS_PER_TILE", 64)
    monkeypatch.setattr(radix, "EXPERTS_PER_PROGRAM", 32)
    monkeypatch.setattr(radix, "KEYS_PER_PROGRAM", 512)
    monkeypatch.setattr(route_backward, "ENTRIES_PER_PROGRAM", 64)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is not cleared holds what no result may hold."""
    allocate = torch.empty

    def poison(*args: Any, **options: Any) -> Tensor:
        tensor = allocate(*args, **options)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -(2**30))

    monkeypatch.setattr(torch, "empty", poison)


@triton.jit
def _scores_kernel(
    logits_ptr, scores_ptr, T, E: tl.constexpr, EP: tl.constexpr, SOFTMAX: tl.constexpr, PTX: tl.constexpr
):
    offs_e = tl.arange(0, EP)
    offs = tl.program_id(0) * E + offs_e
    logits = tl.load(logits_ptr + offs, mask=offs_e < E, other=0.0).to(tl.float32)
    if SOFTMAX:
        peak = tl.max(tl.where(offs_e < E, logits, float("-inf")), axis=0)
        scores = tl.where(offs_e < E, tl.exp(logits - peak), 0.0)
        scores = scores / tl.sum(scores, axis=0)
    else:
        scores = sigmoid(logits, PTX)
    tl.store(scores_ptr + offs, scores, mask=offs_e < E)


@pytest.fixture
def same_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the reference the kernel's own scores: exponentials of two libraries differ in the last place."""

    def scores(self: Gate, logits: Tensor) -> Tensor:
        result = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
        if len(logits):
            size = logits.shape[1]
            padded = triton.next_power_of_2(size)
            _scores_kernel[(len(logits),)](
                logits.contiguous(), result, len(logits), size, padded, self.score == "softmax", PTX, num_warps=1
            )
        return result

    monkeypatch.setattr(Gate, "scores", scores)
