"""What an update must give, from all tokens at once, in NumPy: nothing here is the project's, but for the options.

``T`` tokens, ``E`` experts, ``K`` experts a token, ``B`` bins. A batch is a list over token shards of lists over
microbatches of logits ``[T, E]`` and mask ``[T]``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.balancers import ExactQB, HistogramQB, RankAveragedQB, SignedCount

Array = NDArray[Any]
Batch = list[list[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Oracle:
    """Of a balancer with the bias that routed a batch: the first sum over all shards, and the next bias before ``ema``
    and centring.
    """

    statistic: Callable[[Any, Batch], Array]
    solution: Callable[[Any, Batch], Array]


def routed(balancer: Any, logits: Tensor, valid: Tensor) -> tuple[Array, Array]:
    """Margins ``[N, E]`` fp32 and experts ``[N, K]`` of the valid tokens."""
    scores = (1 / (1 + torch.exp(-logits))).numpy()[valid.numpy()]
    biased = scores + balancer.bias.numpy()
    order = np.argsort(-biased, axis=1, kind="stable")
    cutoff = np.take_along_axis(biased, order[:, balancer.top_k, None], axis=1)
    return cutoff - scores, order[:, : balancer.top_k]


def pooled_margins(balancer: Any, batch: Batch) -> Array:
    """Margins of all valid tokens, ``[N, E]``."""
    return np.concatenate([routed(balancer, *part)[0] for shard in batch for part in shard])


def pooled_load(balancer: Any, batch: Batch) -> Array:
    """``[E]``, choices of all valid tokens."""
    chosen = np.concatenate([routed(balancer, *part)[1].ravel() for shard in batch for part in shard])
    return np.bincount(chosen, minlength=balancer.num_experts)


def nudged(balancer: SignedCount, batch: Batch) -> Array:
    load = pooled_load(balancer, batch)
    mean = load.sum() / balancer.num_experts
    step = np.sign(mean - load) if balancer.rule == "sign" else (mean - load) / mean
    return balancer.bias.numpy() + balancer.rate * (step - step.mean() if balancer.centred else step)


def histogram(balancer: HistogramQB, batch: Batch) -> Array:
    """``[E, B+1]``; the last column counts margins outside the range, of which there are none."""
    bias, num_bins = balancer.bias.numpy(), balancer.counts.shape[1]
    lower, upper = bias.min() - np.float32(1), bias.max() + np.float32(1)
    bins = (
        (pooled_margins(balancer, batch) - lower) * (np.float32(1) / (upper - lower) * np.float32(num_bins))
    ).astype(int)
    assert bins.min() >= 0
    assert bins.max() < num_bins
    return np.stack([np.bincount(column, minlength=num_bins + 1) for column in bins.T])


def interpolated(balancer: HistogramQB, batch: Batch) -> Array:
    """Linear inside the first bin up to which there are ``ceil(T*K/E)`` margins."""
    counts, bias = histogram(balancer, batch), balancer.bias.numpy().astype(float)
    width = (bias.max() - bias.min() + 2) / balancer.counts.shape[1]
    found = []
    for row in counts:
        target = row.sum() * balancer.top_k / balancer.num_experts
        chosen = int(np.argmax(row.cumsum() >= np.ceil(target)))
        inside = (target - row[:chosen].sum()) / row[chosen]
        found.append(bias.min() - 1 + (chosen + np.clip(inside, 0, 1)) * width)
    return np.array(found)


def rounded(balancer: ExactQB, batch: Batch) -> Tensor:
    """The margins of all tokens in the dtype of the key, or the nearest on a scale of so many bits."""
    margins = pooled_margins(balancer, batch)
    if balancer.key.startswith("fixed"):
        levels = np.float32(min(2 ** int(balancer.key.removeprefix("fixed")), 65024) - 1)
        lower, upper = balancer.bias.numpy().min() - np.float32(1), balancer.bias.numpy().max() + np.float32(1)
        level = np.floor((margins - lower) * (np.float32(1) / (upper - lower) * levels) + np.float32(0.5))
        return torch.from_numpy(lower + level.astype(float) * ((float(upper) - float(lower)) / levels))
    dtype = torch.bfloat16 if balancer.key == "bf16" else torch.float32
    return torch.from_numpy(margins).to(dtype)


def high_bytes(balancer: ExactQB, batch: Batch) -> Array:
    """``[E, 256]``: a set sign bit turns all bits, a clear one is set; the highest byte of that."""
    margins = rounded(balancer, batch) + 0.0
    width = 8 * margins.itemsize
    bits = margins.view(torch.int16 if width == 16 else torch.int32).long().numpy()
    keys = np.where(bits < 0, ~bits, bits | 1 << (width - 1)) & ((1 << width) - 1)
    return np.stack([np.bincount(column >> (width - 8), minlength=256) for column in keys.T])


def order_statistic(balancer: ExactQB, batch: Batch) -> Array:
    return smallest(rounded(balancer, batch).double().numpy(), balancer, balancer.order == "q_plus_1")


def smallest(margins: Array, balancer: Any, after: bool = False) -> Array:
    """The ``ceil(T*K/E)``-th smallest of every column, or the one after it."""
    rank = -(-len(margins) * balancer.top_k // balancer.num_experts)
    return np.sort(margins, axis=0)[min(rank + after, len(margins)) - 1]


def summed_quantiles(balancer: RankAveragedQB, batch: Batch) -> Array:
    """``[E+1]``: the sum of the quantiles of ranks or of their microbatches, and how many have a token."""
    parts = [[part] for shard in batch for part in shard] if balancer.per == "microbatch" else batch
    margins = [pooled_margins(balancer, [part]) for part in parts]
    quantiles = [np.append(smallest(each, balancer), 1.0) for each in margins if len(each)]
    return np.sum(quantiles, axis=0)


def mean_quantile(balancer: RankAveragedQB, batch: Batch) -> Array:
    total = summed_quantiles(balancer, batch)
    return total[:-1] / total[-1]


ORACLES: dict[type, Oracle] = {
    SignedCount: Oracle(pooled_load, nudged),
    HistogramQB: Oracle(histogram, interpolated),
    ExactQB: Oracle(high_bytes, order_statistic),
    RankAveragedQB: Oracle(summed_quantiles, mean_quantile),
}


def next_bias(balancer: Any, batch: Batch) -> Array:
    """``[E]`` fp64, with ``ema`` and centring."""
    target = ORACLES[type(balancer)].solution(balancer, batch).astype(float)
    if balancer.centre:
        target = target - target.mean()
    return balancer.ema * balancer.bias.numpy() + (1 - balancer.ema) * target
