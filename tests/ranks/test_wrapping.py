"""Balancers of a model under DDP and FSDP2 on eight gloo ranks."""

from typing import Any

import pytest
import torch

from .contract import BIAS
from .wrapping import NUM_MICROBATCHES, NUM_STEPS, WRAPPERS, E

every_wrapper = pytest.mark.parametrize("how", WRAPPERS)
every_row = pytest.mark.parametrize("row", BIAS, ids=lambda row: row.name)


@pytest.fixture
def found(eight_ranks: Any, how: str) -> list[dict[str, Any]]:
    return [rank[how] for rank in eight_ranks("wrapping")]


@every_wrapper
@every_row
def test_e9_wrapped_bias_is_a_whole_fp32_tensor(row: Any, how: str, found: list[dict[str, Any]]) -> None:
    assert [rank["sharded"] for rank in found] == ["DTensor" if how == "fsdp" else "Parameter"] * 8
    assert [rank["kind"][row.name] for rank in found] == [("Tensor", "torch.float32", (E,))] * 8


@every_wrapper
@every_row
def test_e14_addresses_stay_over_wrapping_and_steps(row: Any, how: str, found: list[dict[str, Any]]) -> None:
    for rank in found:
        first, *later = [addresses[row.name] for addresses in rank["addresses"]]
        assert len(later) == 1 + NUM_STEPS * (NUM_MICROBATCHES + 1)
        assert all(addresses == first for addresses in later)


@every_wrapper
@every_row
def test_s1_wrapping_leaves_the_counts_of_a_rank_alone(row: Any, how: str, found: list[dict[str, Any]]) -> None:
    for rank in found:
        for held, plain in zip(rank["held"], rank["plain_held"], strict=True):
            assert held[row.name].keys() == plain[row.name].keys()
            assert all(torch.equal(held[row.name][name], value) for name, value in plain[row.name].items())
    # ranks see other tokens: one that overwrote another's would be noticed
    first, other = (found[rank]["held"][0][row.name] for rank in (0, 5))
    assert any(not torch.equal(first[name], other[name]) for name in first)


@every_wrapper
@every_row
def test_e11_wrapped_bias_moves_as_that_of_the_plain_model(row: Any, how: str, found: list[dict[str, Any]]) -> None:
    for step in range(NUM_STEPS):
        expected = found[0]["plain_bias"][step][row.name]
        assert expected.any()
        assert all(torch.equal(rank["bias"][step][row.name], expected) for rank in found)
