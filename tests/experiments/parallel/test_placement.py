"""The slowest device's share of a load, and placements of experts against all that there are."""

from itertools import combinations

import pytest
import torch

from equipoise.balancers.metrics import device_max_violation
from equipoise.experiments.parallel.placement import best_placement, least_share, slowest_share


def skewed_loads(num_loads, num_experts, seed):
    """Experts of very different popularity, which changes a little from load to load."""
    generator = torch.Generator().manual_seed(seed)
    popularity = 2 * torch.randn(num_experts, generator=generator)
    noise = 0.3 * torch.randn(num_loads, num_experts, generator=generator)
    return (100 * (popularity + noise).exp()).long()


def placements(experts, num_local):
    """All of them, but for the order of devices and on a device."""
    if not experts:
        yield []
        return
    for others in combinations(experts[1:], num_local - 1):
        here = [experts[0], *others]
        for rest in placements([expert for expert in experts if expert not in here], num_local):
            yield here + rest


@pytest.mark.parametrize(("num_experts", "num_devices"), [(6, 2), (6, 3), (8, 4), (8, 2), (4, 4), (4, 1)])
def test_the_local_optimum_is_the_best_of_all_or_close_and_above_the_bound(num_experts, num_devices):
    found, exact = [], []
    for seed in range(8):
        loads = skewed_loads(5, num_experts, seed)
        mean = slowest_share(loads, num_devices, best_placement(loads, num_devices)).mean()
        every = placements(list(range(num_experts)), num_experts // num_devices)
        best = min(slowest_share(loads, num_devices, torch.tensor(order)).mean() for order in every)
        assert least_share(loads, num_devices).mean() - 1e-12 <= best <= mean + 1e-12
        assert mean <= best * 1.05
        found.append(mean)
        exact.append(best)
    # of eight problems a local optimum misses the best one rarely
    assert sum(mean <= best + 1e-9 for mean, best in zip(found, exact, strict=True)) >= 6


def test_no_swap_of_two_experts_helps():
    loads = skewed_loads(20, 16, 0)
    placement = best_placement(loads, 4)
    mean = slowest_share(loads, 4, placement).mean()
    assert sorted(placement.tolist()) == list(range(16))
    assert mean < slowest_share(loads, 4).mean() - 0.01
    for one, other in combinations(range(16), 2):
        swapped = placement.clone()
        swapped[[one, other]] = placement[[other, one]]
        assert slowest_share(loads, 4, swapped).mean() >= mean - 1e-9


def test_contiguous_shares_are_those_of_the_metric():
    loads = skewed_loads(3, 8, 1)
    for num_devices in (1, 2, 4, 8):
        violation = device_max_violation(loads, num_devices)
        assert torch.allclose(slowest_share(loads, num_devices) * num_devices - 1, violation)
    nothing = torch.zeros(2, 8, dtype=torch.int64)
    assert slowest_share(nothing, 4).tolist() == least_share(nothing, 4).tolist() == [0.25, 0.25]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: slowest_share(torch.ones(6), 4), "num_devices must divide the 6 experts, got 4"),
        (lambda: least_share(torch.ones(6), 0), "num_devices must divide the 6 experts, got 0"),
        (lambda: slowest_share(torch.ones(3), 3, torch.tensor([0, 1, 1])), r"each of the 3 experts once, got \[0, 1"),
        (lambda: best_placement(torch.ones(0, 4), 2), r"loads must be \[N, E\] with at least one load, got \[0, 4\]"),
        (lambda: best_placement(torch.ones(4), 2), r"loads must be \[N, E\] with at least one load, got \[4\]"),
    ],
)
def test_bad_sizes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
