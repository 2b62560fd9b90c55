"""The arithmetic of the report against numbers worked by hand."""

import doctest
import math
import warnings
from types import ModuleType

import pytest

from equipoise.experiments.report import comparison, statistics, tables
from equipoise.experiments.report.statistics import mean_and_std, paired_difference, tail_mean, tail_start

# the 97.5 % point of Student's t from printed tables, by degrees of freedom
T_TABLE = {2: 4.3027, 3: 3.1824}


@pytest.mark.parametrize("module", [statistics, comparison, tables], ids=lambda module: module.__name__)
def test_doctests(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize(
    ("steps", "tail", "start"), [(150, 0.333, 101), (150, 1 / 3, 101), (150, 1, 1), (7, 0.5, 4), (1, 0.1, 1)]
)
def test_tail_start(steps: int, tail: float, start: int) -> None:
    assert tail_start(steps, tail) == start


@pytest.mark.parametrize("tail", [0, -0.1, 1.01, math.nan])
def test_tail_outside_its_range_is_refused(tail: float) -> None:
    with pytest.raises(ValueError, match="expected a number in"):
        tail_start(150, tail)


def test_tail_mean_skips_early_steps_and_gaps() -> None:
    assert tail_mean([1, 2, 3, 4], [100.0, 1.0, math.nan, 2.0], start=2) == 1.5
    assert math.isnan(tail_mean([], [], start=1))


def test_std_is_the_samples_own() -> None:
    mean, std = mean_and_std([1.0, 2.0, 4.0])
    assert mean == pytest.approx(7 / 3)
    # squared deviations 16/9 + 1/9 + 25/9 = 42/9, over n - 1 = 2
    assert std == pytest.approx(math.sqrt(42 / 18))


@pytest.mark.parametrize(
    ("row", "mean", "std"),
    [({0: 2.0, 1: 4.0, 2: 6.0}, 3.0, 1.0), ({0: 1.5, 1: 2.5, 2: 3.5, 3: 4.5}, 0.5, 0.0)],
)
def test_interval_by_hand(row: dict[int, float], mean: float, std: float) -> None:
    reference = {0: 0.0, 1: 1.0, 2: 2.0} if len(row) == 3 else {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}
    found = paired_difference(row, reference)
    half_width = T_TABLE[len(row) - 1] * std / math.sqrt(len(row))
    assert found.mean == pytest.approx(mean)
    assert found.low == pytest.approx(mean - half_width, abs=1e-4)
    assert found.high == pytest.approx(mean + half_width, abs=1e-4)
    assert found.real is (mean > half_width)


def test_pairing_removes_what_the_seeds_share() -> None:
    shared = {0: 10.0, 1: 20.0, 2: 30.0}
    found = paired_difference({seed: value + 1 + seed / 100 for seed, value in shared.items()}, shared)
    assert found.mean == pytest.approx(1.01)
    assert found.real


@pytest.mark.parametrize(("offset", "real"), [(0.25, True), (0.0, False)])
def test_equal_differences_give_an_interval_of_no_width(offset: float, real: bool) -> None:
    reference = {0: 1.0, 1: 2.0, 2: 4.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = paired_difference({seed: value + offset for seed, value in reference.items()}, reference)
    assert (found.low, found.mean, found.high) == (offset, offset, offset)
    assert found.real is real


def test_only_shared_seeds_count() -> None:
    found = paired_difference({0: 5.0, 1: 7.0, 2: math.nan, 9: 100.0}, {0: 1.0, 1: 2.0, 2: 3.0, 8: 0.0})
    assert (found.mean, found.num_pairs) == (4.5, 2)


@pytest.mark.parametrize("num_seeds", [0, 1, 2])
def test_too_few_seeds_claim_nothing(num_seeds: int) -> None:
    found = paired_difference(dict.fromkeys(range(num_seeds), 5.0), dict.fromkeys(range(num_seeds), 1.0))
    assert found.num_pairs == num_seeds
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    assert not found.real
