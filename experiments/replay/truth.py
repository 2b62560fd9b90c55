"""What the estimators are held against: the pooled quantile in fp64, by a partial sort instead of counts.

``T`` tokens, ``E`` experts, ``K`` experts a token. Nothing here is shared with ``kernels`` or ``balancers``.
"""

from dataclasses import dataclass

import numpy as np

# values of a block: what is made of it stays in the cache
BLOCK_SIZE = 2**17


@dataclass(frozen=True, eq=False)
class Truth:
    """The target of a batch and how sharply the batch determines it.

    Args:
        quantile: ``[E]`` fp64, the ``ceil(T*K/E)``-th smallest margin of each expert.
        noise: mean over experts of half the absolute difference between the quantiles of two halves of the tokens, both
            centred as a bias is: what ``error_mean`` would be if other tokens of the same sequences had been drawn.
            Neighbours are in different halves, so where they are alike it is too small. NaN for fewer than two tokens.
    """

    quantile: np.ndarray
    noise: float


def pooled_quantile(logits: np.ndarray, bias: np.ndarray, top_k: int, gate: str, selection: str) -> Truth:
    """The quantile of all margins of a batch, under the bias that routes it.

    Args:
        logits: ``[T, E]`` fp32.
        bias: ``[E]``.
        top_k: ``K``.
        gate, selection: as in ``kernels.route``.

    >>> truth = pooled_quantile(np.array([[0.0, 1.0], [0.0, 3.0]]), np.zeros(2), 1, "sigmoid", "logit")
    >>> truth.quantile.tolist(), truth.noise
    ([0.0, -3.0], 0.5)
    """
    num_tokens, num_experts = logits.shape
    # a row for each expert, as a partial sort wants it
    margins_ET = np.empty((num_experts, num_tokens))
    height = max(1, BLOCK_SIZE // num_experts)
    for top in range(0, num_tokens, height):
        margins_ET[:, top : top + height] = _margins(logits[top : top + height], bias, top_k, gate, selection).T
    noise = np.nan
    if num_tokens > 1:
        halves = [_quantile(margins_ET[:, first::2], top_k) for first in (0, 1)]
        apart = (halves[0] - halves[1]) / 2
        noise = float(np.abs(apart - apart.mean()).mean())
    return Truth(_quantile(margins_ET, top_k), noise)


def _margins(logits: np.ndarray, bias: np.ndarray, top_k: int, gate: str, selection: str) -> np.ndarray:
    """The cutoff, the (K+1)-th largest biased score, minus what the bias is added to; ``[T, E]`` fp64."""
    scores = logits.astype(np.float64)
    if selection == "score":
        scores = _gate_scores(scores, gate)
    at = logits.shape[1] - 1 - top_k
    cutoff = np.partition(scores + bias, at, axis=1)[:, at]
    return cutoff[:, None] - scores


def _gate_scores(logits: np.ndarray, gate: str) -> np.ndarray:
    if gate == "sigmoid":
        # exp of a large number is infinite, and 1 over that is the right 0
        with np.errstate(over="ignore"):
            return 1 / (1 + np.exp(-logits))
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def _quantile(margins_ET: np.ndarray, top_k: int) -> np.ndarray:
    num_experts, num_tokens = margins_ET.shape
    rank = -(-num_tokens * top_k // num_experts)
    height = max(1, BLOCK_SIZE // num_tokens)
    blocks = [
        np.partition(margins_ET[first : first + height], rank - 1, axis=1)[:, rank - 1]
        for first in range(0, num_experts, height)
    ]
    return np.concatenate(blocks)
