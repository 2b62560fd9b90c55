"""The contract that every balancer keeps. A new balancer is one row here; names like ``s1`` are those of the faults."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from equipoise.balancers import (
    LEI,
    BiasBalancer,
    ExactQB,
    GradientBalancer,
    GShard,
    HistogramQB,
    RankAveragedQB,
    SignedCount,
    check_replicas,
    simulate_ranks,
    update_balancers,
)
from equipoise.balancers.metrics import dead_share, intervention_rate, load_cv, load_entropy, max_violation
from equipoise.balancers.update import _describe
from equipoise.experiments.moe import Router
from equipoise.kernels import Routing, replay, route


@dataclass(frozen=True)
class Row:
    """A balancer under the contract: ``build(num_experts, top_k)``.

    ``splits`` says over what the same tokens may be spread without changing a bit of the next bias: ``ranks`` (and
    microbatches), ``microbatches`` of one rank, or ``nothing``.
    """

    name: str
    build: Callable[..., Any]
    splits: str = "ranks"


BIAS = [
    Row("signed_count_sign", SignedCount),
    Row("signed_count_proportional", partial(SignedCount, rule="proportional")),
    Row("signed_count_centred", partial(SignedCount, centred=True)),
    Row("signed_count_ema", partial(SignedCount, rule="proportional", centred=True, ema=0.5)),
    Row("rank_averaged_qb_step", partial(RankAveragedQB, per="step"), splits="microbatches"),
    Row("rank_averaged_qb_microbatch", partial(RankAveragedQB, per="microbatch"), splits="nothing"),
    Row("histogram_qb", HistogramQB),
    Row("histogram_qb_coarse_uncentred", partial(HistogramQB, num_bins=7, centre=False)),
    Row("histogram_qb_ema", partial(HistogramQB, ema=0.5)),
    Row("exact_qb", ExactQB),
    Row("exact_qb_q_plus_1", partial(ExactQB, order="q_plus_1")),
    Row("exact_qb_fp32", partial(ExactQB, key="fp32")),
    Row("exact_qb_fixed16", partial(ExactQB, key="fixed16")),
    Row("exact_qb_cut", partial(ExactQB, candidates="cut")),
    Row("exact_qb_window", partial(ExactQB, candidates="window")),
    Row("exact_qb_window_fixed12", partial(ExactQB, candidates="window", key="fixed12", order="q_plus_1")),
    Row("exact_qb_fp32_q_plus_1_ema_uncentred", partial(ExactQB, key="fp32", order="q_plus_1", ema=0.5, centre=False)),
]
GRADIENT = [
    Row("gshard_microbatch", GShard),
    Row("gshard_sequence", partial(GShard, scope="sequence")),
    Row("gshard_global", partial(GShard, scope="global")),
    Row("gshard_microbatch_bounded", partial(GShard, bound="tanh")),
    Row("gshard_sequence_bounded", partial(GShard, scope="sequence", bound="tanh")),
    Row("gshard_global_bounded", partial(GShard, scope="global", bound="tanh")),
    Row("lei", partial(LEI, eta=1e-2)),
    Row("lei_unbounded", partial(LEI, eta=1e-2, bound=None)),
    Row("lei_per_token", partial(LEI, eta=1e-2, units="per_token")),
    Row("lei_per_token_unbounded", partial(LEI, eta=1e-2, units="per_token", bound=None)),
]
every_bias = pytest.mark.parametrize("row", BIAS, ids=lambda row: row.name)
every_gradient = pytest.mark.parametrize("row", GRADIENT, ids=lambda row: row.name)
every_balancer = pytest.mark.parametrize("row", BIAS + GRADIENT, ids=lambda row: row.name)
gshards = pytest.mark.parametrize("row", [row for row in GRADIENT if "gshard" in row.name], ids=lambda row: row.name)

E, K = 8, 2
Feed = Callable[..., Routing]


def tokens(count: int, seed: int = 0, num_experts: int = E) -> Tensor:
    """Logits ``[count, num_experts]`` that favour the experts with a high id."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, num_experts, generator=generator) + torch.linspace(-1, 1, num_experts)


def steer(balancer: Any, logits: Tensor, valid: Tensor | None = None) -> Routing:
    return balancer.steer(route(logits, None, balancer.top_k, valid=valid, num_sequences=2))


def steered_gradient(balancer: Any, logits: Tensor, valid: Tensor | None = None) -> Tensor:
    """Gradient of the logits under a loss that is zero itself, so that it is all the balancer's."""
    logits = logits.detach().clone().requires_grad_()
    steer(balancer, logits, valid).weights.mul(0).sum().backward()
    assert logits.grad is not None
    return logits.grad


def observe_once(balancer: Any, feed: Feed, logits: Tensor) -> None:
    """One forward in training, whichever kind of balancer it is."""
    if isinstance(balancer, BiasBalancer):
        feed(balancer, logits)
    else:
        steer(balancer, logits.requires_grad_())


def tensors(balancer: nn.Module) -> dict[str, Tensor]:
    """Every tensor that a balancer holds: bias, accumulators, margin store."""
    held = dict(balancer.named_buffers())
    for prefix, module in balancer.named_modules():
        held |= {f"{prefix}.{name}": value for name, value in vars(module).items() if isinstance(value, Tensor)}
    return held


def snapshot(balancer: nn.Module) -> dict[str, Any]:
    """All state that an observation could touch: the bytes of the tensors and every integer attribute."""
    state: dict[str, Any] = {
        name: tensor.reshape(-1).view(torch.uint8).tolist() for name, tensor in tensors(balancer).items()
    }
    for prefix, module in balancer.named_modules():
        state |= {f"{prefix}.{name}": value for name, value in vars(module).items() if isinstance(value, int)}
    # counts no token: forwards without gradients that re-entrant checkpointing may come back to
    state.pop("._awaited")
    return state


def next_bias(balancer: BiasBalancer) -> Tensor:
    update_balancers([balancer])
    return balancer.bias.clone()


@every_bias
def test_collapse_lowers_the_bias_of_the_popular_expert(row: Row, feed: Feed) -> None:
    balancer = row.build(E, K)
    logits = tokens(64) * 0.1
    logits[:, 5] += 3
    feed(balancer, logits)
    bias = next_bias(balancer)
    assert bias.argmin() == 5
    assert bias[5] < bias.mean()


@every_bias
@pytest.mark.parametrize("how", ["eval", "no_grad"])
def test_s1_eval_forward_is_not_counted(row: Row, how: str, feed: Feed) -> None:
    balancer, reference = row.build(E, K), row.build(E, K)
    for each in (balancer, reference):
        feed(each, tokens(12))
    balancer.train(how != "eval")
    before = snapshot(balancer)
    with torch.set_grad_enabled(how != "no_grad"):
        feed(balancer, -3 * tokens(30, seed=1))
    assert snapshot(balancer) == before
    assert torch.equal(next_bias(balancer), next_bias(reference))


@every_gradient
@pytest.mark.parametrize("how", ["eval", "no_grad"])
def test_s1_eval_forward_is_not_steered(row: Row, how: str) -> None:
    balancer = row.build(E, K).train(how != "eval")
    before = snapshot(balancer)
    with torch.set_grad_enabled(how != "no_grad"):
        routing = route(tokens(12).requires_grad_(), None, K, num_sequences=2)
        assert balancer.steer(routing) is routing
    assert snapshot(balancer) == before


def save_topk(_context: Any, operation: Any, *_args: Any, **_options: Any) -> CheckpointPolicy:
    saved = operation is torch.ops.aten.topk.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


KINDS: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "non_reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, save_topk),
    },
}
# activation checkpointing, the outermost first
MODES: dict[str, list[str]] = {
    "none": [],
    "reentrant": ["reentrant"],
    "non_reentrant": ["non_reentrant"],
    "non_reentrant_to_the_end": ["non_reentrant"],
    "selective": ["selective"],
    "nested_to_the_end": ["non_reentrant", "non_reentrant"],
    "nested_three_times": ["non_reentrant", "non_reentrant", "non_reentrant"],
    "nested_reentrant": ["reentrant", "reentrant"],
    "reentrant_in_non_reentrant": ["non_reentrant", "reentrant"],
    "non_reentrant_in_reentrant": ["reentrant", "non_reentrant"],
    "selective_in_non_reentrant": ["non_reentrant", "selective"],
}
# backward after every forward (accumulation), or after all of them (a pipeline schedule), or twice after every forward
SCHEDULES = {
    "reentrant": ("accumulate", "pipeline", "twice"),
    "non_reentrant": ("accumulate", "pipeline", "twice"),
    "non_reentrant_to_the_end": ("accumulate", "pipeline"),
    "selective": ("accumulate", "pipeline"),
    "nested_to_the_end": ("pipeline",),
    "nested_three_times": ("twice",),
    "nested_reentrant": ("twice",),
    "reentrant_in_non_reentrant": ("pipeline",),
    "non_reentrant_in_reentrant": ("pipeline",),
    "selective_in_non_reentrant": ("pipeline",),
}
every_checkpoint = pytest.mark.parametrize(
    ("mode", "schedule"), [(mode, schedule) for mode, schedules in SCHEDULES.items() for schedule in schedules]
)
MICROBATCHES = (8, 4, 14)


def checkpointed(layer: Callable[[Tensor], Tensor], mode: str) -> Callable[[Tensor], Tensor]:
    """The layer under activation checkpointing."""
    for kind in reversed(MODES[mode]):
        layer = partial(checkpoint, layer, **KINDS[kind])
    return layer


def run_step(layer: Callable[[Tensor], Tensor], mode: str, schedule: str) -> list[Tensor]:
    """Gradients of the logits of three microbatches of one step, under activation checkpointing."""
    microbatches = [tokens(count, seed=count).requires_grad_() for count in MICROBATCHES]
    losses = []
    with set_checkpoint_early_stop(not mode.endswith("to_the_end")):
        for logits in microbatches:
            losses.append(checkpointed(layer, mode)(logits))
            if schedule == "twice":
                losses[0].backward(retain_graph=True)
            if schedule != "pipeline":
                losses.pop().backward()
        for loss in losses:
            loss.backward()
    return [logits.grad for logits in microbatches if logits.grad is not None]


def check_counted(balancer: BiasBalancer, num_tokens: int, num_microbatches: int) -> None:
    """Every token once: by whatever the balancer counts."""
    if isinstance(balancer, SignedCount):
        assert balancer.load.sum() == num_tokens * K
    elif isinstance(balancer, HistogramQB):
        assert balancer.counts.sum(1).tolist() == [num_tokens] * E
    elif isinstance(balancer, RankAveragedQB) and balancer.per == "microbatch":
        assert balancer.total[-1] == num_microbatches
    else:
        assert len(balancer.store.margins) == num_tokens


@every_bias
@every_checkpoint
def test_s2_recomputation_is_not_counted_again(row: Row, mode: str, schedule: str, feed: Feed) -> None:
    balancer, reference = row.build(E, K), row.build(E, K)
    run_step(lambda logits: (feed(balancer, logits).weights * 2).sum(), mode, schedule)
    run_step(lambda logits: (feed(reference, logits).weights * 2).sum(), "none", "accumulate")
    check_counted(balancer, sum(MICROBATCHES), len(MICROBATCHES))
    for name, expected in tensors(reference).items():
        assert torch.equal(tensors(balancer)[name], expected), name
    assert torch.equal(next_bias(balancer), next_bias(reference))


@every_bias
def test_s2_reset_forgets_forwards_that_had_no_backward(row: Row, feed: Feed) -> None:
    balancer, reference = row.build(E, K), row.build(E, K)
    feed(balancer, tokens(20))
    balancer.reset()
    # the only counted forward of a re-entrant checkpoint is its recomputation
    run_step(lambda logits: (feed(balancer, logits).weights * 2).sum(), "reentrant", "accumulate")
    run_step(lambda logits: (feed(reference, logits).weights * 2).sum(), "none", "accumulate")
    assert torch.equal(next_bias(balancer), next_bias(reference))


class Shards:
    """Stands for the collective: the other shard has a skewed load, and every sum is counted."""

    def __init__(self) -> None:
        self.sums = 0

    def __call__(self, loads: list[Tensor], group: object) -> list[Tensor]:
        self.sums += 1
        return [load + 3 * torch.arange(E, dtype=load.dtype) for load in loads]


@every_bias
@pytest.mark.parametrize("aborted", [False, True])
def test_s2_forward_without_gradients_brings_no_recomputation(row: Row, aborted: bool, feed: Feed) -> None:
    """In training mode, say to score a rollout; re-entrant checkpointing begins with such a forward too."""
    balancer, reference = row.build(E, K), row.build(E, K)
    with torch.no_grad():
        feed(balancer, tokens(20))
    if aborted:
        balancer.reset()
    mode, schedule = ("reentrant", "twice") if aborted else ("non_reentrant", "pipeline")
    run_step(lambda logits: (feed(balancer, logits).weights * 2).sum(), mode, schedule)
    run_step(lambda logits: (feed(reference, logits).weights * 2).sum(), "none", "accumulate")
    assert torch.equal(next_bias(balancer), next_bias(reference))


def check_same_steps(balancer: Any, reference: Any, mode: str, schedule: str) -> None:
    gradients = run_step(lambda logits: (steer(balancer, logits).weights * 2).sum(), mode, schedule)
    expected = run_step(lambda logits: (steer(reference, logits).weights * 2).sum(), "none", schedule)
    assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))
    for name, tensor in tensors(reference).items():
        assert torch.equal(tensors(balancer)[name], tensor), name


@every_gradient
@every_checkpoint
def test_s2_recomputation_steers_the_same_gradient(row: Row, mode: str, schedule: str) -> None:
    check_same_steps(row.build(E, K), row.build(E, K), mode, schedule)


def skewed_sum(loads: list[Tensor], group: list[Any]) -> list[Tensor]:
    """Stands for a collective: another shard has a skewed load, and the group notes every sum."""
    group.append(None)
    return [load + 3 * torch.arange(E, dtype=load.dtype) for load in loads]


@every_gradient
@pytest.mark.parametrize(
    ("mode", "schedule"), [("reentrant", "twice"), ("non_reentrant", "pipeline"), ("nested_three_times", "twice")]
)
def test_s2_recomputation_takes_no_part_in_a_collective(
    row: Row, mode: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("equipoise.balancers.update.sum_over_shards", skewed_sum)
    balancer, reference = row.build(E, K), row.build(E, K)
    for each in (balancer, reference):
        each.microbatch_shards = each.token_shards = []
    check_same_steps(balancer, reference, mode, schedule)
    assert len(balancer.microbatch_shards) == len(MICROBATCHES)


@every_bias
def test_s3_aborted_step_runs_again(row: Row, feed: Feed) -> None:
    balancer, reference = row.build(E, K), row.build(E, K)
    for seed in range(2):
        feed(balancer, tokens(6, seed))
    balancer.reset()
    for each in (balancer, reference):
        for seed in range(4):
            feed(each, tokens(6, seed))
    assert snapshot(balancer).keys() == snapshot(reference).keys()
    assert torch.equal(next_bias(balancer), next_bias(reference))


@every_gradient
def test_s3_aborted_step_steers_again(row: Row) -> None:
    balancer, reference = row.build(E, K), row.build(E, K)
    for seed in range(2):
        steered_gradient(balancer, tokens(6, seed + 7))
    balancer.reset()
    for seed in range(4):
        gradients = [steered_gradient(each, tokens(6, seed)) for each in (balancer, reference)]
        assert torch.equal(*gradients)


@every_bias
@pytest.mark.parametrize("num_tokens", [8, 11], ids=["T_equals_E", "T_differs"])
def test_s4_padding_equals_removal(row: Row, num_tokens: int, feed: Feed) -> None:
    logits = tokens(num_tokens)
    valid = torch.arange(num_tokens) % 2 == 0
    balancer, reference = row.build(E, K), row.build(E, K)
    padded = feed(balancer, logits.where(valid[:, None], 50 * logits), valid)
    assert padded.experts.shape == (num_tokens, K)
    feed(reference, logits[valid])
    assert torch.equal(next_bias(balancer), next_bias(reference))
    assert reference.bias.any()


@every_bias
def test_s4_true_marks_a_real_token(row: Row, feed: Feed) -> None:
    logits = tokens(E)
    valid = torch.arange(E) < 3
    real, padding, masked = row.build(E, K), row.build(E, K), row.build(E, K)
    feed(real, logits[:3])
    feed(padding, logits[3:])
    feed(masked, logits, valid)
    assert torch.equal(next_bias(masked), next_bias(real))
    assert not torch.equal(real.bias, next_bias(padding))


@every_bias
def test_s4_padding_is_in_no_metric(row: Row, feed: Feed) -> None:
    valid = torch.arange(E) < 4
    balancer = row.build(E, K)
    balancer.bias.copy_(torch.linspace(1, -1, E))
    padded = feed(balancer, tokens(E).where(valid[:, None], 50 * tokens(E)), valid)
    real = feed(balancer, tokens(E)[:4])
    assert torch.equal(padded.load, real.load)
    for metric in (max_violation, dead_share, load_cv, load_entropy):
        assert torch.equal(metric(padded.load), metric(real.load))
    assert torch.equal(intervention_rate(padded), intervention_rate(real))
    assert intervention_rate(real) > 0


@every_gradient
@pytest.mark.parametrize(("real_tokens", "padding"), [(2, 2), (4, 2)], ids=["T_equals_E", "T_differs"])
def test_s4_padding_gets_no_gradient_and_changes_none(row: Row, real_tokens: int, padding: int) -> None:
    # of each of two sequences
    valid = torch.tensor([True] * real_tokens + [False] * padding).repeat(2)
    logits = tokens(len(valid)).double()
    padded, real = row.build(E, K), row.build(E, K)
    gradient = steered_gradient(padded, logits.where(valid[:, None], 50 * logits), valid)
    expected = steered_gradient(real, logits[valid])
    assert expected.any()
    assert not gradient[~valid].any()
    torch.testing.assert_close(gradient[valid], expected, rtol=1e-12, atol=1e-15)
    if real.last_value is not None:
        torch.testing.assert_close(padded.last_value, real.last_value, rtol=1e-12, atol=0)


@pytest.mark.parametrize("row", [row for row in BIAS if row.splits != "nothing"], ids=lambda row: row.name)
def test_s5_microbatches_of_one_step_are_one_batch(row: Row, feed: Feed) -> None:
    whole, parts = row.build(E, K), row.build(E, K)
    logits = tokens(4 * 9)
    for _step in range(2):
        feed(whole, logits)
        for microbatch in logits.split(9):
            feed(parts, microbatch)
        assert torch.equal(next_bias(whole), next_bias(parts))


@pytest.mark.parametrize("row", [row for row in BIAS if row.splits == "ranks"], ids=lambda row: row.name)
def test_s5_ranks_of_one_step_are_one_batch(row: Row, feed: Feed) -> None:
    whole = row.build(E, K)
    ranks = [[row.build(E, K)] for _ in range(4)]
    logits = tokens(4 * 9)
    for _step in range(2):
        feed(whole, logits)
        for (balancer,), shard in zip(ranks, logits.split(9), strict=True):
            feed(balancer, shard)
        simulate_ranks(ranks)
        next_bias(whole)
        assert all(torch.equal(balancer.bias, whole.bias) for (balancer,) in ranks)


@every_bias
@pytest.mark.parametrize("container", [list, nn.ModuleList, iter], ids=["list", "model", "iterator"])
def test_s7_frozen_layers_between_moving_ones(row: Row, container: Callable[[Any], Any], feed: Feed) -> None:
    layers = [row.build(E, K), row.build(E, K, frozen=True), row.build(E, K)]
    alone = row.build(E, K)
    for layer in (*layers, alone):
        feed(layer, tokens(20))
    update_balancers(container(layers))
    assert torch.equal(layers[0].bias, next_bias(alone))
    assert torch.equal(layers[2].bias, alone.bias)
    assert not layers[1].bias.any()


def test_s7_rank_without_layers_has_nothing_to_do() -> None:
    layer = nn.Linear(2, 2)
    before = layer.weight.detach().clone()
    update_balancers([])
    update_balancers(layer)
    assert torch.equal(layer.weight, before)


@every_bias
@pytest.mark.parametrize("how", ["no_forward", "no_tokens", "all_masked"])
def test_s8_shard_without_tokens_contributes_nothing(row: Row, how: str, feed: Feed) -> None:
    alone, empty, full = row.build(E, K), row.build(E, K), row.build(E, K)
    if how == "no_tokens":
        feed(empty, tokens(0))
    if how == "all_masked":
        feed(empty, tokens(5, seed=1), torch.zeros(5, dtype=torch.bool))
    for each in (alone, full):
        feed(each, tokens(20))
    simulate_ranks([[empty], [full]])
    assert torch.equal(full.bias, next_bias(alone))
    assert torch.equal(empty.bias, alone.bias)


@every_bias
def test_s8_empty_microbatch_changes_nothing(row: Row, feed: Feed) -> None:
    balancer, reference = row.build(E, K), row.build(E, K)
    feed(balancer, tokens(0))
    for each in (balancer, reference):
        feed(each, tokens(20))
    feed(balancer, tokens(5, seed=1), torch.zeros(5, dtype=torch.bool))
    assert torch.equal(next_bias(balancer), next_bias(reference))


@every_gradient
@pytest.mark.parametrize("num_tokens", [0, 6], ids=["no_tokens", "all_masked"])
def test_s8_microbatch_without_valid_tokens_steers_nothing(row: Row, num_tokens: int) -> None:
    balancer = row.build(E, K)
    before = {name: tensor.clone() for name, tensor in tensors(balancer).items()}
    gradient = steered_gradient(balancer, tokens(num_tokens), torch.zeros(num_tokens, dtype=torch.bool))
    assert gradient.shape == (num_tokens, E)
    assert not gradient.any()
    assert all(torch.equal(tensors(balancer)[name], tensor) for name, tensor in before.items())


@every_bias
@pytest.mark.parametrize("how", ["constructor", "attribute"])
def test_s9_no_counter_grows_while_frozen(row: Row, how: str, feed: Feed) -> None:
    balancer = row.build(E, K, frozen=True) if how == "constructor" else row.build(E, K)
    balancer.frozen = True
    before = snapshot(balancer)
    for seed in range(100):
        logits = tokens(4, seed).requires_grad_()
        feed(balancer, logits).weights.sum().backward()
    assert snapshot(balancer) == before


@every_gradient
def test_s9_no_counter_grows_while_off(row: Row) -> None:
    balancer = row.build(E, K).eval()
    before = snapshot(balancer)
    for seed in range(100):
        assert steered_gradient(balancer, tokens(4, seed)).count_nonzero() == 0
    assert snapshot(balancer) == before


@every_bias
@pytest.mark.parametrize("bias", [[0.0] * E, [3.0, 3, 3, -3, 3, 3, 3, -3]], ids=["zero", "uncentred"])
def test_s10_update_without_forward_keeps_the_bias(row: Row, bias: list[float], feed: Feed) -> None:
    balancer = row.build(E, K)
    balancer.bias.copy_(torch.tensor(bias))
    assert next_bias(balancer).tolist() == bias
    feed(balancer, tokens(20))
    moved = next_bias(balancer)
    assert torch.equal(next_bias(balancer), moved)
    assert moved.tolist() != bias


@every_gradient
def test_s10_update_without_forward_leaves_the_next_gradient(row: Row) -> None:
    balancer = row.build(E, K)
    fresh = snapshot(balancer)
    update_balancers([balancer])
    assert snapshot(balancer) == fresh
    expected = steered_gradient(row.build(E, K), tokens(20))
    assert torch.equal(steered_gradient(balancer, tokens(20)), expected)


@every_gradient
def test_s11_teacher_does_not_steer(row: Row) -> None:
    teacher, student = row.build(E, K).eval(), row.build(E, K)
    before = snapshot(teacher)
    assert not steered_gradient(teacher, tokens(20)).any()
    assert steered_gradient(student, tokens(20)).any()
    update_balancers([teacher, student])
    assert snapshot(teacher) == before


@every_bias
@pytest.mark.parametrize("how", ["frozen", "eval"])
def test_s11_teacher_neither_observes_nor_updates(row: Row, how: str, feed: Feed) -> None:
    teacher, student = row.build(E, K), row.build(E, K)
    teacher.bias.copy_(torch.linspace(-1, 2, E))
    if how == "frozen":
        teacher.frozen = True
    else:
        teacher.eval()
    before = snapshot(teacher)
    for each in (teacher, student):
        feed(each, tokens(20))
    assert teacher.tally is None
    update_balancers([teacher, student])
    assert snapshot(teacher) == before
    assert student.bias.any()


@every_bias
def test_freezing_in_the_middle_of_a_step_drops_what_was_seen(row: Row, feed: Feed) -> None:
    balancer, reference = row.build(E, K), row.build(E, K)
    feed(balancer, tokens(20, seed=1))
    balancer.frozen = True
    assert not next_bias(balancer).any()
    balancer.frozen = False
    for each in (balancer, reference):
        feed(each, tokens(20))
    assert torch.equal(next_bias(balancer), next_bias(reference))


@every_bias
def test_observe_counts_what_no_tally_has_counted(row: Row, feed: Feed) -> None:
    fused, alone, foreign = row.build(E, K), row.build(E, K), row.build(E, K)
    other = row.build(E, K)
    logits = tokens(20)
    feed(fused, logits)
    alone.observe(route(logits, alone.bias, K))
    foreign.observe(route(logits, foreign.bias, K, tally=other.tally))
    expected = next_bias(fused)
    assert torch.equal(next_bias(alone), expected)
    assert torch.equal(next_bias(foreign), expected)


@every_bias
def test_e1_target_that_is_no_integer(row: Row, feed: Feed) -> None:
    balancer = row.build(8, 2)
    feed(balancer, tokens(10))
    assert next_bias(balancer).isfinite().all()
    assert balancer.bias.unique().numel() > 1


@every_balancer
def test_e2_no_cutoff_is_an_error_with_both_numbers(row: Row) -> None:
    for num_experts, top_k in [(8, 8), (4, 6), (8, 0), (8, -1), (1, 1)]:
        with pytest.raises(ValueError, match=rf"top_k={top_k} and num_experts={num_experts}"):
            row.build(num_experts, top_k)


@every_bias
def test_e3_wide_bias_clamps_no_margin(row: Row, feed: Feed) -> None:
    balancer = row.build(4, 2)
    balancer.bias.copy_(torch.tensor([3.0, 3.0, 3.0, -3.0]))
    # saturated scores reach both ends of the range
    feed(balancer, torch.cat([tokens(30, num_experts=4), 400 * tokens(30, 1, num_experts=4)]))
    assert next_bias(balancer).isfinite().all()
    assert balancer.diagnostics().get("clamped_share", torch.tensor(0.0)) == 0.0


DEGENERATE = {
    "all_equal": torch.zeros(24, 5),
    "one_expert": torch.tensor([9.0, 0, 0, 0, 0]).repeat(24, 1),
    "one_token": torch.tensor([[0.3, -0.2, 0.1, 0.5, -0.9]]),
    "saturated": torch.tensor([1e4, 1e4, -1e4, -1e4, -1e4]).repeat(24, 1),
    "saturated_apart": 1e4 * (2 * torch.eye(5) - 1).repeat(5, 1),
    "all_zero_scores": torch.full((24, 5), -3e38),
    "all_one_scores": torch.full((24, 5), 3e38),
}
every_degenerate = pytest.mark.parametrize("kind", DEGENERATE)


@every_bias
@every_degenerate
def test_e7_degenerate_scores_give_a_finite_bias(row: Row, kind: str, feed: Feed) -> None:
    balancer = row.build(5, 2)
    for _step in range(3):
        routing = feed(balancer, DEGENERATE[kind])
        assert next_bias(balancer).isfinite().all()
    assert routing.load.sum() == 2 * len(DEGENERATE[kind])


@every_bias
def test_e7_logits_whose_margins_overflow_leave_a_finite_bias(row: Row, feed: Feed) -> None:
    balancer = row.build(5, 2)
    selection = "score" if balancer.needs_bounded_scores else "logit"
    feed(balancer, torch.tensor([[3e38, 1e38, -3e38, -3e38, -3e38]] * 4), selection=selection)
    assert next_bias(balancer).isfinite().all()


@every_gradient
@every_degenerate
def test_e7_degenerate_scores_give_a_finite_gradient(row: Row, kind: str) -> None:
    logits = DEGENERATE[kind]
    pairs = logits.repeat_interleave(2, 0)
    balancer = row.build(5, 2)
    assert steered_gradient(balancer, pairs).isfinite().all()
    assert balancer.last_value is None or balancer.last_value.isfinite()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build_cast(row: Row, how: str) -> Any:
    """A balancer with something half-precise about its model."""
    if how == "built_under_bf16":
        with default_dtype(torch.bfloat16):
            return row.build(E, K)
    model = nn.ModuleList([row.build(E, K)])
    return {"bf16": model.bfloat16, "half": model.half, "to_bf16": lambda: model.to(torch.bfloat16)}[how]()[0]


every_cast = pytest.mark.parametrize("how", ["to_bf16", "bf16", "half", "built_under_bf16"])


@every_bias
@every_cast
def test_e9_bias_is_fp32_whatever_the_model_is(row: Row, how: str, feed: Feed) -> None:
    balancer, reference = build_cast(row, how), row.build(E, K)
    start = torch.linspace(-0.5, 0.5, E)
    for each in (balancer, reference):
        each.bias.copy_(start)
        feed(each, tokens(20))
    assert all(tensor.dtype == tensors(reference)[name].dtype for name, tensor in tensors(balancer).items())
    assert torch.equal(next_bias(balancer), next_bias(reference))
    assert balancer.bias.dtype == torch.float32


@every_bias
@every_cast
def test_e9_a_small_move_is_not_rounded_away(row: Row, how: str) -> None:
    balancer = build_cast(row, how)
    balancer.bias.fill_(0.5)
    balancer.ema, balancer.centre = 0.0, False
    balancer.adopt(torch.full((E,), 0.501))
    torch.testing.assert_close(balancer.bias, torch.full((E,), 0.501), rtol=0, atol=1e-7)


@every_bias
@pytest.mark.parametrize("assign", [True, False])
def test_e9_loading_a_bf16_bias_keeps_fp32(row: Row, assign: bool) -> None:
    balancer = row.build(E, K)
    saved = torch.linspace(-1, 1, E).bfloat16()
    balancer.load_state_dict({"bias": saved}, assign=assign)
    assert balancer.bias.dtype == torch.float32
    assert torch.equal(balancer.bias, saved.float())


@every_bias
def test_e9_whole_step_under_default_bf16(row: Row, feed: Feed) -> None:
    balancer, reference = row.build(E, K), row.build(E, K)
    feed(reference, tokens(20))
    expected = next_bias(reference)
    logits = tokens(20)
    with default_dtype(torch.bfloat16):
        feed(balancer, logits)
        update_balancers([balancer])
    assert torch.equal(balancer.bias, expected)


@every_gradient
def test_e9_steering_under_default_bf16(row: Row) -> None:
    logits = tokens(20)
    expected = steered_gradient(row.build(E, K), logits)
    with default_dtype(torch.bfloat16):
        balancer = row.build(E, K)
        assert torch.equal(steered_gradient(balancer.bfloat16(), logits), expected)


@every_balancer
def test_e10_meta_device_then_to_empty(row: Row, feed: Feed) -> None:
    with torch.device("meta"):
        model: Any = nn.ModuleList([row.build(E, K)])
    balancer, reference = model.to_empty(device="cpu")[0], row.build(E, K)
    for tensor in tensors(balancer).values():
        # what uninitialised memory may hold
        tensor.fill_(-7)
    balancer.reset_parameters()
    assert snapshot(balancer) == snapshot(reference)
    for each in (balancer, reference):
        observe_once(each, feed, tokens(20))
    assert snapshot(balancer) == snapshot(reference)
    update_balancers([balancer, reference])
    assert snapshot(balancer) == snapshot(reference)


@every_bias
def test_e11_resume_gives_the_same_bits(row: Row, feed: Feed) -> None:
    balancer = row.build(E, K)
    feed(balancer, tokens(20))
    update_balancers([balancer])
    saved = copy.deepcopy(nn.ModuleList([balancer]).state_dict())
    assert list(saved) == ["0.bias"]
    resumed: Any = nn.ModuleList([row.build(E, K)])
    resumed.load_state_dict(saved)
    for each in (balancer, resumed[0]):
        feed(each, tokens(20, seed=1))
    assert torch.equal(next_bias(resumed[0]), next_bias(balancer))


@every_bias
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_e11_checkpoint_without_bias_is_an_error(row: Row, strict: bool, nested: bool) -> None:
    balancer = row.build(E, K)
    model = nn.ModuleDict({"layer": nn.ModuleDict({"balancer": balancer})}) if nested else balancer
    name = "layer.balancer.bias" if nested else "bias"
    with pytest.raises(RuntimeError, match=rf"no selection bias {name}"):
        model.load_state_dict({}, strict=strict)


@every_gradient
def test_e11_gradient_balancers_save_nothing(row: Row) -> None:
    balancer = row.build(E, K)
    steered_gradient(balancer, tokens(8))
    assert not balancer.state_dict()
    balancer.load_state_dict({})


@every_balancer
def test_only_the_bias_is_a_buffer(row: Row, feed: Feed) -> None:
    """DDP overwrites the buffers of all ranks with those of rank 0 before a forward; counts of a rank must survive."""
    balancer = row.build(E, K)
    observe_once(balancer, feed, tokens(20))
    assert [name for name, _ in balancer.named_buffers()] == (["bias"] if isinstance(balancer, BiasBalancer) else [])


@every_bias
def test_e12_same_experts_in_train_and_eval(row: Row, feed: Feed) -> None:
    balancer = row.build(E, K)
    balancer.bias.copy_(torch.linspace(1, -1, E))
    logits = tokens(20)
    trained = feed(balancer, logits)
    with torch.no_grad():
        evaluated = feed(balancer.eval(), logits)
    assert torch.equal(trained.experts, evaluated.experts)
    assert torch.equal(trained.weights, evaluated.weights)
    assert not torch.equal(trained.experts, route(logits, None, K).experts)


@every_gradient
def test_e12_gradient_balancer_routes_alike_in_train_and_eval(row: Row) -> None:
    balancer = row.build(E, K)
    logits = tokens(20).requires_grad_()
    trained = steer(balancer, logits)
    with torch.no_grad():
        evaluated = steer(balancer.eval(), logits)
    assert torch.equal(trained.experts, evaluated.experts)
    assert torch.equal(trained.weights, evaluated.weights)


@every_bias
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_e13_bad_row_raises_before_anything_is_counted(row: Row, value: float, feed: Feed) -> None:
    balancer = row.build(E, K)
    feed(balancer, tokens(20))
    before = snapshot(balancer)
    logits = tokens(5000)
    logits[4900, 3] = value
    with pytest.raises(ValueError, match="NaN or infinity in 1 of 5000 tokens"):
        feed(balancer, logits)
    assert snapshot(balancer) == before


@every_gradient
def test_e13_bad_row_raises_before_anything_is_steered(row: Row) -> None:
    balancer = row.build(E, K)
    steered_gradient(balancer, tokens(20))
    before = snapshot(balancer)
    logits = tokens(20)
    logits[7, 3] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinity in 1 of 20 tokens"):
        steered_gradient(balancer, logits)
    assert snapshot(balancer) == before


@every_balancer
def test_e14_addresses_stay_over_update_and_reset(row: Row, feed: Feed) -> None:
    balancer = row.build(E, K)
    if isinstance(balancer, BiasBalancer):
        # two microbatches of 20 tokens a step
        balancer.reserve(40)
    held = {name for name in tensors(balancer) if not name.endswith(("last_value", "pooled_load"))}
    before = {name: tensors(balancer)[name].data_ptr() for name in held}
    assert ("bias" in held) == isinstance(balancer, BiasBalancer)
    for _step in range(3):
        for _microbatch in range(2):
            observe_once(balancer, feed, tokens(20))
        balancer.reset()
        for _microbatch in range(2):
            observe_once(balancer, feed, tokens(20))
        update_balancers([balancer])
    assert {name: tensors(balancer)[name].data_ptr() for name in held} == before


@gshards
def test_g5_layers_are_never_pooled(row: Row) -> None:
    # K=1 of 2 experts, each layer collapsed on another expert
    layers = [row.build(2, 1), row.build(2, 1)]
    for layer, favourite in zip(layers, (0, 1), strict=True):
        logits = torch.full((8, 2), -40.0, dtype=torch.float64)
        logits[:, favourite] = 40.0
        steer(layer, logits.requires_grad_())
    assert [layer.last_value.item() for layer in layers] == pytest.approx([2.0, 2.0], rel=1e-12)


def balanced(num_sequences: int, num_experts: int = 8) -> Tensor:
    """Logits whose top 2 are a balanced load within every sequence."""
    first = torch.arange(num_experts)
    logits = torch.zeros(num_experts, num_experts)
    logits[first, first] = 2.0
    logits[first, (first + 1) % num_experts] = 1.0
    return logits.repeat(num_sequences, 1)


@gshards
@pytest.mark.parametrize("underflow", [0.0, 57.6, 200.0], ids=["plain", "scores_1e-25", "scores_zero"])
def test_g6_g7_balanced_loss_is_the_coefficient(row: Row, underflow: float) -> None:
    balancer = row.build(8, 2)
    # picked by logit, so that the load is balanced even where every score is zero
    logits = (balanced(2) - underflow).requires_grad_()
    routing = balancer.steer(route(logits, None, 2, selection="logit", num_sequences=2))
    assert routing.load.tolist() == [4] * 8
    assert balancer.last_value == 1.0
    if underflow:
        assert routing.scores.max() < 1e-24


@every_bias
def test_g9_weights_are_unbiased_and_the_bias_has_no_gradient(row: Row, feed: Feed) -> None:
    balancer = row.build(E, K)
    balancer.bias.copy_(torch.linspace(1, -1, E))
    logits = tokens(20).requires_grad_()
    routing = feed(balancer, logits)
    assert torch.equal(routing.weights, routing.scores.gather(1, routing.experts))
    routing.weights.sum().backward()
    assert not list(balancer.parameters())
    assert not balancer.bias.requires_grad
    assert balancer.bias.grad is None


@every_gradient
def test_g9_weights_are_unbiased_under_a_gradient_balancer(row: Row) -> None:
    balancer = row.build(E, K)
    logits = tokens(20).requires_grad_()
    bias = torch.linspace(1, -1, E).requires_grad_()
    routing = balancer.steer(route(logits, bias, K, num_sequences=2))
    assert not torch.equal(routing.experts, route(logits, None, K).experts)
    assert torch.equal(routing.weights, routing.scores.gather(1, routing.experts))
    routing.weights.sum().backward()
    assert bias.grad is None
    assert not list(balancer.parameters())


def model_loss(routing: Routing) -> Tensor:
    """A loss that every weight enters, as the language-model loss does."""
    values = torch.linspace(-1, 1, E)[routing.experts]
    return (routing.weights * values).sum(-1).square().mean()


@every_gradient
def test_g10_logged_loss_is_the_same_with_and_without(row: Row) -> None:
    balancer = row.build(E, K)
    # GShard's weight, and LEI's
    balancer.coefficient = balancer.eta = 1.0
    losses, gradients = [], []
    for slot in (None, balancer):
        logits = tokens(22).requires_grad_()
        routing = route(logits, None, K, num_sequences=2)
        losses.append(model_loss(routing if slot is None else slot.steer(routing)))
        losses[-1].backward()
        gradients.append(logits.grad)
    assert torch.equal(*losses)
    assert not torch.equal(*gradients)


def test_g10_logged_loss_does_not_contain_the_z_loss() -> None:
    losses, gradients = [], []
    for coefficient in (0.0, 1.0):
        logits = tokens(22).requires_grad_()
        penalty = coefficient * logits.logsumexp(-1).square().mean()
        losses.append(model_loss(route(logits, None, K).steered(penalty=penalty)))
        losses[-1].backward()
        gradients.append(logits.grad)
    assert torch.equal(*losses)
    assert not torch.equal(*gradients)


@every_gradient
@pytest.mark.parametrize("normalise", [True, False])
def test_steering_leaves_the_forward_bits_alone(row: Row, normalise: bool) -> None:
    logits = tokens(20).requires_grad_()
    bias = torch.linspace(0.3, -0.3, E)
    plain = route(logits, bias, K, normalise=normalise, num_sequences=2)
    steered = row.build(E, K).steer(plain)
    for name in ("experts", "weights", "cutoff", "load"):
        assert torch.equal(getattr(steered, name), getattr(plain, name)), name


@every_gradient
def test_g8_router_gradient_is_not_zero(row: Row) -> None:
    # 22 * K / E is no integer, so no expert is exactly balanced
    assert (steered_gradient(row.build(E, K), tokens(22)).abs().sum(0) > 0).all()


@every_balancer
def test_g12_expert_without_tokens_leaves_everything_finite(row: Row, feed: Feed) -> None:
    balancer = row.build(E, K)
    logits = tokens(20)
    logits[:, 3] = -90
    logits.requires_grad_()
    routing = feed(balancer, logits) if isinstance(balancer, BiasBalancer) else steer(balancer, logits)
    assert routing.load[3] == 0
    routing.weights.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    update_balancers([balancer])
    assert all(tensor.isfinite().all() for name, tensor in tensors(balancer).items() if "buffer" not in name)
    for metric in (max_violation, dead_share, load_cv, load_entropy):
        assert metric(routing.load).isfinite()
    assert dead_share(routing.load) == 1 / E
    assert intervention_rate(routing) == 0


# forced routing


def forced(logits: Tensor) -> Routing:
    """Round-robin, whatever the scores."""
    experts = torch.arange(len(logits) * K).view(-1, K) % E
    return replay(logits, experts, num_sequences=2)


@every_bias
def test_forced_routing_freezes_the_bias_and_says_so(row: Row, feed: Feed) -> None:
    balancer, reference = row.build(E, K), row.build(E, K)
    with pytest.warns(UserWarning, match=f"{type(balancer).__name__} is frozen while routing is forced"):
        balancer.observe(forced(tokens(20, seed=1)))
    # once: a second warning would be an error
    with warnings.catch_warnings(action="error"):
        balancer.observe(forced(tokens(20, seed=1)))
    assert not next_bias(balancer).any()
    # a forced microbatch among others
    for each in (balancer, reference):
        feed(each, tokens(20))
    balancer.observe(forced(tokens(20, seed=1)))
    assert torch.equal(next_bias(balancer), next_bias(reference))
    assert balancer.bias.any()


@every_bias
@pytest.mark.parametrize("how", ["frozen", "eval", "no_grad"])
def test_forced_routing_is_silent_where_nothing_counts(row: Row, how: str, recwarn: pytest.WarningsRecorder) -> None:
    balancer = row.build(E, K).train(how != "eval")
    balancer.frozen = how == "frozen"
    with torch.set_grad_enabled(how != "no_grad"):
        balancer.observe(forced(tokens(20)))
    assert not recwarn


def test_quantiles_need_dropless_experts() -> None:
    for row in BIAS:
        assert row.build(E, K).needs_dropless == ("qb" in row.name), row.name


@every_gradient
def test_forced_routing_is_not_steered(row: Row) -> None:
    balancer, reference = row.build(E, K), row.build(E, K)
    routing = forced(tokens(20, seed=1).requires_grad_())
    with pytest.warns(UserWarning, match=f"{type(balancer).__name__} is frozen while routing is forced"):
        balancer.steer(routing)
    # once: a second warning would be an error
    with warnings.catch_warnings(action="error"):
        assert balancer.steer(routing) is routing
    assert balancer.last_value is None
    assert torch.equal(*[steered_gradient(each, tokens(20)) for each in (balancer, reference)])


@every_balancer
def test_forced_routing_of_other_sizes_is_refused(row: Row) -> None:
    balancer = row.build(E, K)
    take = balancer.observe if isinstance(balancer, BiasBalancer) else balancer.steer
    with pytest.raises(ValueError, match="got a routing over num_experts=8 with top_k=3"):
        take(replay(tokens(4), torch.arange(12).view(4, 3) % E))


# models and ranks


@every_balancer
def test_replaced_balancer_is_the_one_that_acts(row: Row) -> None:
    torch.manual_seed(0)
    slot = "bias" if row in BIAS else "gradient"
    old, new = row.build(E, K), row.build(E, K)
    router = Router(6, E, K, **{slot: old})
    nn.init.normal_(router.weight)
    model = nn.ModuleDict({"router": router})
    setattr(router, slot, new)
    before, fresh = snapshot(old), snapshot(new)
    router(torch.randn(20, 6), num_sequences=2).weights.sum().backward()
    assert snapshot(new) != fresh
    update_balancers(model)
    assert snapshot(old) == before
    assert slot == "gradient" or new.bias.any()


def other_ranks(mine: Any, theirs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """``check_replicas`` on the first rank of a group of the ranks 4, 5 and so on, of which ``theirs`` are the rest."""

    def gather(described: list[Any], own: Any, group: object) -> None:
        described[:] = [own, *([_describe(balancer) for balancer in layers] for layers in theirs)]

    ranks = list(range(4, 5 + len(theirs)))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group: len(ranks))
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: ranks)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    check_replicas(mine, "a group")  # type: ignore[arg-type]


@every_balancer
def test_replicas_that_agree_pass(row: Row, feed: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [row.build(E, K), row.build(E, K)]
    other = copy.deepcopy(layers)
    check_replicas(layers)
    # what a rank has seen is its own
    observe_once(other[0], feed, tokens(20))
    if isinstance(other[0], GradientBalancer):
        other[0].loss_scale = 0.25
    other_ranks(layers, [layers, other], monkeypatch)


@every_balancer
def test_replicas_that_differ_are_an_error(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [row.build(E, K), row.build(E, K)]
    name = type(layers[0]).__name__
    different: list[tuple[list[Any], str]] = [
        (layers[:1], r"got number of balancers 2 on rank 4 and 1 on ranks \[6\]"),
        (
            [layers[0], of_another_class(name)(E, K)],
            rf"got balancer 1: class .*{name} on rank 4 and .*Other{name} on ranks \[6\]",
        ),
        ([row.build(E, K), row.build(E + 1, K)], r"got balancer 1: num_experts 8 on rank 4 and 9 on ranks \[6\]"),
        ([row.build(E, K), row.build(E, K + 1)], r"got balancer 1: top_k 2 on rank 4 and 3 on ranks \[6\]"),
    ]
    if isinstance(layers[0], BiasBalancer):
        frozen, moved = copy.deepcopy(layers), copy.deepcopy(layers)
        frozen[1].frozen = True
        # the least difference
        moved[0].bias[3] = -0.0
        different.append((frozen, r"got balancer 1: frozen False on rank 4 and True on ranks \[6\]"))
        different.append((moved, r"got balancer 0: bias \w+ on rank 4 and \w+ on ranks \[6\]"))
    if isinstance(layers[0], HistogramQB):
        # an option that only a shape tells
        finer = [row.build(E, K), row.build(E, K, num_bins=50)]
        different.append((finer, r"got balancer 1: counts \(8, \d+\) on rank 4 and \(8, 50\) on ranks \[6\]"))
    for replica, message in different:
        with pytest.raises(ValueError, match=message):
            other_ranks(layers, [layers, replica], monkeypatch)


def of_another_class(name: str) -> Any:
    """Another class of the same settings."""
    known: list[Any] = [SignedCount, RankAveragedQB, HistogramQB, ExactQB, GShard, LEI]
    (kind,) = [each for each in known if each.__name__ == name]
    return type(f"Other{name}", (kind,), {})


# the Triton kernels


@every_bias
@pytest.mark.parametrize("microbatches", [1, 3])
def test_triton_kernels_give_the_same_next_bias(
    row: Row, microbatches: int, feed: Feed, monkeypatch: pytest.MonkeyPatch, interpreter: None
) -> None:
    # margins of logits have the same bits on both paths; those of scores differ in the last place
    bounded = row.build(E, K).needs_bounded_scores
    results = []
    for kernels in ("torch", "triton"):
        monkeypatch.setenv("EQUIPOISE_KERNELS", kernels)
        balancer = row.build(E, K)
        for step in range(2):
            for index in range(microbatches):
                logits, valid = tokens(40, seed=step), torch.arange(40) % 7 != 3
                # the last one is padding alone
                valid &= index < max(1, microbatches - 1)
                feed(balancer, logits, valid, selection="score" if bounded else "logit")
            update_balancers([balancer])
        assert balancer.bias.any()
        results.append(balancer.bias)
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-5 if bounded else 0)


@every_gradient
@pytest.mark.parametrize("masked", [False, True])
def test_triton_kernels_give_the_same_gradient(
    row: Row, masked: bool, monkeypatch: pytest.MonkeyPatch, interpreter: None
) -> None:
    valid = torch.arange(40) % 7 != 3 if masked else None
    gradients = []
    for kernels in ("torch", "triton"):
        monkeypatch.setenv("EQUIPOISE_KERNELS", kernels)
        gradients.append(steered_gradient(row.build(E, K), tokens(40), valid))
    assert gradients[0].any()
    torch.testing.assert_close(gradients[1], gradients[0])


@every_bias
def test_triton_kernels_report_and_leave_out_infinite_logits(
    row: Row, feed: Feed, monkeypatch: pytest.MonkeyPatch, interpreter: None
) -> None:
    """Like a masked token, but counted in ``uncounted``."""
    monkeypatch.setenv("EQUIPOISE_KERNELS", "triton")
    broken, masked = row.build(E, K), row.build(E, K)
    logits = tokens(40)
    selection = "score" if broken.needs_bounded_scores else "logit"
    feed(masked, logits, torch.arange(40) != 17, selection=selection)
    logits[17, 2] = float("nan")
    assert int(feed(broken, logits, selection=selection).uncounted) == 1
    for balancer in (broken, masked):
        update_balancers([balancer])
    assert torch.equal(broken.bias, masked.bias)
    assert broken.bias.any()
