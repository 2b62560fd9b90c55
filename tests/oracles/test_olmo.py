"""ai2-olmo-core: its losses and its whole router, with the bias that it moves after a batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from equipoise.balancers import GShard, SignedCount, update_balancers
from equipoise.experiments.moe import Router, z_loss
from oracles.inputs import Inputs, gshard

PROJECT = "ai2-olmo-core"
loss = pytest.importorskip("olmo_core.nn.moe.loss", reason="ai2-olmo-core is not installed")
pytestmark = pytest.mark.oracle

# their granularity: our scope
SCOPES = {"local_batch": "microbatch", "instance": "sequence"}


def test_losses(unmasked: Inputs, compare: Callable[..., None]):
    """Softmax scores, without a router."""
    ours, theirs = unmasked.leaf(), unmasked.leaf()
    load = unmasked.route(unmasked.logits, "softmax").load
    value = loss.load_balancing_loss(
        num_experts=len(load),
        top_k=unmasked.top_k,
        expert_scores=theirs.softmax(-1)[None],
        batch_size_per_expert=load,
        batched_batch_size_per_expert=load[None],
        granularity=loss.MoELoadBalancingLossGranularity.local_batch,
    )
    value.backward()
    mine, gradient = gshard(unmasked, "softmax")
    compare("load-balancing loss, softmax", unmasked.name, mine, value, convention="the same; it knows no mask")
    compare("its gradient, softmax", unmasked.name, gradient, theirs.grad)
    theirs.grad = None
    values = z_loss(unmasked.route(ours, "softmax")), loss.router_z_loss(expert_logits=theirs[None])
    for value in values:
        value.backward()
    compare("z-loss", unmasked.name, *values, convention="the same; it knows no mask")
    compare("its gradient, z-loss", unmasked.name, ours.grad, theirs.grad)


def routers(gate: str, granularity: str, inputs: Inputs) -> tuple[Router, Any]:
    """Ours and theirs with the same bias; with the identity as weight, the tokens are the logits."""
    from olmo_core.nn.moe.router import MoELinearRouter, MoERouterGatingFunction

    top_k, num_experts = inputs.top_k, len(inputs.bias)
    ours = Router(
        num_experts,
        num_experts,
        top_k,
        bias=SignedCount(num_experts, top_k, rate=0.01),
        gradient=GShard(num_experts, top_k, coefficient=0.1, scope=SCOPES[granularity]),
        gate=gate,
        normalise=top_k > 1,
        z_loss=0.01,
    )
    theirs = MoELinearRouter(
        d_model=num_experts,
        num_experts=num_experts,
        top_k=top_k,
        normalize_expert_weights=1.0 if top_k > 1 else None,
        bias_gamma=0.01,
        gating_function=MoERouterGatingFunction(gate),
        lb_loss_weight=0.1,
        lb_loss_granularity=loss.MoELoadBalancingLossGranularity(granularity),
        z_loss_weight=0.01,
    )
    for router, bias in ((ours, ours.bias.bias), (theirs, theirs.score_bias)):
        router.weight.data.copy_(torch.eye(num_experts).view_as(router.weight))
        bias.copy_(inputs.bias)
    return ours, theirs


@pytest.mark.parametrize("granularity", list(SCOPES))
@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_router(gate: str, granularity: str, unmasked: Inputs, compare: Callable[..., None]):
    """Three steps of two microbatches of four sequences."""
    ours, theirs = routers(gate, granularity, unmasked)
    name, logits = unmasked.name, unmasked.logits
    shift = "they add 1e-7 to sigmoid scores" if gate == "sigmoid" else ""
    kind = f"{gate}, {granularity} (our scope {SCOPES[granularity]})"
    for step in range(3):
        for tokens in (logits * (1 + 0.1 * step), logits.flip(0) * (1 - 0.1 * step)):
            routing = ours(tokens, num_sequences=4)
            weights, experts, _, penalty = theirs(tokens.unflatten(0, (4, -1)))
            compare(f"router, {gate}: experts", name, routing.experts, experts.flatten(0, 1), within=0)
            compare(f"router, {gate}: weights", name, routing.weights, weights.flatten(0, 1), convention=shift)
            value = 0.1 * ours.gradient.last_value + 0.01 * z_loss(routing)
            compare(f"router, {kind}: losses", name, value, penalty, convention=shift)
            routing.weights.mul(0).sum().backward()
            penalty.backward()
        gradient = theirs.weight.grad.view_as(ours.weight)
        compare(f"router, {kind}: gradient of its weight", name, ours.weight.grad, gradient, convention=shift)
        update_balancers(ours)
        theirs.post_batch()
        compare(f"router, {gate}: bias after post_batch", name, ours.bias.bias, theirs.score_bias)
