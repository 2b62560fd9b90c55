"""A router compiles as a whole, whichever balancers are in its slots, on both backends."""

from typing import Any

import pytest
import torch
from torch import nn

from equipoise.balancers import LEI, ExactQB, GShard, HistogramQB, RankAveragedQB, SignedCount, update_balancers
from equipoise.experiments.moe import Router, check_routers
from equipoise.kernels import backend

E, K, D, T = 8, 2, 16, 24
BALANCERS: dict[str, tuple[Any, Any]] = {
    "none": (None, None),
    "signed_count": (SignedCount, None),
    "histogram_qb": (HistogramQB, None),
    "eqb": (ExactQB, None),
    "rank_averaged_qb": (RankAveragedQB, None),
    "gshard": (None, GShard),
    "eqb_lei": (ExactQB, LEI),
}


def make_router(bias: Any, gradient: Any) -> Router:
    router = Router(
        D, E, K, bias=bias and bias(E, K), gradient=gradient and gradient(E, K), z_loss=1e-3, name="layer 0"
    )
    nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(1))
    if router.bias is not None:
        router.bias.reserve(3 * T)
    return router


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("name", BALANCERS)
def test_a_compiled_router_is_the_router(
    name: str, kernels: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if kernels == "triton":
        request.getfixturevalue("interpreter")
    monkeypatch.setenv(backend.VARIABLE, kernels)
    torch._dynamo.reset()
    eager, router = make_router(*BALANCERS[name]), make_router(*BALANCERS[name])
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager")
    for _step in range(2):
        for _microbatch in range(3):
            x = torch.randn(T, D)
            expected, actual = eager(x), compiled(x)
            assert torch.equal(actual.experts, expected.experts)
            assert torch.equal(actual.load, expected.load)
            for routing in (expected, actual):
                routing.weights.square().sum().backward()
        torch.testing.assert_close(router.weight.grad, eager.weight.grad)
        for each in (eager, router):
            update_balancers(each)
            check_routers([each])
        if router.bias is not None:
            assert eager.bias is not None
            assert torch.equal(router.bias.bias, eager.bias.bias)
            assert router.bias.bias.any()
    torch._dynamo.reset()


def test_compiled_code_says_that_it_needs_room() -> None:
    torch._dynamo.reset()
    router = Router(D, E, K, bias=ExactQB(E, K))
    nn.init.normal_(router.weight)
    with pytest.raises(Exception, match=r"call reserve\(tokens per step\) before the first step"):
        torch.compile(router, fullgraph=True, backend="aot_eager")(torch.randn(T, D))


@pytest.mark.parametrize("compiled", [False, True])
def test_the_reference_refuses_infinite_logits_in_compiled_code_too(compiled: bool) -> None:
    torch._dynamo.reset()
    router = make_router(None, None)
    run = torch.compile(router, fullgraph=True, backend="aot_eager") if compiled else router
    x = torch.randn(T, D)
    x[3] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinity in 1 of 24 tokens"):
        run(x)


def test_the_kernel_reports_infinite_logits_once_a_step(monkeypatch: pytest.MonkeyPatch, interpreter: None) -> None:
    monkeypatch.setenv(backend.VARIABLE, "triton")
    routers = [make_router(ExactQB, None), make_router(None, None)]
    routers[1].name = "layer 1"
    x = torch.randn(T, D)
    routers[0](x)
    routers[1](x)
    check_routers(routers)
    x[[3, 5]] = float("inf")
    routers[1](x)
    with pytest.raises(ValueError, match=r"layer 1: router logits must be finite .* in 2 tokens of this step"):
        check_routers(routers)
    # what has been reported is forgotten
    check_routers(routers)
