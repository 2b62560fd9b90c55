import copy

import pytest
import torch
import torch.nn.functional as F

from equipoise.balancers import LEI, ExactQB, GShard, HistogramQB, RankAveragedQB, SignedCount, update_balancers
from equipoise.experiments.moe import (
    Experts,
    MoE,
    Router,
    SwiGLU,
    _grouped,
    _looped,
    combine,
    within_capacity,
    z_loss,
)
from equipoise.kernels import route

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


@pytest.mark.parametrize(("capacity_factor", "room"), [(0.25, 3), (1.0, 10), (1.5, 14), (8.0, 74)])
def test_capacity_keeps_the_first_tokens_of_every_expert(capacity_factor, room):
    routing = make_router()(tokens(37))
    kept = within_capacity(routing, capacity_factor)
    taken = [0] * NUM_EXPERTS
    for token in range(37):
        for place, expert in enumerate(routing.experts[token].tolist()):
            assert kept[token, place] == (taken[expert] < room)
            taken[expert] += 1
    assert kept.all() == (capacity_factor > 1)


@pytest.mark.parametrize(("count", "capacity_factor", "room"), [(100, 1.1, 11), (100, 1.15, 12), (200, 0.7, 14)])
def test_capacity_is_rounded_up_as_a_fraction(count, capacity_factor, room):
    """In floating point 100 * 1.1 / 10 is a little more than 11."""
    logits = torch.zeros(count, 10)
    logits[:, 3] = 1.0
    kept = within_capacity(route(logits, None, 1), capacity_factor)
    assert kept.sum() == room


def test_capacity_drops_and_counts_what_has_no_room():
    x = tokens()
    moe = MoE(make_router(bias=SignedCount(NUM_EXPERTS, TOP_K)), make_experts(), capacity_factor=0.5)
    out = moe(x[None])
    routing = moe.router.last
    kept = within_capacity(routing, 0.5)
    assert 0 < kept.sum() < kept.numel()
    assert moe.dropped_share == 1 - kept.double().mean()
    expected = combine(moe.experts, x, routing.experts, routing.weights * kept)
    torch.testing.assert_close(out[0], expected)
    # the load that the balancer sees is that of the choices
    assert moe.router.bias.load.sum() == 40 * TOP_K
    out.square().sum().backward()
    assert moe.experts.w_in.grad.isfinite().all()


def test_dropless_by_default_and_when_negative():
    x = tokens()[None]
    plain = MoE(make_router(), make_experts())
    off = MoE(make_router(), make_experts(), capacity_factor=-0.3)
    wide = MoE(make_router(), make_experts(), capacity_factor=float(NUM_EXPERTS))
    assert torch.equal(plain(x), off(x))
    assert plain.dropped_share is off.dropped_share is None
    torch.testing.assert_close(wide(x), plain(x))
    assert wide.dropped_share == 0


def test_s4_padding_takes_no_capacity():
    x = tokens(24)
    valid = torch.arange(24) % 3 != 1
    parts = make_router(), make_experts()
    padded, real = MoE(*parts, capacity_factor=0.8), MoE(*parts, capacity_factor=0.8)
    out, expected = padded(x[None], valid[None])[0], real(x[valid][None])[0]
    torch.testing.assert_close(out[valid], expected)
    assert padded.dropped_share == real.dropped_share > 0
    assert not out[~valid].any()


@pytest.mark.parametrize("kind", [ExactQB, HistogramQB, RankAveragedQB])
def test_capacity_with_a_quantile_balancer_is_refused_with_the_reason(kind):
    router = make_router(bias=kind(NUM_EXPERTS, TOP_K))
    with pytest.raises(ValueError, match=rf"capacity_factor=1.5 does not go with {kind.__name__}: a quantile .* drops"):
        MoE(router, make_experts(), capacity_factor=1.5)
    MoE(router, make_experts(), capacity_factor=-1.0)


@pytest.mark.parametrize("kind", [ExactQB, HistogramQB, RankAveragedQB, SignedCount])
@pytest.mark.parametrize("gradient", [GShard, LEI])
def test_s11_replayed_experts_freeze_the_balancers_and_keep_the_gradient_of_the_loss(kind, gradient):
    x = tokens()
    plain = make_router()
    expected = plain(x)
    expected.weights.square().sum().backward()
    router = make_router(bias=kind(NUM_EXPERTS, TOP_K), gradient=gradient(NUM_EXPERTS, TOP_K))
    with pytest.warns(UserWarning, match="frozen while routing is forced") as warned:
        routing = router(x, forced=expected.experts)
    assert sorted(str(each.message).split()[0] for each in warned) == sorted([kind.__name__, gradient.__name__])
    assert torch.equal(routing.weights, expected.weights)
    assert torch.equal(routing.load, expected.load)
    routing.weights.square().sum().backward()
    torch.testing.assert_close(router.weight.grad, plain.weight.grad, rtol=1e-6, atol=1e-8)
    update_balancers(router)
    assert not router.bias.bias.any()


def test_forced_experts_of_another_number_are_refused_with_the_layer():
    router = make_router(name="router of layer 3")
    with pytest.raises(ValueError, match=r"router of layer 3: forced must have 2 experts a token, got \(40, 3\)"):
        router(tokens(), forced=torch.zeros(40, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"router of layer 3: experts must be distinct"):
        router(tokens(), forced=torch.zeros(40, 2, dtype=torch.int64))
