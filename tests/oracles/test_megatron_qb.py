"""megatron-core from 0.19 on: quantile balancing with the exact quantile of a microbatch."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from equipoise.balancers import ExactQB, RankAveragedQB, simulate_ranks, update_balancers
from equipoise.kernels import route
from oracles.inputs import Inputs

PROJECT = "megatron-core"
moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils", reason="megatron-core is not installed")
if not hasattr(moe_utils, "qb_dual_update"):
    pytest.skip("quantile balancing is in megatron-core from 0.19 on", allow_module_level=True)
pytestmark = pytest.mark.oracle

SIGN = "they subtract beta = -bias from the logits"
ORDER = "the (q+1)-th smallest margin, as order=q_plus_1; T*K must be a multiple of E; not centred yet"


class Router(nn.Module):
    """The buffers by which Megatron knows a router that balances by quantiles."""

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.register_buffer("qb_beta", -bias)
        self.register_buffer("qb_beta_accum", torch.zeros_like(bias))
        self.register_buffer("qb_beta_count", torch.zeros((), dtype=torch.int32))

    def observe(self, logits: Tensor, top_k: int) -> None:
        """One microbatch."""
        self.qb_beta_accum += moe_utils.qb_dual_update(logits, top_k, self.qb_beta)[1]
        self.qb_beta_count += 1


def test_exact_quantile(unmasked: Inputs, compare: Callable[..., None]):
    top_k, logits = unmasked.top_k, unmasked.logits
    balancer = ExactQB(logits.shape[1], top_k, key="fp32", order="q_plus_1", centre=False)
    balancer.bias.copy_(unmasked.bias)
    routing = route(logits, balancer.bias, top_k, selection="logit", tally=balancer.tally)
    balancer.observe(routing)
    update_balancers([balancer])
    experts, beta = moe_utils.qb_dual_update(logits, top_k, -unmasked.bias)
    compare("QB: experts", unmasked.name, routing.experts, experts, within=0, convention=SIGN)
    compare("QB: ExactQB, fp32 key", unmasked.name, balancer.bias, beta, factor=-1, within=0, convention=ORDER)


@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_mean_over_microbatches(ema: float, one_rank: None, unmasked: Inputs, compare: Callable[..., None]):
    """Four microbatches, ours on two virtual ranks. Every token comes E times and the microbatches are cut so that the
    q-th and the (q + 1)-th smallest margin are the same one.
    """
    from megatron.core.distributed.finalize_model_grads import _update_router_qb_beta

    top_k, num_experts = unmasked.top_k, len(unmasked.bias)
    microbatches = [part[1:].repeat_interleave(num_experts, 0) for part in unmasked.logits.chunk(4)]
    ranks = [[RankAveragedQB(num_experts, top_k, ema=ema)] for _ in range(2)]
    theirs = Router(unmasked.bias)
    for (balancer,), parts in zip(ranks, (microbatches[:2], microbatches[2:]), strict=True):
        balancer.bias.copy_(unmasked.bias)
        for part in parts:
            balancer.observe(route(part, balancer.bias, top_k, selection="logit"))
            theirs.observe(part, top_k)
    simulate_ranks(ranks)
    _update_router_qb_beta([theirs], SimpleNamespace(moe_router_quantile_balancing_ema=ema))
    order = "theirs q+1, ours q, the same margin here; centred after the EMA, ours before: equal for a centred bias"
    what = f"QB: RankAveragedQB, EMA {ema}"
    compare(what, unmasked.name, ranks[0][0].bias, theirs.qb_beta, factor=-1, convention=order)
