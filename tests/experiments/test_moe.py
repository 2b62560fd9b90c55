import copy

import pytest
import torch
import torch.nn.functional as F

from equipoise.balancers import ExactQB, GShard, HistogramQB, update_balancers
from equipoise.experiments.moe import Experts, MoE, Router, SwiGLU, _grouped, _looped, combine, z_loss

WIDTH, NUM_EXPERTS, TOP_K = 16, 8, 2


def make_router(**options):
    router = Router(WIDTH, NUM_EXPERTS, TOP_K, **options)
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    return router


def make_experts():
    experts = Experts(NUM_EXPERTS, WIDTH, 8)
    generator = torch.Generator().manual_seed(1)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return experts


def tokens(count=40, seed=2):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def one_expert(experts, index, x):
    gate, up = (x @ experts.w_in[index]).chunk(2)
    return (F.silu(gate) * up) @ experts.w_out[index]


def test_combine_equals_a_loop_over_tokens():
    experts, x = make_experts(), tokens()
    routing = make_router()(x)
    out = combine(experts, x, routing.experts, routing.weights)
    for row in range(len(x)):
        wanted = sum(
            weight * one_expert(experts, expert, x[row])
            for weight, expert in zip(routing.weights[row], routing.experts[row], strict=True)
        )
        torch.testing.assert_close(out[row], wanted)


def test_g12_experts_without_a_token_have_zero_gradients():
    experts, x = make_experts(), tokens()
    chosen = torch.tensor([[0, 1]]).expand(len(x), 2)
    combine(experts, x, chosen, torch.full((len(x), 2), 0.5)).square().sum().backward()
    assert experts.w_in.grad[:2].abs().sum() > 0
    assert experts.w_in.grad[2:].abs().sum() == 0
    assert experts.w_out.grad.isfinite().all()


def test_grouped_and_looped_products_agree_also_for_empty_experts():
    weight = torch.randn(4, 8, 12, generator=torch.Generator().manual_seed(0))
    x = torch.randn(10, 8, generator=torch.Generator().manual_seed(1))
    counts = torch.tensor([3, 0, 7, 0])
    torch.testing.assert_close(_grouped(x, weight, counts), _looped(x, weight, counts))


def test_widths_that_grouped_mm_refuses_still_work():
    experts = Experts(4, 6, 3)
    for parameter in experts.parameters():
        torch.nn.init.ones_(parameter)
    out = experts(torch.ones(5, 6), torch.tensor([2, 0, 3, 0]))
    torch.testing.assert_close(out, (F.silu(torch.tensor(6.0)) * 6 * 3).expand(5, 6))


def test_router_is_fp32_under_autocast():
    router, x = make_router(bias=ExactQB(NUM_EXPERTS, TOP_K)), tokens()
    plain = router(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast = router(x)
    assert autocast.logits.dtype == torch.float32
    assert torch.equal(plain.logits, autocast.logits)
    assert torch.equal(plain.weights, autocast.weights)


def test_moe_runs_under_bf16_autocast_close_to_fp32():
    moe = MoE(make_router(), make_experts(), SwiGLU(WIDTH, 8))
    x = tokens().view(4, 10, WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = moe(x)
    torch.testing.assert_close(low.float(), moe(x), atol=0.05, rtol=0.05)


def test_e13_a_nan_token_names_the_layer_and_touches_no_counter():
    router = make_router(bias=HistogramQB(NUM_EXPERTS, TOP_K), name="router of layer 3")
    x = tokens()
    x[5, 0] = float("nan")
    with pytest.raises(ValueError, match=r"router of layer 3: .*NaN or infinity in 1 of 40 tokens"):
        router(x)
    assert router.bias.counts.sum() == 0


def test_g11_one_normalised_expert_is_refused():
    with pytest.raises(ValueError, match=r"top_k=1.*normalise=false"):
        Router(WIDTH, NUM_EXPERTS, 1)
    router = Router(WIDTH, NUM_EXPERTS, 1, normalise=False)
    torch.nn.init.normal_(router.weight)
    router(tokens()).weights.sum().backward()
    assert router.weight.grad.abs().sum() > 0


def test_histogram_with_logit_selection_is_refused_at_construction():
    with pytest.raises(ValueError, match="HistogramQB needs selection='score', got selection='logit'"):
        make_router(bias=HistogramQB(NUM_EXPERTS, TOP_K), selection="logit")


def test_z_loss_value_and_gradient_scale():
    x = tokens()
    gradients = []
    for scale in (1.0, 0.25):
        router = make_router(z_loss=0.1)
        router.loss_scale = scale
        (router(x).weights * 0).sum().backward()
        gradients.append(router.weight.grad)
    weight = make_router().weight
    expected = torch.logsumexp(x @ weight.T, -1).square().mean()
    torch.testing.assert_close(z_loss(make_router()(x)), expected)
    torch.testing.assert_close(gradients[0], torch.autograd.grad(0.1 * expected, weight)[0])
    torch.testing.assert_close(gradients[1], gradients[0] / 4)


def test_z_loss_leaves_out_padding():
    router, x = make_router(), tokens(8)
    valid = torch.tensor([True] * 5 + [False] * 3)
    assert torch.equal(z_loss(router(x, valid=valid)), z_loss(router(x[:5])))
    assert z_loss(router(x, valid=torch.zeros(8, dtype=torch.bool))) == 0


def test_loss_scale_reaches_the_gradient_balancer():
    x = tokens()
    gradients = []
    for scale in (1.0, 0.5):
        router = make_router(gradient=GShard(NUM_EXPERTS, TOP_K, coefficient=1.0))
        router.loss_scale = scale
        (router(x).weights * 0).sum().backward()
        gradients.append(router.weight.grad)
    assert gradients[0].abs().sum() > 0
    torch.testing.assert_close(gradients[1], gradients[0] / 2)


def test_s2_activation_checkpointing_counts_once():
    from torch.utils.checkpoint import checkpoint

    x = tokens().view(4, 10, WIDTH)
    results = []
    for reentrant in (None, False, True):
        moe = MoE(make_router(bias=ExactQB(NUM_EXPERTS, TOP_K)), make_experts())
        leaf = x.clone().requires_grad_()
        out = moe(leaf) if reentrant is None else checkpoint(moe, leaf, use_reentrant=reentrant)
        out.square().sum().backward()
        assert int(moe.router.bias.store.filled) == 40
        update_balancers(moe)
        results.append((moe.router.bias.bias.clone(), moe.router.weight.grad))
    for bias, gradient in results[1:]:
        assert torch.equal(bias, results[0][0])
        torch.testing.assert_close(gradient, results[0][1])


def test_what_balancers_count_is_not_a_buffer_that_ddp_overwrites():
    router = make_router(bias=ExactQB(NUM_EXPERTS, TOP_K))
    assert [name for name, _ in router.named_buffers()] == ["bias.bias"]
    assert [name for name, _ in router.named_parameters()] == ["weight"]


def test_balancers_copy_with_the_module():
    router = make_router(bias=ExactQB(NUM_EXPERTS, TOP_K))
    router(tokens())
    twin = copy.deepcopy(router)
    update_balancers(twin)
    assert twin.bias.bias.abs().sum() > 0
    assert router.bias.bias.abs().sum() == 0
    assert int(router.bias.store.filled) > 0
