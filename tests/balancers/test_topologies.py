"""Eight gloo ranks in every topology: tokens are counted once, and all ranks arrive at the same bias."""

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from ranks import oracle, topologies
from ranks.collectives import ALL_REDUCE
from ranks.contract import BIAS

from equipoise.balancers import BiasBalancer, update_balancers
from equipoise.balancers.update import drive

every_topology = pytest.mark.parametrize("topology", topologies.TOPOLOGIES)
every_row = pytest.mark.parametrize("row", BIAS, ids=lambda row: row.name)
# a row that is added to the contract need not be added here
every_known_row = pytest.mark.parametrize(
    "row",
    [row for row in BIAS if type(row.build(topologies.E, topologies.K)) in oracle.ORACLES],
    ids=lambda row: row.name,
)


# whose first round is as the definition has it; candidates and fixed-point keys have sums of their own
every_known_statistic = pytest.mark.parametrize(
    "row",
    [row for row in every_known_row.args[1] if not any(word in row.name for word in ("cut", "window", "fixed"))],
    ids=lambda row: row.name,
)


@pytest.fixture
def found(eight_ranks: Any, topology: str) -> list[dict[str, Any]]:
    return eight_ranks(f"topology-{topology}")


@cache
def batch(topology: str, step: int) -> oracle.Batch:
    return [topologies.microbatches(shard, step) for shard in range(topologies.TOPOLOGIES[topology].num_shards)]


def routed_by(row: Any, found: list[dict[str, Any]], step: int) -> Any:
    """A balancer with the bias that routed a step."""
    balancer = row.build(topologies.E, topologies.K)
    if step:
        balancer.bias.copy_(found[0]["biases"][step - 1][row.name])
    return balancer


@every_topology
@every_row
def test_s6_ranks_with_other_tokens_differ_and_replicas_agree(
    row: Any, topology: str, found: list[dict[str, Any]]
) -> None:
    shards = [topologies.TOPOLOGIES[topology].shard(rank) for rank in range(8)]
    for step in range(topologies.NUM_STEPS):
        local = [rank["local"][step][row.name].numpy().tobytes() for rank in found]
        # the first rank that has the same
        assert [local.index(each) for each in local] == [shards.index(each) for each in shards]


@every_topology
@every_known_statistic
def test_s6_sum_over_token_shards_counts_every_token_once(row: Any, topology: str, found: list[dict[str, Any]]) -> None:
    for step in range(topologies.NUM_STEPS):
        balancer, tokens = routed_by(row, found, step), batch(topology, step)
        expected = oracle.ORACLES[type(balancer)].statistic(balancer, tokens)
        total, *others = [rank["sums"][step][row.name] for rank in found]
        assert all(torch.equal(total, other) for other in others)
        if total.is_floating_point():
            np.testing.assert_allclose(total, expected, rtol=0, atol=1e-5)
        else:
            np.testing.assert_array_equal(total, expected)
            num_valid = sum(int(valid.sum()) for shard in tokens for _logits, valid in shard)
            # a load counts the choices of a token, every other statistic its margins
            assert total.sum() == num_valid * (topologies.K if total.dim() == 1 else topologies.E)


@every_topology
@every_known_row
def test_s6_bias_is_that_of_the_oracle(row: Any, topology: str, found: list[dict[str, Any]]) -> None:
    for step in range(topologies.NUM_STEPS):
        balancer = routed_by(row, found, step)
        expected = oracle.next_bias(balancer, batch(topology, step))
        np.testing.assert_allclose(found[0]["biases"][step][row.name], expected, rtol=0, atol=1e-6)
        assert not torch.equal(found[0]["biases"][step][row.name], balancer.bias)


@every_topology
@every_row
def test_s6_all_ranks_have_the_identical_bias(row: Any, topology: str, found: list[dict[str, Any]]) -> None:
    for step in range(topologies.NUM_STEPS):
        first, *others = [rank["biases"][step][row.name] for rank in found]
        assert all(torch.equal(first, other) for other in others)


@every_topology
@pytest.mark.parametrize("row", [row for row in BIAS if row.splits == "ranks"], ids=lambda row: row.name)
def test_s6_bias_is_that_of_one_process_with_all_tokens(row: Any, topology: str, found: list[dict[str, Any]]) -> None:
    alone = row.build(topologies.E, topologies.K)
    for step in range(topologies.NUM_STEPS):
        for shard in range(topologies.TOPOLOGIES[topology].num_shards):
            topologies.feed(alone, shard, step)
        update_balancers([alone])
        assert torch.equal(found[0]["biases"][step][row.name], alone.bias)


def rounds(topology: str, layer: BiasBalancer, step: int) -> list[tuple[torch.dtype, int]]:
    """Dtype and size of what a layer sums in each round of a step, of which one process sees all tokens."""
    for shard in range(topologies.TOPOLOGIES[topology].num_shards):
        topologies.feed(layer, shard, step)
    found = []

    def note(statistic: torch.Tensor) -> torch.Tensor:
        found.append((statistic.dtype, statistic.numel()))
        return statistic

    with torch.no_grad():
        layer.adopt(drive(layer.solve(), note))
    layer.reset()
    return found


@every_topology
def test_one_all_reduce_per_round_and_dtype_and_nothing_else(topology: str, found: list[dict[str, Any]]) -> None:
    layers = [row.build(topologies.E, topologies.K) for row in BIAS]
    several = topologies.TOPOLOGIES[topology].num_shards > 1
    for step in range(topologies.NUM_STEPS):
        expected = []
        each = [rounds(topology, layer, step) for layer in layers]
        for together in itertools.zip_longest(*each):
            sizes: dict[torch.dtype, int] = {}
            for dtype, size in filter(None, together):
                sizes[dtype] = sizes.get(dtype, 0) + size
            expected += [(ALL_REDUCE, str(dtype), size) for dtype, size in sizes.items()]
        for rank in found:
            assert rank["calls"][step] == (expected if several else [])


@every_topology
@every_row
def test_e14_addresses_stay_over_steps(row: Any, topology: str, found: list[dict[str, Any]]) -> None:
    for rank in found:
        first, *later = [addresses[row.name] for addresses in rank["addresses"]]
        assert "bias" in first
        assert later == [first] * topologies.NUM_STEPS
