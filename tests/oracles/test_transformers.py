"""transformers: the load-balancing loss of Mixtral, which other models there share."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from oracles.inputs import Inputs, gshard

PROJECT = "transformers"
mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral", reason="transformers is not installed")
pytestmark = pytest.mark.oracle

SLOTS = "theirs sums over the K slots of a token: K times ours, K at balance"


def theirs(inputs: Inputs, *layers: Tensor) -> Tensor:
    mask = None if inputs.valid is None else inputs.valid.long()[None]
    return mixtral.load_balancing_loss_func(layers, len(inputs.bias), inputs.top_k, attention_mask=mask)


def test_load_balancing_loss(inputs: Inputs, compare: Callable[..., None]):
    logits = inputs.leaf()
    value = theirs(inputs, logits)
    value.backward()
    ours, gradient = gshard(inputs, "softmax")
    what = "load-balancing loss" if inputs.valid is None else "load-balancing loss with attention_mask"
    compare(what, inputs.name, ours, value, factor=inputs.top_k, convention=SLOTS)
    compare(f"{what}, gradient", inputs.name, gradient, logits.grad, factor=inputs.top_k, convention="K times ours")


def test_a_balanced_load_gives_k(compare: Callable[..., None]):
    """Every token prefers the expert after that of the token before: each has the same load and the same share."""
    row = torch.linspace(1, 0, 8)
    logits = torch.stack([row.roll(token) for token in range(16)])
    balanced = Inputs("16x8 K=2", logits, torch.zeros(8), 2, None)
    ours, value = gshard(balanced, "softmax")[0], theirs(balanced, logits)
    compare("load-balancing loss at balance", balanced.name, ours, value, factor=2, convention=SLOTS)
    assert float(ours) == pytest.approx(1.0, abs=1e-6)
    assert float(value) == pytest.approx(2.0, abs=2e-6)


def test_layers_are_pooled(unmasked: Inputs, compare: Callable[..., None]):
    """Two layers are one of twice the tokens; ours is a loss for each."""
    layers = unmasked.logits, unmasked.logits.roll(1, dims=1)
    both = Inputs(unmasked.name, torch.cat(layers), unmasked.bias, unmasked.top_k, None)
    pooled = "layers are pooled into one load and one share, so that they can make up for one another"
    value = theirs(unmasked, *layers)
    compare("two layers", unmasked.name, gshard(both, "softmax")[0], value, factor=unmasked.top_k, convention=pooled)
