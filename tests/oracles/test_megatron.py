"""megatron-core: its losses, its top-k with a bias, and its update of that bias."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.balancers import SignedCount, update_balancers
from equipoise.experiments.moe import z_loss
from equipoise.kernels import route
from oracles.inputs import Inputs, gshard

PROJECT = "megatron-core"
moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils", reason="megatron-core is not installed")
pytestmark = pytest.mark.oracle

RATE = 0.01
# gate, whether Megatron's softmax is of all experts, convention
WEIGHTS = {
    "sigmoid": ("sigmoid", False, "as normalise=true; a single expert a token is not normalised"),
    "softmax of all": ("softmax", True, "as normalise=false; the bias is not added to softmax scores"),
    "softmax of the chosen": ("softmax", False, "as normalise=true"),
}


@pytest.fixture
def parallel_state(one_rank: None) -> None:
    """Megatron's own groups, over one rank."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()


def their_route(logits: Tensor, inputs: Inputs, gate: str, of_all: bool = True) -> tuple[Tensor, Tensor]:
    """Weights and map ``[T, E]``; the softmax is ``of_all`` experts or of those that are chosen."""
    bias = inputs.bias if gate == "sigmoid" else None
    return moe_utils.topk_routing_with_score_function(
        logits, inputs.top_k, use_pre_softmax=of_all, score_function=gate, expert_bias=bias
    )


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_load_balancing_loss(gate: str, inputs: Inputs, compare: Callable[..., None]):
    logits = inputs.leaf()
    chosen = their_route(logits, inputs, gate)[1]
    if inputs.valid is not None:
        chosen = chosen & inputs.valid[:, None]
    _, shares = moe_utils.compute_routing_scores_for_aux_loss(logits, inputs.top_k, gate, padding_mask=inputs.padding)
    theirs = moe_utils.switch_load_balancing_loss_func(
        shares, chosen.sum(0), inputs.num_valid, inputs.top_k, logits.shape[1], 1.0, padding_mask=inputs.valid
    )
    theirs.backward()
    ours, gradient = gshard(inputs, gate)
    mask = "the mask is True for real tokens in the loss, and for padding in its scores and in the z-loss"
    compare(f"load-balancing loss, {gate}", inputs.name, ours, theirs, convention=mask)
    compare(f"its gradient, {gate}", inputs.name, gradient, logits.grad)


def test_z_loss(inputs: Inputs, compare: Callable[..., None]):
    ours, theirs = inputs.leaf(), inputs.leaf()
    values = z_loss(inputs.route(ours, "sigmoid")), moe_utils.z_loss_func(theirs, 1.0, padding_mask=inputs.padding)
    for value in values:
        value.backward()
    compare("z-loss", inputs.name, *values, convention="the mask is True for padding")
    compare("its gradient, z-loss", inputs.name, ours.grad, theirs.grad)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_top_k(weights: str, inputs: Inputs, compare: Callable[..., None]):
    gate, of_all, convention = WEIGHTS[weights]
    ours, theirs = inputs.leaf(), inputs.leaf()
    routing = inputs.route(ours, gate, normalise=not of_all and inputs.top_k > 1)
    probabilities, chosen = their_route(theirs, inputs, gate, of_all)
    mine = F.one_hot(routing.experts, ours.shape[1]).sum(1)
    compare(f"experts, {weights}", inputs.name, mine, chosen, within=0, convention="the same; no input has ties")
    if inputs.top_k == 1 and weights == "softmax of the chosen":
        # always 1, and ours is not normalised
        return
    picked = probabilities.gather(1, routing.experts)
    compare(f"weights, {weights}", inputs.name, routing.weights, picked, convention=convention)
    upstream = torch.randn(picked.shape, generator=torch.Generator().manual_seed(0))
    upstream = upstream if inputs.valid is None else upstream * inputs.valid[:, None]
    for value in (routing.weights, picked):
        value.mul(upstream).sum().backward()
    compare(f"gradient of the weights, {weights}", inputs.name, ours.grad, theirs.grad)


def test_sign_rule(parallel_state: None, inputs: Inputs, compare: Callable[..., None]):
    balancer = SignedCount(len(inputs.bias), inputs.top_k, rate=RATE)
    bias = torch.zeros_like(inputs.bias)
    for step in range(6):
        logits = inputs.logits * (1 + 0.1 * step)
        balancer.observe(route(logits, balancer.bias, inputs.top_k, valid=inputs.valid))
        update_balancers([balancer])
        chosen = moe_utils.topk_routing_with_score_function(
            logits, inputs.top_k, score_function="sigmoid", expert_bias=bias
        )[1]
        load = (chosen if inputs.valid is None else chosen & inputs.valid[:, None]).sum(0)
        bias = moe_utils.get_updated_expert_bias(load, bias, RATE)
        compare("bias over six updates by sign", inputs.name, balancer.bias, bias)


def test_an_average_load_leaves_the_bias(parallel_state: None, compare: Callable[..., None]):
    load = torch.tensor([4, 4, 0, 8])
    balancer = SignedCount(4, 2, rate=RATE)
    balancer.load.copy_(load)
    update_balancers([balancer])
    bias = moe_utils.get_updated_expert_bias(load, torch.zeros(4), RATE)
    compare("bias after loads 4 4 0 8", "loads", balancer.bias, bias, convention="the same: sign(0) = 0")
    assert bias.tolist()[:2] == [0, 0]
