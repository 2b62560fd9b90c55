"""Expert parallelism and FSDP2 on eight ranks against one rank that holds everything."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from ranks import expert_parallel as checks

Eight = Callable[[str], list[Any]]
every_layout = pytest.mark.parametrize("layout", checks.LAYOUTS)


@pytest.fixture
def alone(layout: str) -> dict[str, Any]:
    """All microbatches on this process."""
    return take_steps_alone(checks.LAYOUTS[layout].get("capacity_factor", -1.0))


@cache
def take_steps_alone(capacity_factor: float) -> dict[str, Any]:
    model = checks.build_model(capacity_factor)
    return checks.take_steps(model, model, range(checks.WORLD_SIZE * checks.ACCUMULATION), None)


@every_layout
def test_losses_are_those_of_one_rank(layout: str, eight_ranks: Eight, alone: dict[str, Any]) -> None:
    found = eight_ranks(f"layout-{layout}")
    for step in range(2):
        part = slice(step * checks.ACCUMULATION, (step + 1) * checks.ACCUMULATION)
        losses = [loss for rank in found for loss in rank["losses"][part]]
        expected = alone["losses"][step * len(losses) : (step + 1) * len(losses)]
        assert losses == pytest.approx(expected, rel=2e-6 if step == 0 else 1e-4)


@every_layout
def test_gradients_and_their_norm_are_those_of_one_rank(layout: str, eight_ranks: Eight, alone: dict[str, Any]) -> None:
    found = eight_ranks(f"layout-{layout}")
    for name, expected in alone["gradients"].items():
        scale = expected.abs().max().item()
        assert scale > 0, name
        torch.testing.assert_close(found[0]["gradients"][name], expected, rtol=1e-3, atol=1e-4 * scale, msg=name)
    for rank in found:
        assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        assert rank["norms"] == found[0]["norms"]
    assert alone["norms"][0] > checks.CLIP


@every_layout
def test_weights_after_two_steps_are_those_of_one_rank(layout: str, eight_ranks: Eight, alone: dict[str, Any]) -> None:
    found = eight_ranks(f"layout-{layout}")
    for name, expected in alone["weights"].items():
        torch.testing.assert_close(found[0]["weights"][name], expected, rtol=1e-3, atol=1e-4, msg=name)


@every_layout
def test_biases_are_the_same_bits_on_all_ranks_and_those_of_one_rank(
    layout: str, eight_ranks: Eight, alone: dict[str, Any]
) -> None:
    found = eight_ranks(f"layout-{layout}")
    assert all(torch.equal(rank["biases"], found[0]["biases"]) for rank in found)
    # scores of the second step may differ by the rounding of bf16 margins
    torch.testing.assert_close(found[0]["biases"], alone["biases"], rtol=0, atol=5e-3)
    assert alone["biases"].abs().max() > 0.05


@every_layout
def test_every_rank_holds_its_share_of_the_experts(layout: str, eight_ranks: Eight) -> None:
    options = checks.LAYOUTS[layout]
    shares = options.get("ep", 1) * options.get("dp_shard", 1)
    whole = 8 * (16 * 16 + 8 * 16)
    assert [rank["local_expert_parameters"] for rank in eight_ranks(f"layout-{layout}")] == [whole // shares] * 8


@pytest.mark.parametrize("name", checks.DISPATCHES)
def test_dispatch_and_combine_with_uneven_splits(name: str, eight_ranks: Eight) -> None:
    """Outputs, gradients of the rows, and gradients of the experts, which add up over the ranks that send to them."""
    found = [rank[name] for rank in eight_ranks("dispatch")]
    for start in (0, 4):
        weights = checks.expert_weights().requires_grad_()
        for rank in range(start, start + 4):
            counts = checks.DISPATCHES[name](rank)
            rows = checks.dispatch_rows(counts, rank).requires_grad_()
            out = partial(checks.scale_rows, weights)(rows, counts)
            out.square().sum().backward()
            assert torch.equal(found[rank]["out"], out)
            assert torch.equal(found[rank]["rows"], rows.grad)
        there = torch.cat([found[rank]["weights"] for rank in range(start, start + 4)])
        torch.testing.assert_close(there, weights.grad, rtol=1e-12, atol=0)
