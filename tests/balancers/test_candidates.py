"""ExactQB from candidates: the bits of the full selection, always, and how often and at what cost.

``T`` tokens, ``E`` experts, ``K`` experts a token.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from equipoise.balancers import ExactQB, HistogramQB, simulate_ranks, update_balancers
from equipoise.balancers.candidates import MEMORY, REACH
from equipoise.balancers.update import _describe, drive
from equipoise.kernels import Routing, route

E, K = 16, 3
Feed = Callable[..., Routing]
Batches = Iterator[Tensor]

FORMS = [
    {"key": key, "candidates": candidates, "fallback": fallback}
    for key, candidates, fallback in product(
        ("bf16", "fp32", "fixed9", "fixed12", "fixed16"), ("cut", "window"), ("keep", "observe")
    )
    if (key, candidates) != ("fp32", "window")
]
every_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form.values()))


def drifting(step: float, seed: int = 0, num_steps: int = 5, num_tokens: int = 200) -> Batches:
    """Logits ``[T, E]`` of each step, whose favourites walk by ``step``."""
    generator = torch.Generator().manual_seed(seed)
    offset = torch.randn(E, generator=generator)
    for _step in range(num_steps):
        offset += step * torch.randn(E, generator=generator)
        yield torch.randn(num_tokens, E, generator=generator) + offset


def tied() -> Batches:
    for logits in drifting(0.3):
        yield logits.round()


def saturated() -> Batches:
    for logits in drifting(0.3):
        yield 40 * logits


def collapsed() -> Batches:
    """All tokens alike, then all to other experts, then nothing to choose between."""
    for favourite in (0, 0, 7, 7):
        logits = torch.zeros(50, E)
        logits[:, favourite] = 8.0
        yield logits
    yield torch.zeros(50, E)


STREAMS: dict[str, Callable[[], Batches]] = {
    "still": lambda: drifting(0.0),
    "slow": lambda: drifting(0.01),
    "jumping": lambda: drifting(2.0),
    "tied": tied,
    "saturated": saturated,
    "collapsed": collapsed,
}


def learn(balancers: list[ExactQB], logits: Tensor, parts: int = 3) -> list[Tensor]:
    """One step of microbatches for each balancer; the biases afterwards."""
    for balancer in balancers:

        def forwards(balancer: ExactQB = balancer) -> None:
            for part in logits.tensor_split(parts):
                balancer.observe(route(part, balancer.bias, K, tally=balancer.tally))

        forwards()
        update_balancers([balancer], observe_again=forwards)
    return [balancer.bias.clone() for balancer in balancers]


@every_form
@pytest.mark.parametrize("order", ["q", "q_plus_1"])
@pytest.mark.parametrize("stream", STREAMS)
def test_bias_has_the_bits_of_the_full_selection(form: dict[str, str], order: str, stream: str) -> None:
    lean, full = ExactQB(E, K, order=order, **form), ExactQB(E, K, order=order, key=form["key"])
    for logits in STREAMS[stream]():
        ours, reference = learn([lean, full], logits)
        assert torch.equal(ours, reference)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_bias_has_the_bits_of_the_full_selection_over_virtual_ranks(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(FORMS))
    num_ranks, num_tokens = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 60))
    options = {"ema": data.draw(st.sampled_from([0.0, 0.5])), "centre": data.draw(st.booleans())}
    ranks = [[ExactQB(E, K, **form, **options)] for _rank in range(num_ranks)]
    full = ExactQB(E, K, key=form["key"], **options)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    for _step in range(3):
        logits = 2 * torch.randn(num_tokens, E, generator=generator) + torch.linspace(-1, 1, E)
        parts = logits.tensor_split(num_ranks)

        def forwards(parts: tuple[Tensor, ...] = parts) -> None:
            for (balancer,), part in zip(ranks, parts, strict=True):
                balancer.observe(route(part, balancer.bias, K, tally=balancer.tally))

        forwards()
        simulate_ranks(ranks, observe_again=forwards)
        learn([full], logits)
        assert all(torch.equal(balancer.bias, full.bias) for (balancer,) in ranks)


@every_form
def test_falls_back_in_the_first_step_and_where_a_bias_jumps(form: dict[str, str]) -> None:
    balancer = ExactQB(E, K, **form)
    shares = []
    for logits in [*drifting(0.0, num_steps=6), *drifting(0.0, seed=5, num_steps=1)]:
        learn([balancer], logits)
        shares.append(float(balancer.diagnostics()["fallback_share"]))
    # a window of 254 of 512 keys is half of the range
    if (form["candidates"], form["key"]) == ("window", "fixed9"):
        assert shares == [0.0] * 7
        return
    assert shares[0] > 0
    assert shares[-1] > 0
    if form["candidates"] == "cut":
        assert shares[2:6].count(0.0) >= 3


def test_share_of_candidates_is_that_under_the_cut() -> None:
    balancer = ExactQB(E, K, candidates="cut", key="fp32")
    first, second = drifting(0.0, num_steps=2)
    learn([balancer], first)
    routing = route(second, balancer.bias, K)
    cut = balancer.bias + REACH * balancer.shortlist.square.sqrt()
    below = int((routing.margins <= cut).sum())
    learn([balancer], second)
    assert 0 < below < second.numel()
    assert balancer.diagnostics()["candidate_share"].item() == pytest.approx(below / second.numel(), rel=1e-12)


def test_cut_follows_the_root_mean_square_of_moves_and_skips_steps_without_tokens() -> None:
    cut = ExactQB(2, 1, candidates="cut").shortlist
    cut.learn(torch.tensor([0.3, -0.1]))
    cut.learn(torch.tensor([0.0, torch.nan]))
    torch.testing.assert_close(cut.square, torch.tensor([MEMORY * 0.09, 0.01]))


def test_observing_keeps_pairs_only_and_gives_the_margins_of_a_fallback_back() -> None:
    balancer = ExactQB(E, K, candidates="cut", fallback="observe")
    balancer.reserve(10**9)
    for logits in drifting(0.0, num_steps=5):
        assert balancer.store.buffer.numel() == 0
        learn([balancer], logits)
    last = next(drifting(0.0, seed=9))
    balancer.observe(route(last, balancer.bias, K, tally=balancer.tally))
    assert balancer.store.buffer.numel() == 0
    assert balancer.shortlist._filled == int((balancer.shortlist.values[: balancer.shortlist._filled] < 9).sum())
    assert K * len(last) <= balancer.shortlist._filled < last.numel()


def test_window_is_one_round_and_keeps_nothing_of_the_size_of_tokens() -> None:
    balancer = ExactQB(E, K, key="fixed12", candidates="window", fallback="observe")
    for logits in drifting(0.0, num_steps=3):
        learn([balancer], logits)
    balancer.observe(route(logits, balancer.bias, K, tally=balancer.tally))
    sizes = []

    def note(statistic: Tensor) -> Tensor:
        sizes.append((statistic.dtype, tuple(statistic.shape)))
        return statistic

    drive(balancer.solve(), note)
    assert sizes == [(torch.int32, (E, 256))]
    assert balancer.store.buffer.numel() == 0


def test_update_needs_a_way_to_observe_again_before_it_is_needed() -> None:
    balancer = ExactQB(E, K, candidates="cut", fallback="observe")
    with pytest.raises(ValueError, match="observe_again"):
        update_balancers([balancer])
    with pytest.raises(ValueError, match="observe_again"):
        simulate_ranks([[balancer]])
    balancer.frozen = True
    update_balancers([balancer])


@pytest.mark.parametrize("wrong", ["nothing", "fewer", "eval"])
def test_observing_other_tokens_is_refused(wrong: str) -> None:
    balancer = ExactQB(E, K, candidates="cut", fallback="observe")
    logits = torch.randn(40, E)
    balancer.observe(route(logits, balancer.bias, K, tally=balancer.tally))

    def again() -> None:
        balancer.train(wrong != "eval")
        given = {"nothing": 0, "fewer": 39, "eval": 40}[wrong]
        balancer.observe(route(logits[:given], balancer.bias, K, tally=balancer.tally))

    with pytest.raises(ValueError, match="expected 40 on this rank, got"):
        update_balancers([balancer], observe_again=again)


def test_the_others_do_not_count_what_is_observed_again() -> None:
    """Nor does the one that asked count it in the next step."""
    layers: list[Any] = [ExactQB(E, K, candidates="cut", fallback="observe"), HistogramQB(E, K), ExactQB(E, K)]
    twins = [ExactQB(E, K), HistogramQB(E, K), ExactQB(E, K)]
    calls = []
    for logits in drifting(1.0, num_steps=4):

        def forwards(logits: Tensor = logits) -> None:
            calls.append(torch.is_grad_enabled())
            for layer in layers:
                layer.observe(route(logits, layer.bias, K, tally=layer.tally))

        forwards()
        update_balancers(nn.ModuleList(layers), observe_again=forwards)
        for twin in twins:
            twin.observe(route(logits, twin.bias, K, tally=twin.tally))
        update_balancers(twins)
        assert all(torch.equal(layer.bias, twin.bias) for layer, twin in zip(layers, twins, strict=True))
    # four steps with gradients, and those observed again without
    assert calls.count(True) == 4
    assert calls.count(False) >= 1


def test_padding_is_no_candidate() -> None:
    for form in FORMS:
        masked, alone = ExactQB(E, K, **form), ExactQB(E, K, **form)
        for logits in drifting(0.1, num_steps=3):
            valid = torch.arange(len(logits)) % 3 != 0

            def forwards(masked: ExactQB = masked, logits: Tensor = logits, valid: Tensor = valid) -> None:
                masked.observe(route(logits, masked.bias, K, tally=masked.tally, valid=valid))

            forwards()
            update_balancers([masked], observe_again=forwards)
            learn([alone], logits[valid])
            assert torch.equal(masked.bias, alone.bias)


def test_a_step_without_tokens_leaves_the_bias() -> None:
    for form in FORMS:
        balancer = ExactQB(E, K, **form)
        learn([balancer], next(drifting(0.0)))
        before = balancer.bias.clone()
        learn([balancer], torch.empty(0, E))
        assert torch.equal(balancer.bias, before)
        assert float(balancer.diagnostics()["fallback_share"]) == 0.0


@pytest.mark.parametrize("candidates", ["cut", "window"])
def test_a_resumed_run_has_learnt_nothing_and_takes_the_same_steps(candidates: str) -> None:
    balancer, resumed = (ExactQB(E, K, candidates=candidates, fallback="observe") for _copy in range(2))
    *before, last = drifting(0.05)
    for logits in before:
        learn([balancer], logits)
    resumed.load_state_dict(balancer.state_dict())
    ours, theirs = learn([balancer, resumed], last)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": "fixed7"}, "key must be"),
        ({"key": "fixed17"}, "key must be"),
        ({"candidates": "some"}, "candidates must be null, 'cut' or 'window', got 'some'"),
        ({"candidates": "cut", "fallback": "none"}, "fallback must be 'keep' or 'observe', got 'none'"),
        ({"candidates": "window", "key": "fp32"}, "a window needs keys of 16 bits"),
    ],
)
def test_unknown_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExactQB(E, K, **options)


def test_fixed_point_keys_need_bounded_scores(feed: Feed) -> None:
    with pytest.raises(ValueError, match="selection='score'"):
        feed(ExactQB(E, K, key="fixed12"), torch.randn(4, E), selection="logit")


@pytest.mark.parametrize("options", [{"candidates": "window", "fallback": "observe"}, {"key": "fixed12"}])
def test_compiled_code_says_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ValueError, match="expected fallback='keep' and key='bf16' or 'fp32', got"):
        ExactQB(E, K, **options).open_tally()


@pytest.mark.parametrize(
    "form",
    [
        {"key": "bf16", "candidates": "cut", "fallback": "observe"},
        {"key": "fp32", "candidates": "cut", "fallback": "observe"},
        {"key": "fixed16", "candidates": "cut", "fallback": "keep"},
        {"key": "bf16", "candidates": "window", "fallback": "keep"},
        {"key": "fixed12", "candidates": "window", "fallback": "observe"},
    ],
    ids=lambda form: "-".join(form.values()),
)
def test_the_kernels_too_give_the_bits_of_the_full_selection(
    form: dict[str, str], monkeypatch: pytest.MonkeyPatch, interpreter: None
) -> None:
    """Whatever a form does with margins, they are those that the kernel has."""
    monkeypatch.setenv("EQUIPOISE_KERNELS", "triton")
    lean, full = ExactQB(E, K, **form), ExactQB(E, K, key=form["key"])
    for logits in drifting(0.1, num_steps=2, num_tokens=70):
        ours, reference = learn([lean, full], logits, parts=1)
        assert torch.equal(ours, reference)


def test_the_tally_of_another_is_not_taken_for_its_own() -> None:
    for form in FORMS:
        one, other, alone = (ExactQB(E, K, **form) for _balancer in range(3))
        logits = next(drifting(0.0))

        def forwards(one: ExactQB = one, other: ExactQB = other, logits: Tensor = logits) -> None:
            routing = route(logits, one.bias, K, tally=one.tally)
            for balancer in (one, other):
                balancer.observe(routing)

        forwards()
        update_balancers([one, other], observe_again=forwards)
        learn([alone], logits)
        assert torch.equal(one.bias, alone.bias)
        assert torch.equal(other.bias, alone.bias)


def test_ranks_with_other_forms_are_described_otherwise() -> None:
    settings = [_describe(ExactQB(E, K, candidates=candidates)) for candidates in (None, "cut", "window")]
    assert len({each["candidates"] for each in settings}) == 3
