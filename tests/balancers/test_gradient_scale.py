"""The router gradient of a step does not depend on how its microbatches are spread over eight gloo ranks."""

import math
from functools import cache
from typing import Any

import pytest
import torch
from ranks import gradient_scale
from ranks.gradient_scale import CASES, LAYOUTS, NUM_MICROBATCHES, E, K
from torch import Tensor

from equipoise.balancers import LEI

every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_case = pytest.mark.parametrize("case", CASES)
ROWS = [(row, case) for case in CASES for row in gradient_scale.rows(case)]


@pytest.fixture
def found(eight_ranks: Any, layout: str) -> list[dict[str, Any]]:
    """By rank, without the replicas."""
    return [rank for rank in eight_ranks(f"scale-{layout}") if rank is not None]


def loads(experts: Tensor, valid: Tensor) -> Tensor:
    """``[N, E]`` of ``N`` runs of tokens."""
    return torch.stack(
        [torch.bincount(run[real].flatten(), minlength=E) for run, real in zip(experts, valid, strict=True)]
    ).double()


def surrogate(balancer: Any, scores: Tensor, load: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """A function of the scores ``[N, T, E]`` of ``N`` runs whose gradient is the balancer's, and the value for the log.

    Args:
        balancer: for its options.
        scores: differentiable.
        load: ``[N, E]``, against which the runs are balanced.
        valid: ``[N, T]``.
    """
    losses, values = [], []
    for score, row, real in zip(scores, load, valid, strict=True):
        if real.any():
            error = row * E / row.sum() - 1
            size = error.abs().max().item() / getattr(balancer, "tau", 1.0)
            slope = error * (math.tanh(size) / size if balancer.bound and size else 1.0)
            if isinstance(balancer, LEI):
                losses.append(
                    balancer.eta * (score[real] * slope).sum() / (real.sum() if balancer.units == "per_token" else 1)
                )
                values.append(torch.zeros(()))
            else:
                mean = (score / score.sum(-1, keepdim=True))[real].mean(0)
                losses.append(balancer.coefficient * (slope * mean).sum())
                values.append(1 + (error * mean.detach()).sum())
    return torch.stack(losses).mean(), torch.stack(values).mean()


@cache
def reference(row: Any, accumulation: int, case: str) -> tuple[Tensor, Tensor]:
    """Gradient of the router's weight by autograd, and the mean value, from all tokens in one process."""
    balancer = row.build(E, K)
    scope = getattr(balancer, "scope", "microbatch")
    weight = gradient_scale.router_weight().requires_grad_()
    batch = [gradient_scale.microbatch(index, case) for index in range(NUM_MICROBATCHES)]
    if scope != "sequence":
        batch = [(x.flatten(0, 1)[None], valid.flatten()[None]) for x, valid in batch]
    scores = [torch.sigmoid(x @ weight.T) for x, _valid in batch]
    local = [loads(score.topk(K).indices, valid) for score, (_x, valid) in zip(scores, batch, strict=True)]
    total = sum(int(valid.sum()) for _x, valid in batch)
    losses, values = [], []
    for index, (score, (_x, valid)) in enumerate(zip(scores, batch, strict=True)):
        load = local[index]
        if scope == "global":
            # of the step so far, in which all ranks are at the same place in their accumulation
            load = torch.stack(local)[
                [other % accumulation <= index % accumulation for other in range(len(local))]
            ].sum(0)
        loss, value = surrogate(balancer, score, load, valid)
        losses.append(loss * (int(valid.sum()) / total if case.startswith("token") else 1 / NUM_MICROBATCHES))
        values.append(value)
    (gradient,) = torch.autograd.grad(torch.stack(losses).sum(), weight)
    return gradient, torch.stack(values).mean()


def z_reference(case: str) -> tuple[Tensor, Tensor]:
    weight = gradient_scale.router_weight().requires_grad_()
    batch = [gradient_scale.microbatch(index, case) for index in range(NUM_MICROBATCHES)]
    values = torch.stack([(x @ weight.T).logsumexp(-1).square()[valid].mean() for x, valid in batch])
    counts = torch.stack([valid.sum() for _x, valid in batch])
    shares = counts / counts.sum() if case.startswith("token") else torch.full((len(counts),), 1 / len(counts))
    (gradient,) = torch.autograd.grad(gradient_scale.Z_LOSS * (shares * values).sum(), weight)
    return gradient, values.mean().detach()


@every_layout
@pytest.mark.parametrize(("row", "case"), ROWS, ids=[f"{row.name}-{case}" for row, case in ROWS])
def test_g2_gradient_is_that_of_one_process(row: Any, case: str, layout: str, found: list[dict[str, Any]]) -> None:
    accumulation = NUM_MICROBATCHES // int(layout[0]) if "global" in row.name else 1
    expected, value = reference(row, accumulation, case)
    for rank in found:
        torch.testing.assert_close(rank[case]["gradient"][row.name], expected, rtol=1e-10, atol=1e-15)
        # a shard's value is a mean over its own tokens, so the mean of values wants as many in each
        if case != "token_ragged":
            torch.testing.assert_close(rank[case]["value"][row.name], value.double(), rtol=1e-12, atol=0)


# the load of the step so far is another one in another layout, unless all microbatches have the same
FREE = [(row, case) for row, case in ROWS if "global" not in row.name or case == "mean_permuted"]


@every_layout
@pytest.mark.parametrize(("row", "case"), FREE, ids=[f"{row.name}-{case}" for row, case in FREE])
def test_g2_gradient_and_value_do_not_depend_on_the_layout(
    row: Any, case: str, layout: str, found: list[dict[str, Any]], eight_ranks: Any
) -> None:
    alone = eight_ranks("scale-1x8")[0]
    for what, tolerance in {"gradient": 1e-10, "value": 1e-12}.items():
        if what == "gradient" or case != "token_ragged":
            expected = alone[case][what][row.name]
            torch.testing.assert_close(found[-1][case][what][row.name], expected, rtol=tolerance, atol=1e-15)
    assert alone[case]["gradient"][row.name].any()


@every_layout
@every_case
def test_g2_z_loss_does_not_depend_on_the_layout(case: str, layout: str, found: list[dict[str, Any]]) -> None:
    gradient, value = z_reference(case)
    for rank in found:
        # the router computes in fp32
        torch.testing.assert_close(rank[case]["gradient"]["z_loss"], gradient, rtol=1e-5, atol=1e-6)
        if case != "token_ragged":
            torch.testing.assert_close(rank[case]["value"]["z_loss"], value, rtol=1e-6, atol=0)


@every_layout
@every_case
def test_g4_local_counts_are_not_overwritten(case: str, layout: str, found: list[dict[str, Any]]) -> None:
    assert all(rank[case]["kept"] for rank in found)


@pytest.mark.parametrize("size", gradient_scale.REPLICATED)
def test_g1_global_loss_on_replicated_input_is_the_local_one(size: int, eight_ranks: Any) -> None:
    for rank in eight_ranks("replicated"):
        for local, pooled in zip(rank[size]["microbatch"], rank[size]["global"], strict=True):
            assert local.dtype == torch.float64
            assert local.any()
            assert torch.equal(local, pooled)
