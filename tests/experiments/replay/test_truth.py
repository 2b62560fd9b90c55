import numpy as np
import pytest
import torch

from equipoise.balancers import ExactQB, simulate_ranks
from equipoise.experiments.replay import truth
from equipoise.experiments.replay.truth import pooled_quantile
from equipoise.kernels import route


def drawn(num_tokens, num_experts, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((num_tokens, num_experts)).astype(np.float32), rng.normal(0, 0.1, num_experts)


def by_hand(logits, bias, top_k, gate, selection):
    """The definition, token by token and expert by expert."""
    margins = []
    for row in logits.astype(np.float64):
        weights = 1 / (1 + np.exp(-row)) if gate == "sigmoid" else np.exp(row) / np.exp(row).sum()
        scores = weights if selection == "score" else row
        margins.append(sorted(scores + bias, reverse=True)[top_k] - scores)
    rank = -(-len(logits) * top_k // logits.shape[1])
    return [sorted(column)[rank - 1] for column in np.transpose(margins)]


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
@pytest.mark.parametrize("selection", ["score", "logit"])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 2, 1), (7, 5, 3), (96, 12, 4), (41, 33, 1)])
def test_the_definition(monkeypatch, gate, selection, num_tokens, num_experts, top_k):
    # many blocks, the last of them smaller
    monkeypatch.setattr(truth, "BLOCK_SIZE", 64)
    logits, bias = drawn(num_tokens, num_experts)
    found = pooled_quantile(logits, bias, top_k, gate, selection)
    expected = by_hand(logits, bias, top_k, gate, selection)
    np.testing.assert_allclose(found.quantile, expected, rtol=0, atol=1e-14)
    if num_tokens == 1:
        assert np.isnan(found.noise)
    else:
        halves = [np.array(by_hand(logits[first::2], bias, top_k, gate, selection)) for first in (0, 1)]
        # less what all experts share: a bias is centred
        apart = halves[0] - halves[1]
        assert found.noise == pytest.approx(np.mean(np.abs(apart - apart.mean())) / 2, rel=1e-12)


def test_the_exact_estimator_with_fp32_keys_comes_as_close_as_fp32_does():
    logits, _ = drawn(512, 16)
    balancer = ExactQB(16, 4, key="fp32", centre=False)
    route_and_observe(balancer, logits)
    bias = balancer.bias.clone()
    route_and_observe(balancer, logits)
    found = pooled_quantile(logits, bias.numpy(), 4, "sigmoid", "score")
    assert 0 < np.abs(balancer.bias.double().numpy() - found.quantile).max() < 2e-7


def route_and_observe(balancer, logits):
    balancer.observe(route(torch.from_numpy(logits), balancer.bias, balancer.top_k, tally=balancer.tally))
    simulate_ranks([[balancer]])


def test_scores_that_fp32_cannot_tell_apart():
    # both are 1 in fp32
    logits = np.array([[20.0, 21.0, 22.0]] * 3, dtype=np.float32)
    quantile = pooled_quantile(logits, np.zeros(3), 1, "sigmoid", "score").quantile
    assert quantile[0] > 0
    assert quantile[1] == 0
    assert quantile[2] < 0


def test_noise_falls_with_the_root_of_the_tokens():
    small, large = (
        np.mean([pooled_quantile(*drawn(tokens, 8, seed), 2, "sigmoid", "score").noise for seed in range(8)])
        for tokens in (200, 3200)
    )
    assert small / large == pytest.approx(4, rel=0.35)
