"""A checkpoint of two ranks, resharded to one and to four."""

from typing import Any

import pytest
import torch

from .checkpoints import POSITION, READERS
from .contract import BIAS

every_row = pytest.mark.parametrize("row", BIAS, ids=lambda row: row.name)


@pytest.fixture
def writers(eight_ranks: Any) -> list[dict[str, Any]]:
    return [rank["writer"] for rank in eight_ranks("checkpoints") if "writer" in rank]


@pytest.fixture
def readers(eight_ranks: Any) -> dict[int, list[dict[str, Any]]]:
    """By number of ranks."""
    found = eight_ranks("checkpoints")
    return {size: [found[rank][size] for rank in members] for size, members in READERS.items()}


@every_row
def test_e11_other_numbers_of_ranks_load_the_same_bias(
    row: Any, writers: list[dict[str, Any]], readers: dict[int, list[dict[str, Any]]]
) -> None:
    saved = writers[0]["saved"][row.name]
    assert saved.any()
    for reader in [*readers[1], *readers[4]]:
        assert reader["position"] == POSITION
        assert torch.equal(reader["loaded"][row.name], saved)


@every_row
def test_e11_next_bias_after_resharding_is_that_of_as_many_ranks(
    row: Any, writers: list[dict[str, Any]], readers: dict[int, list[dict[str, Any]]]
) -> None:
    """Where the pool of tokens decides, that is the bias of the run that was not cut."""
    virtual = readers[1][0]["virtual"]
    uncut = writers[0]["next"][row.name]
    assert not torch.equal(uncut, writers[0]["saved"][row.name])
    for size, found in {1: readers[1], 2: writers, 4: readers[4]}.items():
        for rank in found:
            # a sum of floats: its order is the backend's
            torch.testing.assert_close(rank["next"][row.name], virtual[size][row.name], rtol=0, atol=1e-6)
            if row.splits == "ranks":
                assert torch.equal(rank["next"][row.name], uncut)
