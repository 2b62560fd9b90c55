"""The backward kernel against autograd in fp64. ``T`` tokens, ``E`` experts, ``K`` experts a token."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise.kernels import Gate, route

On = Callable[[str], Any]
Check = Callable[[Tensor, Tensor], None]

CHOICES = [(E, K) for E in (2, 7, 8, 60, 256, 512) for K in (1, 2, 6, 8, 16) if K < E]


def autograd_gradient(
    logits: Tensor, experts: Tensor, grad_weights: Tensor, injection: Tensor | None, valid: Tensor | None, gate: Gate
) -> Tensor:
    """What autograd makes of the definitions, in fp64."""
    wide = logits.double().detach().requires_grad_()
    scores = wide.sigmoid() if gate.score == "sigmoid" else wide.softmax(-1)
    weights = scores.gather(-1, experts)
    if gate.normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    total = (gate.scale * weights * grad_weights.double()).sum()
    if injection is not None:
        rows = torch.ones(len(logits), dtype=torch.bool, device=logits.device) if valid is None else valid
        total = total + (scores * injection.double())[rows].sum()
    (gradient,) = torch.autograd.grad(total, wide)
    return gradient


def check_gradient(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    gate: Gate,
    on: On,
    device: str,
    assert_close: Check,
    *,
    injected: bool,
    masked: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    generator = torch.Generator().manual_seed(num_experts)
    logits = (torch.randn(num_tokens, num_experts, generator=generator) * 2).to(device, dtype)
    grad_weights = torch.randn(num_tokens, top_k, generator=generator).to(device)
    injection = torch.randn(num_experts, generator=generator).to(device) if injected else None
    valid = torch.rand(num_tokens, generator=generator).to(device) > 0.3 if masked else None
    leaf = logits.clone().requires_grad_()
    with on("triton"):
        routing = route(leaf, None, top_k, gate=gate.score, normalise=gate.normalise, scale=gate.scale, valid=valid)
        routing.steered(injection=injection).weights.backward(grad_weights)
    assert leaf.grad is not None
    assert leaf.grad.dtype == dtype
    expected = autograd_gradient(logits, routing.experts, grad_weights, injection, valid, gate)
    assert_close(leaf.grad, expected)


@pytest.mark.parametrize("injected", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), CHOICES)
def test_shapes(
    num_experts: int, top_k: int, injected: bool, on: On, device: str, poisoned: None, assert_close: Check
) -> None:
    for num_tokens in (0, 1, 33, 257):
        check_gradient(
            num_tokens, num_experts, top_k, Gate("sigmoid", True, 2.5), on, device, assert_close, injected=injected
        )


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("injected", [True, False])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_experts", "top_k"), [(7, 6), (60, 8)])
def test_options(
    num_experts: int,
    top_k: int,
    dtype: torch.dtype,
    score: str,
    normalise: bool,
    injected: bool,
    masked: bool,
    on: On,
    device: str,
    poisoned: None,
    small_programs: None,
    assert_close: Check,
) -> None:
    gate = Gate(score, normalise, 1.5)
    check_gradient(
        33, num_experts, top_k, gate, on, device, assert_close, injected=injected, masked=masked, dtype=dtype
    )


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_gradient_where_every_score_underflows(score: str, on: On, device: str, assert_close: Check) -> None:
    leaf = torch.tensor([[-300.0, -301.0, -302.0, -303.0]], device=device, requires_grad=True)
    with on("triton"):
        routing = route(leaf, None, 2, gate=score, normalise=True, selection="logit")
        routing.weights[:, 0].sum().backward()
    first = torch.sigmoid(torch.tensor(1.0, dtype=torch.float64))
    slope = first * (1 - first)
    assert leaf.grad is not None
    assert_close(leaf.grad.cpu(), torch.tensor([[slope, -slope, 0.0, 0.0]], dtype=torch.float64))


def test_a_penalty_receives_its_gradient_too(on: On, device: str) -> None:
    logits = torch.randn(33, 8, device=device)
    results = []
    for name in ("torch", "triton"):
        leaf = logits.clone().requires_grad_()
        with on(name):
            routing = route(leaf, None, 2)
            routing.steered(penalty=leaf.square().sum(), scale=0.5).weights.sum().backward()
        results.append(leaf.grad)
    torch.testing.assert_close(results[1], results[0])


def test_the_same_bits_every_time(on: On, device: str) -> None:
    logits = torch.randn(257, 60, device=device)
    gradients = []
    for _ in range(3):
        leaf = logits.clone().requires_grad_()
        with on("triton"):
            route(leaf, None, 8, normalise=True).steered(
                injection=torch.linspace(-1, 1, 60, device=device)
            ).weights.square().sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])
