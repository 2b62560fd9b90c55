"""The numbers of the bias estimators, against sorting, ``torch.quantile`` and the worked examples of the definition."""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from equipoise.balancers import (
    BiasBalancer,
    ExactQB,
    HistogramQB,
    RankAveragedQB,
    SignedCount,
    max_violation,
    simulate_ranks,
    update_balancers,
)
from equipoise.balancers.histogram_qb import histogram_quantile
from equipoise.balancers.quantile import MarginStore, radix_quantile
from equipoise.balancers.update import run_locally
from equipoise.kernels import MarginTally, Routing, UniformTally, route, target_rank

Feed = Callable[..., Routing]
EXACT = [partial(ExactQB, key=key, order=order) for key in ("bf16", "fp32") for order in ("q", "q_plus_1")]
EXACT_IDS = ["bf16_q", "bf16_q_plus_1", "fp32_q", "fp32_q_plus_1"]


def logit(scores: list[list[float]]) -> Tensor:
    """Logits of sigmoid scores."""
    return torch.tensor(scores, dtype=torch.float64).logit().float()


def updated(balancer: BiasBalancer) -> list[float]:
    update_balancers([balancer])
    return balancer.bias.tolist()


def key_dtype(balancer: ExactQB) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[balancer.key]


def sorted_margins(routing: Routing, dtype: torch.dtype = torch.float32) -> Tensor:
    """Margins rounded to ``dtype``, every column ascending, as fp64: what the pooled estimators look into."""
    return routing.valid_margins.to(dtype).double().sort(dim=0).values


def test_histogram_worked_example_of_two_experts() -> None:
    balancer = HistogramQB(2, 1, num_bins=4)
    balancer.counts.copy_(torch.tensor([[0, 2, 2, 0], [2, 2, 0, 0]]))
    bounds = torch.tensor(-1.0), torch.tensor(1.0)
    assert histogram_quantile(balancer.counts.long(), 1, *bounds).tolist() == [0.0, -0.5]
    assert updated(balancer) == [0.25, -0.25]
    tally = balancer.open_tally()
    assert (tally.lower, tally.upper) == (-1.25, 1.25)


def test_histogram_worked_example_of_four_experts() -> None:
    balancer = HistogramQB(4, 1, num_bins=10)
    for expert in range(4):
        balancer.counts[expert, 2 + 2 * expert] = 2
        balancer.counts[expert, 3 + 2 * expert] = 6
    assert updated(balancer) == pytest.approx([-0.6, -0.2, 0.2, 0.6], abs=1e-7)


def test_histogram_fraction_is_taken_in_fp64_from_integers() -> None:
    # q - before over in_bin = 1/3 in the first bin of width 1
    counts = torch.tensor([[7, 0]] * 3)
    bounds = torch.tensor(-1.0), torch.tensor(1.0)
    assert histogram_quantile(counts, 1, *bounds).tolist() == [-1 + 1 / 3] * 3
    # integers beyond 2**24, where fp32 would round them
    many = torch.tensor([[2**27 + 1, 2**27 + 5]] * 3)
    share = Fraction((2**28 + 6) * 1, 3) / (2**27 + 1)
    assert histogram_quantile(many, 1, *bounds).tolist() == pytest.approx([-1 + float(share)] * 3, abs=1e-15)


@pytest.mark.parametrize("num_bins", [1, 2, 7, 1000])
def test_histogram_of_one_bin_or_many_stays_in_range(num_bins: int, feed: Feed) -> None:
    balancer = HistogramQB(5, 2, num_bins=num_bins, centre=False)
    feed(balancer, torch.randn(40, 5))
    assert max(map(abs, updated(balancer))) <= 1.0
    assert balancer.counts.shape == (5, num_bins)


def test_histogram_counts_every_valid_token_of_every_expert(feed: Feed) -> None:
    balancer = HistogramQB(5, 2)
    feed(balancer, torch.randn(40, 5), torch.arange(40) < 31)
    assert balancer.counts.sum(1).tolist() == [31] * 5
    assert not balancer.clamped.any()


TARGETED = [
    pytest.param(HistogramQB, id="histogram_qb"),
    pytest.param(partial(RankAveragedQB, per="step"), id="rank_averaged_qb_step"),
    pytest.param(partial(RankAveragedQB, per="microbatch"), id="rank_averaged_qb_microbatch"),
    *[pytest.param(build, id=f"exact_qb_{name}") for build, name in zip(EXACT, EXACT_IDS, strict=True)],
]
every_targeted = pytest.mark.parametrize("build", TARGETED)
BACKENDS = ["torch", "triton"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both backends, on the CPU."""
    if request.param == "triton":
        request.getfixturevalue("interpreter")
    monkeypatch.setenv("EQUIPOISE_KERNELS", request.param)
    return request.param


def check_rank(balancer: BiasBalancer, logits: Tensor, rank: int, feed: Feed) -> None:
    """The next bias is the ``rank``-th smallest margin of every expert; of a histogram, the target inside its bin."""
    # the margins of logits have the same bits in every backend
    routing = feed(balancer, logits, selection="score" if balancer.needs_bounded_scores else "logit")
    if isinstance(balancer, HistogramQB):
        upto = balancer.counts.long().cumsum(1)
        chosen = (upto < rank).sum(1, keepdim=True)
        inside = balancer.counts.long().gather(1, chosen)
        target = len(logits) * balancer.top_k / balancer.num_experts
        share = (target - (upto.gather(1, chosen) - inside)) / inside
        expected = (-1 + (chosen + share) * 2 / balancer.counts.shape[1]).flatten()
    else:
        dtype = key_dtype(balancer) if isinstance(balancer, ExactQB) else torch.float32
        expected = sorted_margins(routing, dtype)[rank - 1]
    update_balancers([balancer])
    torch.testing.assert_close(balancer.bias.double(), expected.double(), rtol=0, atol=1e-6)


@every_targeted
def test_e1_target_of_two_and_a_half_rounds_up(build: Any, backend: str, feed: Feed) -> None:
    balancer = build(8, 2, centre=False)
    logits = torch.randn(10, 8, generator=torch.Generator().manual_seed(0))
    check_rank(balancer, logits, 4 if getattr(balancer, "order", "q") == "q_plus_1" else 3, feed)


@every_targeted
def test_e4_target_rank_is_integer_arithmetic(build: Any, feed: Feed) -> None:
    # 168 * 16 / 896 = 3 exactly; a float quotient rounds up to 4
    balancer = build(896, 16, centre=False)
    logits = torch.randn(168, 896, generator=torch.Generator().manual_seed(0))
    check_rank(balancer, logits, 4 if getattr(balancer, "order", "q") == "q_plus_1" else 3, feed)


@every_targeted
def test_e4_target_rank_is_the_same_in_every_backend(build: Any, backend: str, feed: Feed) -> None:
    # 21 * 2 / 7 = 6 exactly; a float quotient rounds up to 7
    balancer = build(7, 2, centre=False)
    logits = torch.randn(21, 7, generator=torch.Generator().manual_seed(0))
    check_rank(balancer, logits, 7 if getattr(balancer, "order", "q") == "q_plus_1" else 6, feed)


def test_e3_clamped_share_is_reported(feed: Feed) -> None:
    balancer = HistogramQB(4, 2)
    balancer.bias.copy_(torch.tensor([3.0, 3.0, 3.0, -3.0]))
    feed(balancer, torch.randn(8, 4))
    # the range is [-4, 4]; its ends belong to it
    tally = balancer.tally
    assert isinstance(tally, UniformTally)
    tally.add(torch.tensor([[-4.0, 4.0, 4.5, 0.0], [-9.0, -4.25, 0.0, 0.0]]))
    assert balancer.clamped.tolist() == [1, 1, 1, 0]
    update_balancers([balancer])
    assert balancer.diagnostics()["clamped_share"].item() == pytest.approx(3 / 40, rel=1e-6)
    feed(balancer, torch.randn(8, 4))
    update_balancers([balancer])
    assert balancer.diagnostics()["clamped_share"].item() == 0.0


@every_targeted
def test_e5_margin_zero_is_in_bin_500_on_the_first_step(build: Any, backend: str, feed: Feed) -> None:
    balancer = build(4, 1, centre=False)
    # the second expert is every token's cutoff: its margins are 0, and so is its quantile
    feed(balancer, torch.tensor([[3.0, 1.0, -1.0, -2.0]] * 6))
    if isinstance(balancer, HistogramQB):
        assert balancer.counts[1].nonzero().flatten().tolist() == [500]
        assert balancer.counts[1, 500] == 6
    bias = updated(balancer)
    assert bias[1] == pytest.approx(0.0, abs=2e-3 if isinstance(balancer, HistogramQB) else 0)
    assert bias[0] < 0 < bias[2] < bias[3]


@pytest.mark.parametrize("selection", ["logit"])
def test_histogram_refuses_unbounded_scores(selection: str, feed: Feed) -> None:
    balancer = HistogramQB(4, 1)
    with pytest.raises(ValueError, match="needs selection='score', got selection='logit'"):
        feed(balancer, torch.randn(3, 4), selection=selection)


@pytest.mark.parametrize("num_bins", [0, -3])
def test_histogram_needs_a_bin(num_bins: int) -> None:
    with pytest.raises(ValueError, match=f"num_bins must be at least 1, got {num_bins}"):
        HistogramQB(4, 1, num_bins=num_bins)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.integers(1, 60), st.integers(2, 9), st.sampled_from([10, 100, 1000]))
def test_histogram_is_within_a_bin_of_the_exact_quantile(seed: int, count: int, num_experts: int, bins: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    top_k = int(torch.randint(1, num_experts, (), generator=generator))
    balancer = HistogramQB(num_experts, top_k, num_bins=bins, centre=False)
    balancer.bias.copy_(torch.randn(num_experts, generator=generator))
    logits = 3 * torch.randn(count, num_experts, generator=generator)
    tally = balancer.open_tally()
    width = (tally.upper - tally.lower).item() / bins
    routing = route(logits, balancer.bias, top_k, tally=balancer.tally)
    balancer.observe(routing)
    rank = math.ceil(Fraction(count * top_k, num_experts))
    exact = sorted_margins(routing)[rank - 1]
    update_balancers([balancer])
    assert (balancer.bias.double() - exact).abs().max() <= width * (1 + 1e-3)


def test_exact_worked_example_in_logit_space(feed: Feed) -> None:
    balancer = ExactQB(4, 2, order="q_plus_1")
    logits = torch.tensor([[2.0, 0.5, -2, -1], [2, 3, 0.5, -1], [0, 2, -0.5, -1], [2, 0, -1.5, -1]])
    assert feed(balancer, logits, selection="logit").load.tolist() == [4, 4, 0, 0]
    assert updated(balancer) == [-1.0, -1.0, 1.0, 1.0]
    assert feed(balancer, logits, selection="logit").load.tolist() == [2, 2, 2, 2]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(EXACT), st.integers(0, 2**31), st.integers(1, 70), st.integers(2, 9), st.booleans())
def test_exact_is_the_order_statistic(
    build: Callable[..., ExactQB], seed: int, count: int, num_experts: int, coarse: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    top_k = int(torch.randint(1, num_experts, (), generator=generator))
    balancer = build(num_experts, top_k, centre=False)
    balancer.bias.copy_(torch.randn(num_experts, generator=generator))
    logits = 4 * torch.randn(count, num_experts, generator=generator)
    selection = "logit" if seed % 2 else "score"
    # coarse logits: many ties
    logits = logits.round() if coarse else logits
    routing = route(logits, balancer.bias, top_k, tally=balancer.tally, selection=selection)
    balancer.observe(routing)
    rank = math.ceil(Fraction(count * top_k, num_experts))
    if balancer.order == "q_plus_1":
        rank = min(rank + 1, count)
    margins = sorted_margins(routing, key_dtype(balancer))
    position = (rank - 1) / max(count - 1, 1)
    update_balancers([balancer])
    assert torch.equal(balancer.bias.double(), margins[rank - 1])
    assert torch.equal(balancer.bias.double(), margins.quantile(position, dim=0, interpolation="nearest"))


TIES: dict[str, Tensor] = {
    "all_equal": torch.zeros(24, 5),
    "one_expert": torch.tensor([9.0, 0, 0, 0, 0]).repeat(24, 1),
    "saturated": torch.tensor([[1e4, 1e4, -1e4, -1e4, -1e4], [-1e4, 1e4, 1e4, 1e4, -1e4]]).repeat(12, 1),
    "coarse": torch.randn(24, 5, generator=torch.Generator().manual_seed(3)).round(),
    "one_token": torch.tensor([[0.3, -0.2, 0.1, 0.5, -0.9]]),
}


@pytest.mark.parametrize("kind", TIES)
@pytest.mark.parametrize("build", EXACT, ids=EXACT_IDS)
def test_e7_bracket_holds_on_ties(build: Callable[..., ExactQB], kind: str, feed: Feed) -> None:
    balancer = build(5, 2, centre=False)
    for _step in range(3):
        routing = feed(balancer, TIES[kind])
        rank = target_rank(routing.num_valid, 2, 5, balancer.order)
        margins = sorted_margins(routing, key_dtype(balancer))
        update_balancers([balancer])
        found = balancer.bias.double()
        assert found.isfinite().all()
        assert ((margins < found).sum(0) < rank).all()
        assert (rank <= (margins <= found).sum(0)).all()


def test_exact_keeps_the_margins_of_valid_tokens_once(feed: Feed) -> None:
    balancer = ExactQB(5, 2)
    feed(balancer, torch.randn(40, 5), torch.arange(40) < 31)
    assert balancer.store.margins.shape == (31, 5)
    assert balancer.store.margins.dtype == torch.bfloat16


def test_negative_zero_and_zero_are_one_value() -> None:
    margins = torch.tensor([[-0.0], [0.0], [-0.0], [1.0]])
    for dtype in (torch.bfloat16, torch.float32):
        for order in ("q", "q_plus_1"):
            assert run_locally(radix_quantile(margins.to(dtype).repeat(1, 2), 1, order)).tolist() == [0.0, 0.0]


def test_quantile_of_no_token_is_nan() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        assert run_locally(radix_quantile(torch.empty(0, 3, dtype=dtype), 1)).isnan().all()


def test_more_than_one_block_of_tokens(feed: Feed) -> None:
    logits = torch.randn(5000, 7, generator=torch.Generator().manual_seed(1))
    for build in EXACT:
        balancer = build(7, 3, centre=False)
        routing = feed(balancer, logits)
        rank = math.ceil(5000 * 3 / 7) + (balancer.order == "q_plus_1")
        expected = sorted_margins(routing, key_dtype(balancer))[rank - 1]
        update_balancers([balancer])
        assert torch.equal(balancer.bias.double(), expected)


def test_margin_store_keeps_its_place_once_it_is_large_enough() -> None:
    store = MarginStore(3, torch.float32)
    tally = MarginTally(store)
    tally.add(torch.ones(2, 3))
    store.reserve(10)
    assert torch.equal(store.margins, torch.ones(2, 3))
    place = store.buffer.data_ptr()
    for step in range(3):
        store.reset()
        assert store.margins.shape == (0, 3)
        for value in range(5):
            tally.add(torch.full((2, 3), float(step + value)))
        tally.add(torch.zeros(0, 3))
        assert store.margins[:, 0].tolist() == [step + row // 2 for row in range(10)]
    assert store.buffer.data_ptr() == place


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([*EXACT, HistogramQB]), st.integers(0, 2**31))
def test_bias_moves_loads_to_balance(build: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    balancer = build(8, 2)
    logits = torch.randn(2000, 8, generator=generator) + torch.linspace(-1, 1, 8)
    before = route(logits, balancer.bias, 2)
    for _step in range(8):
        balancer.observe(route(logits, balancer.bias, 2, tally=balancer.tally))
        update_balancers([balancer])
    after = route(logits, balancer.bias, 2)
    assert max_violation(after.load) < 0.1 < max_violation(before.load)


SKEWED = ([[0.92, 0.68, 0.31, 0.07]] * 4, [[0.07, 0.31, 0.92, 0.68]] * 4)


def on_two_ranks(build: Callable[..., BiasBalancer], feed: Feed) -> list[float]:
    ranks = [[build(4, 1)], [build(4, 1)]]
    for (balancer,), scores in zip(ranks, SKEWED, strict=True):
        feed(balancer, logit(scores))
    simulate_ranks(ranks)
    assert torch.equal(ranks[0][0].bias, ranks[1][0].bias)
    return ranks[0][0].bias.tolist()


def test_e6_pooled_histogram_of_two_skewed_ranks(feed: Feed) -> None:
    build = partial(HistogramQB, num_bins=10)
    assert on_two_ranks(build, feed) == pytest.approx([-0.2, 0.2, -0.2, 0.2], abs=1e-6)
    own = [build(4, 1), build(4, 1)]
    for balancer, scores in zip(own, SKEWED, strict=True):
        feed(balancer, logit(scores))
        update_balancers([balancer])
    average = torch.stack([balancer.bias for balancer in own]).mean(0).tolist()
    assert average == pytest.approx([0, 0, -0.2, 0.2], abs=1e-6)


@pytest.mark.parametrize("per", ["step", "microbatch"])
def test_e6_rank_average_differs_from_the_pool(per: str, feed: Feed) -> None:
    # the exact quantiles are (-.24, 0, .37, .61) and (.61, .37, -.24, 0)
    averaged = on_two_ranks(partial(RankAveragedQB, per=per), feed)
    assert averaged == pytest.approx([0, 0, -0.12, 0.12], abs=1e-6)
    pooled = on_two_ranks(partial(ExactQB, key="fp32"), feed)
    assert pooled == pytest.approx([-0.12, 0.12, -0.12, 0.12], abs=1e-6)
    assert averaged != pytest.approx(pooled, abs=0.05)


@pytest.mark.parametrize("rule", ["sign", "proportional"])
def test_e6_pooled_count_differs_from_the_average_of_ranks(rule: str, feed: Feed) -> None:
    # loads [4, 0, 0, 0] and [0, 0, 4, 0]: alone, the rule lowers one expert a rank and raises the others
    build = partial(SignedCount, rate=1.0, rule=rule)
    assert on_two_ranks(build, feed) == [-1.0, 1.0, -1.0, 1.0]


def local_quantile(routing: Routing) -> Tensor:
    count = int(routing.num_valid)
    rank = math.ceil(Fraction(count * routing.top_k, routing.num_experts))
    return sorted_margins(routing)[rank - 1]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=4), min_size=1, max_size=4), st.integers(0, 2**31))
@pytest.mark.parametrize("per", ["step", "microbatch"])
def test_rank_average_is_the_mean_of_local_quantiles(per: str, sizes: list[list[int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ranks = [[RankAveragedQB(5, 2, per=per, centre=False)] for _ in sizes]
    quantiles = []
    for (balancer,), microbatches in zip(ranks, sizes, strict=True):
        logits = torch.randn(sum(microbatches), 5, generator=generator)
        for part in logits.split(microbatches):
            routing = route(part, balancer.bias, 2, tally=balancer.tally)
            balancer.observe(routing)
            if per == "microbatch" and len(part):
                quantiles.append(local_quantile(routing))
        if per == "step" and len(logits):
            quantiles.append(local_quantile(route(logits, balancer.bias, 2)))
    simulate_ranks(ranks)
    expected = torch.stack(quantiles).mean(0) if quantiles else torch.zeros(5, dtype=torch.float64)
    torch.testing.assert_close(ranks[0][0].bias.double(), expected, rtol=0, atol=1e-6)


def loaded(balancer: SignedCount, load: list[int], dtype: torch.dtype, feed: Feed) -> SignedCount:
    """Feed one-hot logits of ``dtype``, so that K=1 routing has this load."""
    experts = torch.repeat_interleave(torch.arange(len(load)), torch.tensor(load))
    feed(balancer, (8 * torch.eye(len(load)))[experts].to(dtype))
    assert balancer.load.tolist() == load
    return balancer


@pytest.mark.parametrize(
    ("options", "step"),
    [({"rule": "sign"}, 1.0), ({"rule": "sign", "centred": True}, 1.0), ({"rule": "proportional"}, 1 / 256)],
    ids=["sign", "centred", "proportional"],
)
def test_e8_sign_survives_a_bf16_model(options: dict[str, Any], step: float, feed: Feed) -> None:
    """bf16 knows no 257: neither the counts nor their mean may pass through it."""
    model = nn.ModuleDict({"weight": nn.Linear(4, 4, bias=False), "balancer": SignedCount(4, 1, **options)})
    model.to(torch.bfloat16)
    assert model["weight"].weight.dtype == torch.bfloat16
    balancer: Any = model["balancer"]
    bias = updated(loaded(balancer, [257, 256, 255, 256], torch.bfloat16, feed))
    assert bias == pytest.approx([-1e-3 * step, 0.0, 1e-3 * step, 0.0], rel=1e-6)
    assert bias[1] == bias[3] == 0.0


def test_e9_half_moved_by_a_thousandth(feed: Feed) -> None:
    balancer = SignedCount(4, 1).bfloat16()
    balancer.bias.fill_(0.5)
    bias = updated(loaded(balancer, [9, 1, 5, 5], torch.bfloat16, feed))
    assert bias == pytest.approx([0.499, 0.501, 0.5, 0.5], abs=1e-7)


RULES: list[tuple[dict[str, Any], list[float]]] = [
    ({"rule": "sign"}, [-1, -1, 1, 1]),
    ({"rule": "sign", "centred": True}, [-1, -1, 1, 1]),
    ({"rule": "proportional"}, [-1.0, -0.2, 0.2, 1.0]),
    ({"rule": "proportional", "centred": True}, [-1.0, -0.2, 0.2, 1.0]),
]


@pytest.mark.parametrize(("options", "step"), RULES)
def test_signed_count_step(options: dict[str, Any], step: list[float], feed: Feed) -> None:
    balancer = SignedCount(4, 1, rate=0.01, **options)
    balancer.bias.copy_(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    start = balancer.bias.tolist()
    balancer.load.copy_(torch.tensor([10, 6, 4, 0]))
    expected = [old + 0.01 * move for old, move in zip(start, step, strict=True)]
    assert updated(balancer) == pytest.approx(expected, abs=1e-7)


def test_signed_count_centred_takes_the_mean_off_the_step_only() -> None:
    plain, centred = SignedCount(4, 1, rate=0.25), SignedCount(4, 1, rate=0.25, centred=True)
    for balancer in (plain, centred):
        balancer.bias.fill_(2.0)
        balancer.load.copy_(torch.tensor([9, 1, 1, 1]))
    assert updated(plain) == [1.75, 2.25, 2.25, 2.25]
    # mean of the signs (-1, 1, 1, 1) is 1/2
    assert updated(centred) == [1.625, 2.125, 2.125, 2.125]


def test_signed_count_keeps_a_balanced_layer() -> None:
    balancer = SignedCount(4, 2)
    balancer.bias.copy_(torch.tensor([3.0, 3, 3, -3]))
    balancer.load.copy_(torch.tensor([5, 5, 5, 5]))
    assert updated(balancer) == [3.0, 3.0, 3.0, -3.0]


@pytest.mark.parametrize("build", [SignedCount, RankAveragedQB, HistogramQB, ExactQB], ids=lambda build: build.__name__)
@pytest.mark.parametrize("ema", [0.0, 0.25, 0.9])
def test_ema_mixes_the_old_bias_in(build: Any, ema: float, feed: Feed) -> None:
    plain, mixed = build(5, 2), build(5, 2, ema=ema)
    old = torch.tensor([0.3, -0.1, 0.2, -0.5, 0.1])
    for balancer in (plain, mixed):
        balancer.bias.copy_(old)
        feed(balancer, torch.randn(40, 5, generator=torch.Generator().manual_seed(4)))
        update_balancers([balancer])
    expected = ema * old.double() + (1 - ema) * plain.bias.double()
    torch.testing.assert_close(mixed.bias.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("ema", [-0.1, 1.0, 1.5, math.nan])
def test_ema_outside_its_range_is_an_error(ema: float) -> None:
    with pytest.raises(ValueError, match=rf"ema must be in \[0, 1\), got {ema}"):
        ExactQB(4, 1, ema=ema)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([RankAveragedQB, HistogramQB, *EXACT]), st.integers(0, 2**31), st.integers(1, 50))
def test_centring_takes_off_the_mean(build: Any, seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    centred, plain = build(6, 2), build(6, 2, centre=False)
    logits = torch.randn(count, 6, generator=generator)
    for balancer in (centred, plain):
        balancer.observe(route(logits, balancer.bias, 2, tally=balancer.tally))
        update_balancers([balancer])
    assert abs(centred.bias.mean().item()) < 1e-6
    torch.testing.assert_close(centred.bias, plain.bias - plain.bias.mean(), rtol=0, atol=1e-6)


BAD_OPTIONS: list[tuple[Any, dict[str, Any], str]] = [
    (ExactQB, {"key": "fp16"}, "key must be 'bf16', 'fp32' or 'fixed8' to 'fixed16', got 'fp16'"),
    (ExactQB, {"order": "q+1"}, r"order must be 'q' or 'q_plus_1', got 'q\+1'"),
    (RankAveragedQB, {"per": "batch"}, "per must be 'step' or 'microbatch', got 'batch'"),
    (SignedCount, {"rule": "signed"}, "rule must be 'sign' or 'proportional', got 'signed'"),
    (SignedCount, {"rate": 0.0}, "rate must be positive, got 0.0"),
    (SignedCount, {"rate": -1e-3}, "rate must be positive, got -0.001"),
    (SignedCount, {"rate": math.nan}, "rate must be positive, got nan"),
]


@pytest.mark.parametrize(("build", "options", "message"), BAD_OPTIONS)
def test_unknown_option_is_an_error(build: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(4, 1, **options)


POOLED = [
    *EXACT,
    HistogramQB,
    partial(HistogramQB, num_bins=13),
    SignedCount,
    partial(SignedCount, rule="proportional", centred=True),
]


@settings(deadline=None, max_examples=80)
@given(
    st.sampled_from(POOLED),
    st.sampled_from([3, 5, 7, 8, 13]),
    st.lists(st.integers(0, 11), max_size=60),
    st.integers(1, 4),
    st.integers(0, 2**31),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(["sigmoid", "softmax"]),
)
def test_pooled_bias_does_not_depend_on_the_split(
    build: Any, num_experts: int, cells: list[int], num_ranks: int, seed: int, dtype: torch.dtype, gate: str
) -> None:
    """Token ``t`` goes to microbatch ``cells[t]`` of the step, which is on rank ``cells[t] % num_ranks``."""
    generator = torch.Generator().manual_seed(seed)
    top_k = int(torch.randint(1, num_experts, (), generator=generator))
    logits = (3 * torch.randn(len(cells), num_experts, generator=generator)).to(dtype)
    start = torch.randn(num_experts, generator=generator)
    places = torch.tensor(cells, dtype=torch.long)
    whole = build(num_experts, top_k)
    ranks = [[build(num_experts, top_k)] for _ in range(num_ranks)]
    for balancer in (whole, *(layers[0] for layers in ranks)):
        balancer.bias.copy_(start)
    whole.observe(route(logits, whole.bias, top_k, tally=whole.tally, gate=gate))
    for cell in torch.randperm(12, generator=generator).tolist():
        (balancer,) = ranks[cell % num_ranks]
        part = logits[places == cell]
        part = part[torch.randperm(len(part), generator=generator)]
        # padding around the tokens counts for nothing
        padded = torch.cat([part.new_full((1, num_experts), 5.0), part, part.new_full((1, num_experts), -7.0)])
        valid = torch.ones(len(padded), dtype=torch.bool)
        valid[[0, -1]] = False
        balancer.observe(route(padded, balancer.bias, top_k, tally=balancer.tally, valid=valid, gate=gate))
    update_balancers([whole])
    simulate_ranks(ranks)
    for (balancer,) in ranks:
        assert torch.equal(balancer.bias, whole.bias)


def test_rank_average_depends_on_the_split(feed: Feed) -> None:
    logits = torch.cat([logit(scores) for scores in SKEWED])
    by_rank = [[RankAveragedQB(4, 1)], [RankAveragedQB(4, 1)]]
    mixed = [[RankAveragedQB(4, 1)], [RankAveragedQB(4, 1)]]
    for rank in range(2):
        feed(by_rank[rank][0], logits[4 * rank : 4 * rank + 4])
        feed(mixed[rank][0], logits[rank::2])
    simulate_ranks(by_rank)
    simulate_ranks(mixed)
    assert (by_rank[0][0].bias - mixed[0][0].bias).abs().max() > 0.05
