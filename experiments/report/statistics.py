"""The arithmetic of the report: tail means, spread over seeds, paired differences. Pure functions, no files.

The rule: a difference between two balancers is paired over the seeds that both have, its interval is Student's t, and
it is called real only if at least ``MIN_SEEDS`` seeds are paired and the interval excludes 0.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

MIN_SEEDS = 3
LEVEL = 0.95


@dataclass(frozen=True)
class Difference:
    """A paired difference ``row - reference``; what cannot be known is NaN.

    ``low`` and ``high`` bound the interval (NaN below ``MIN_SEEDS`` pairs: none is claimed); a pair is a seed of both.
    """

    mean: float
    low: float
    high: float
    num_pairs: int

    @property
    def real(self) -> bool:
        """Whether the interval excludes 0; False where there is no interval."""
        return self.low > 0 or self.high < 0


def tail_start(steps: int, tail: float) -> int:
    """First step (counted from 1) of the window that holds the last share ``tail`` of ``steps``, at least one step.

    Raises:
        ValueError: if ``tail`` is not in (0, 1].

    >>> tail_start(150, 0.333), tail_start(3, 1 / 3), tail_start(10, 1.0), tail_start(10, 0.01)
    (101, 3, 1, 10)
    """
    if not 0 < tail <= 1:
        raise ValueError(f"the tail window is a share of the steps: expected a number in (0, 1], got {tail}")
    # the small subtraction keeps 3 * (1 / 3) from being rounded up to two steps
    return steps - math.ceil(steps * tail - 1e-9) + 1


def tail_mean(steps: npt.ArrayLike, values: npt.ArrayLike, start: int) -> float:
    """Mean of the ``values`` measured at step ``start`` or later; NaN marks "not measured", NaN if none was.

    >>> tail_mean([1, 2, 3, 4], [9.0, 1.0, float("nan"), 3.0], start=2)
    2.0
    >>> tail_mean([1, 2], [9.0, float("nan")], start=2)
    nan
    """
    array = np.asarray(values, dtype=float)
    window = array[(np.asarray(steps) >= start) & ~np.isnan(array)]
    return float(window.mean()) if window.size else math.nan


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (``ddof=1``) of the values that are not NaN; NaN where there are too few.

    >>> mean_and_std([1.0, 2.0, 3.0])
    (2.0, 1.0)
    >>> mean_and_std([2.0])
    (2.0, nan)
    """
    array = np.asarray(values, dtype=float)
    array = array[~np.isnan(array)]
    mean = float(array.mean()) if array.size else math.nan
    std = float(array.std(ddof=1)) if array.size > 1 else math.nan
    return mean, std


def paired_difference(row: Mapping[int, float], reference: Mapping[int, float]) -> Difference:
    """Difference ``row - reference`` of two mappings from seed to value, over the seeds that both have.

    Differences that are equal over all seeds give an interval of zero width at their mean.

    >>> d = paired_difference({0: 2.0, 1: 3.0, 2: 4.0}, {0: 1.0, 1: 1.0, 2: 1.0})
    >>> d.mean, round(d.low, 4), round(d.high, 4), d.real    # 2 -+ 4.3027 * 1 / sqrt(3)
    (2.0, -0.4841, 4.4841, False)
    >>> paired_difference({0: 2.0, 1: 3.0}, {0: 1.0, 1: 1.0})
    Difference(mean=1.5, low=nan, high=nan, num_pairs=2)
    """
    pairs = np.array([row[seed] - reference[seed] for seed in sorted(row.keys() & reference.keys())], dtype=float)
    pairs = pairs[~np.isnan(pairs)]
    mean, std = mean_and_std(pairs.tolist())
    if pairs.size < MIN_SEEDS:
        return Difference(mean, math.nan, math.nan, int(pairs.size))
    # stdtrit is the quantile function of Student's t, without the second that importing scipy.stats takes
    half_width = float(stdtrit(pairs.size - 1, (1 + LEVEL) / 2)) * std / math.sqrt(pairs.size)
    return Difference(mean, mean - half_width, mean + half_width, int(pairs.size))
