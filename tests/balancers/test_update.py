"""The drivers of the coroutines: lockstep, stacking, virtual ranks, and eight real gloo ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import updates
from ranks.collectives import ALL_REDUCE
from ranks.contract import BIAS
from torch import Tensor, nn

from equipoise.balancers import (
    LEI,
    BiasBalancer,
    ExactQB,
    GShard,
    HistogramQB,
    SignedCount,
    simulate_ranks,
    update_balancers,
)
from equipoise.balancers.base import Solve
from equipoise.balancers.update import drive, lockstep, run_locally, sum_over_shards
from equipoise.kernels import Routing

Feed = Callable[..., Routing]


def counting(name: int, num_rounds: int) -> Solve:
    """A coroutine that yields its name and returns the sum of what it is sent."""
    total = torch.zeros(1, dtype=torch.long)
    for _round in range(num_rounds):
        answer = yield torch.tensor([name])
        total = total + answer
    return total


def test_lockstep_drops_layers_as_they_finish() -> None:
    seen = []

    def answer(statistics: list[Tensor]) -> list[Tensor]:
        seen.append([int(statistic) for statistic in statistics])
        return [10 * statistic for statistic in statistics]

    rounds = lockstep([counting(1, 2), counting(2, 0), counting(3, 4), counting(4, 1)])
    solutions = drive(rounds, answer)
    assert seen == [[1, 3, 4], [1, 3], [3], [3]]
    assert [int(solution) for solution in solutions] == [20, 0, 120, 40]


def test_lockstep_of_no_layer_has_no_round() -> None:
    def unexpected(statistics: list[Tensor]) -> list[Tensor]:
        raise AssertionError(f"no layer, but the statistics {statistics}")

    assert drive(lockstep([]), unexpected) == []


def test_run_locally_answers_with_the_statistic_itself() -> None:
    assert run_locally(counting(7, 3)).tolist() == [21]


def test_sum_of_one_process_is_the_statistic() -> None:
    tensors = [torch.arange(3), torch.ones(2, 2)]
    sums = sum_over_shards(tensors)
    assert all(torch.equal(*pair) for pair in zip(sums, tensors, strict=True))


def test_layers_do_not_depend_on_each_other(feed: Feed) -> None:
    builders: list[Callable[[], BiasBalancer]] = [
        lambda: ExactQB(5, 2, key="fp32"),
        lambda: SignedCount(5, 2),
        lambda: ExactQB(5, 2),
        lambda: HistogramQB(5, 2),
    ]
    together, alone = [build() for build in builders], [build() for build in builders]
    for seed, (one, other) in enumerate(zip(together, alone, strict=True)):
        logits = torch.randn(20, 5, generator=torch.Generator().manual_seed(seed))
        feed(one, logits)
        feed(other, logits)
        update_balancers([other])
    update_balancers(together)
    assert all(torch.equal(one.bias, other.bias) for one, other in zip(together, alone, strict=True))


def test_a_model_is_searched_and_a_balancer_is_one(feed: Feed) -> None:
    in_model, single = SignedCount(5, 2), SignedCount(5, 2)
    gshard = GShard(5, 2, scope="global")
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"bias": in_model, "gradient": gshard, "other": LEI(5, 2)}))
    logits = torch.randn(20, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for balancer in (in_model, single):
        routing = feed(balancer, logits)
    gshard.steer(routing)
    assert gshard.step_load.any()
    update_balancers(model)
    update_balancers(single)
    assert in_model.bias.any()
    assert torch.equal(in_model.bias, single.bias)
    assert not gshard.step_load.any()
    assert not in_model.load.any()


def test_update_leaves_no_graph(feed: Feed) -> None:
    balancer = ExactQB(5, 2)
    feed(balancer, torch.randn(9, 5, requires_grad=True))
    update_balancers([balancer])
    assert not balancer.bias.requires_grad
    assert balancer.store.filled.item() == 0


def test_virtual_ranks_with_several_layers(feed: Feed) -> None:
    """Every layer of a rank, frozen ones included, is matched with the same layer of the other ranks."""

    def build() -> list[BiasBalancer]:
        return [ExactQB(5, 2), SignedCount(5, 2, frozen=True), HistogramQB(5, 2), ExactQB(5, 2, key="fp32")]

    whole, ranks = build(), [build() for _ in range(3)]
    for seed, layers in enumerate(ranks):
        logits = torch.randn(7 * seed, 5, generator=torch.Generator().manual_seed(seed))
        for layer in (*layers, *whole):
            feed(layer, logits)
    update_balancers(whole)
    simulate_ranks(ranks)
    for layers in ranks:
        assert all(torch.equal(layer.bias, wanted.bias) for layer, wanted in zip(layers, whole, strict=True))
    assert not whole[1].bias.any()
    before = whole[0].bias.clone()
    # the statistics are gone: another update moves nothing
    simulate_ranks(ranks)
    assert torch.equal(ranks[2][0].bias, before)


def test_virtual_ranks_need_the_same_layers() -> None:
    with pytest.raises(ValueError, match=r"every rank must have the same layers, got \[2, 1\] balancers"):
        simulate_ranks([[SignedCount(4, 1), SignedCount(4, 1)], [SignedCount(4, 1)]])


@pytest.mark.parametrize("ranks", [[], [[], []]])
def test_no_virtual_rank_is_nothing_to_do(ranks: list[list[BiasBalancer]]) -> None:
    simulate_ranks(ranks)
    assert not any(ranks)


def test_only_bias_balancers_have_virtual_ranks() -> None:
    with pytest.raises(ValueError, match="expected bias balancers, got LEI among them"):
        simulate_ranks([[LEI(8, 2)]])  # type: ignore[list-item]


every_group_size = pytest.mark.parametrize("size", updates.GROUPS)


@every_group_size
def test_real_ranks_update_as_virtual_ones(size: int, eight_ranks: Any) -> None:
    found = [rank[size]["biases"] for rank in eight_ranks("updates")]
    for members in updates.GROUPS[size]:
        virtual = [updates.build_layers() for _ in members]
        for step in range(2):
            for layers, rank in zip(virtual, members, strict=True):
                updates.feed(layers, rank, step)
            simulate_ranks(virtual)
            expected = [layer.bias for layer in virtual[0]]
            for rank in members:
                assert all(torch.equal(*pair) for pair in zip(found[rank][step][:-1], expected[:-1], strict=True))
                # a sum of floats: its order is the backend's
                torch.testing.assert_close(found[rank][step][-1], expected[-1], rtol=0, atol=1e-6)
            assert [bool(bias.any()) for bias in expected] == [True, True, True, True, False, True]


@every_group_size
def test_all_ranks_have_the_identical_bias(size: int, eight_ranks: Any) -> None:
    found = [rank[size]["biases"] for rank in eight_ranks("updates")]
    for members in updates.GROUPS[size]:
        for step in range(2):
            first, *others = [found[rank][step] for rank in members]
            for other in others:
                assert all(torch.equal(*pair) for pair in zip(first, other, strict=True))
    if size < 8:
        assert not torch.equal(found[0][0][0], found[size][0][0])


@every_group_size
def test_one_collective_per_round_and_dtype(size: int, eight_ranks: Any) -> None:
    exact, histogram, signed, averaged = 7 * 256, 7 * (50 + 1), 7, 7 + 1
    expected = [
        (ALL_REDUCE, "torch.int32", exact + histogram + exact + signed),
        (ALL_REDUCE, "torch.float32", averaged),
        (ALL_REDUCE, "torch.int32", exact + exact),
        (ALL_REDUCE, "torch.int32", exact),
        (ALL_REDUCE, "torch.int32", exact),
    ]
    assert all(rank[size]["calls"] == expected for rank in eight_ranks("updates"))


def test_g4_global_loss_sums_the_loads_and_keeps_the_local_ones(eight_ranks: Any) -> None:
    found = eight_ranks("global_loss")
    pooled = torch.stack([rank["local_load"] for rank in found]).sum(0).double()
    for rank in found:
        assert torch.equal(rank["step_load"], rank["local_load"].long())
        assert rank["finite"]
    for rank in found[:7]:
        expected = (pooled / pooled.mean() * rank["mean_shares"]).sum()
        torch.testing.assert_close(rank["value"], expected, rtol=1e-12, atol=0)
    # the rank of padding joined the collective and added nothing
    assert not found[7]["local_load"].any()


@pytest.mark.parametrize("row", BIAS, ids=lambda row: row.name)
def test_s7_stage_without_layers_does_not_hang_the_others(row: Any, eight_ranks: Any) -> None:
    """Layers [on, off, on] on five ranks, a pipeline stage without any on three."""
    found = eight_ranks("stages")
    members = updates.STAGES["with_layers"]
    virtual = [updates.build_stage(row) for _ in members]
    for layers, rank in zip(virtual, members, strict=True):
        updates.feed(layers, rank, 0)
    simulate_ranks(virtual)
    for rank in members:
        on, off, last = found[rank][row.name]
        for bias in (on, last):
            # a sum of floats: its order is the backend's
            torch.testing.assert_close(bias, virtual[0][0].bias, rtol=0, atol=0 if row.splits == "ranks" else 1e-6)
        assert on.any()
        assert not off.any()
    assert all(found[rank] == {} for rank in updates.STAGES["without_layers"])


@pytest.mark.parametrize("how", updates.DIFFERENCES)
def test_s7_ranks_with_other_layers_are_refused_on_all_ranks(how: str, eight_ranks: Any) -> None:
    errors = {rank[how] for rank in eight_ranks("replicas")}
    if how == "none":
        assert errors == {None}
    else:
        (error,) = errors
        assert error is not None
        assert error.startswith("every rank must have the same balancers")
        assert error.endswith("[3]")


def test_ranks_observe_again_together_and_arrive_at_the_full_selection(eight_ranks: Any) -> None:
    found = eight_ranks("observed")
    for step in range(3):
        for rank in found:
            assert all(map(torch.equal, rank["lean"][step], rank["full"][step]))
            assert all(map(torch.equal, rank["lean"][step], found[0]["lean"][step]))
            assert rank["fallbacks"][step] == found[0]["fallbacks"][step]
            assert rank["forwards"][step] == (2 if any(rank["fallbacks"][step]) else 1)
    assert any(found[0]["fallbacks"][0])
