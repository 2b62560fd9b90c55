import numpy as np
import pytest
import torch

from equipoise.balancers import BiasBalancer, ExactQB, SignedCount, max_violation
from equipoise.experiments.replay import plan, study
from equipoise.experiments.replay.streams import Stream, SyntheticStream
from equipoise.kernels import route

E, K, T, L = 8, 2, 512, 2
SYNTHETIC = {"_target_": "equipoise.experiments.replay.streams.SyntheticStream", "rank_skew": 0.5}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def estimator(name, **options):
    return {"_target_": f"equipoise.balancers.{name}", **options}


def config(**changes):
    return {
        "mode": "online",
        "steps": 3,
        "seeds": [0],
        "ranks": [1, 4],
        "microbatches": [1],
        "layers": L,
        "tokens": T,
        "num_experts": E,
        "top_k": K,
        "gate": "sigmoid",
        "selection": "score",
        "streams": {"skewed": SYNTHETIC},
        "estimators": {"eqb": estimator("ExactQB")},
    } | changes


def outcomes_of(**changes):
    """By estimator, ranks and microbatches."""
    given = config(**changes)
    outcomes = study.run_rows(given, plan.check(given), lambda row: None)
    return {(outcome.row.estimator, outcome.row.ranks, outcome.row.microbatches): outcome for outcome in outcomes}


def column(outcome, name):
    return [record[name] for record in outcome.records]


def test_rows_are_all_combinations_in_order():
    rows = plan.check(config(seeds=[3, 1], microbatches=[1, 2], estimators={"b": estimator("ExactQB")}))
    assert [row.label for row in rows] == [
        f"skewed-s{seed} b on {ranks}x{microbatches}" for seed in (3, 1) for ranks in (1, 4) for microbatches in (1, 2)
    ]


def test_bytes_rounds_and_memory():
    estimators = {
        "signed": estimator("SignedCount"),
        "average": estimator("RankAveragedQB", per="step"),
        "histogram": estimator("HistogramQB", num_bins=30),
        "bf16": estimator("ExactQB"),
        "fp32": estimator("ExactQB", key="fp32"),
    }
    found = outcomes_of(estimators=estimators, ranks=[4], microbatches=[2])
    costs = {
        name: {key: column(found[name, 4, 2], key) for key in ("bytes", "rounds", "memory")} for name in estimators
    }
    margins = T // 4 * E
    expected = {
        "signed": (4 * E, 1, 4 * E),
        "average": (4 * (E + 1), 1, 4 * margins),
        "histogram": (4 * E * 31, 1, 4 * E * 31),
        "bf16": (2 * E * 256 * 4, 2, 2 * margins),
        "fp32": (4 * E * 256 * 4, 4, 4 * margins),
    }
    for name, (num_bytes, rounds, memory) in expected.items():
        assert costs[name]["bytes"] == [num_bytes] * 3 * L
        assert costs[name]["rounds"] == [rounds] * 3 * L
        # beside it a few counters
        assert all(memory <= value <= memory + 8 * (E + 2) for value in costs[name]["memory"])
    assert all(value > 0 for value in column(found["bf16", 4, 2], "seconds"))


def test_error_against_the_truth():
    estimators = {"fp32": estimator("ExactQB", key="fp32"), "average": estimator("RankAveragedQB", per="step")}
    found = outcomes_of(estimators=estimators)
    for row, low, high in ((("fp32", 4, 1), 0, 1e-6), (("average", 1, 1), 0, 1e-6), (("average", 4, 1), 1e-3, 1)):
        errors = np.array([column(found[row], "error_max"), column(found[row], "error_mean")])
        assert (errors > low).all()
        assert (errors < high).all()
        assert (errors[0] > errors[1]).all()
    assert all(0.001 < noise < 0.2 for noise in column(found["fp32", 4, 1], "noise"))


def test_spread_over_partitions():
    estimators = {"eqb": estimator("ExactQB"), "average": estimator("RankAveragedQB", per="microbatch")}
    found = outcomes_of(estimators=estimators, ranks=[1, 2], microbatches=[1, 2])
    partitions = [(1, 1), (1, 2), (2, 1), (2, 2)]
    ways = np.stack([np.stack(found["average", *partition].biases) for partition in partitions])
    spread = (ways.max(0).astype(np.float64) - ways.min(0)).max(-1).flatten()
    assert (spread > 0.005).all()
    for partition in partitions:
        assert column(found["eqb", *partition], "spread") == [0.0] * 3 * L
        assert column(found["average", *partition], "spread") == spread.tolist()
    # two parts are two parts, on ranks or in turn
    assert np.array_equal(ways[1], ways[2])


def test_loads_before_and_after():
    outcome = outcomes_of()["eqb", 4, 1]
    stream = SyntheticStream(plan.open_stream(config(), "skewed", 0).sizes, 0, rank_skew=0.5)
    biases = [np.zeros((L, E), dtype=np.float32), *outcome.biases]
    for record in outcome.records:
        step, layer = record["step"], record["layer"]

        def violation(batch, bias, layer=layer):
            load = route(stream.batch(batch)[layer], torch.from_numpy(biases[bias][layer]), K).load
            return max_violation(load).item()

        assert record["maxvio_before"] == violation(step, step - 1)
        assert record["maxvio_same"] == violation(step, step)
        assert record["maxvio_next"] == violation(step + 1, step)
        assert record["moved"] == np.abs(biases[step][layer] - biases[step - 1][layer]).max()
    assert len({record["maxvio_next"] for record in outcome.records}) > 3


def test_batches_that_do_not_fit_into_memory_are_made_anew(monkeypatch):
    kept = outcomes_of()["eqb", 1, 1]
    made = []
    batch = SyntheticStream.batch
    monkeypatch.setattr(SyntheticStream, "batch", lambda self, step: made.append(step) or batch(self, step))
    monkeypatch.setattr(study, "CACHE_BYTES", 1)
    found = outcomes_of()
    assert made == [1, 2, 3, 4, 1, 2, 3]
    assert np.array_equal(found["eqb", 1, 1].biases, kept.biases)
    monkeypatch.undo()


def test_candidates_give_the_bits_of_all_margins_and_say_when_they_fell_back():
    estimators = {
        "eqb": estimator("ExactQB"),
        "cut": estimator("ExactQB", candidates="cut", fallback="observe"),
        "window": estimator("ExactQB", candidates="window", fallback="observe"),
    }
    found = outcomes_of(estimators=estimators, steps=4)
    for name, rounds in (("cut", 2), ("window", 1)):
        assert np.array_equal(found[name, 4, 1].biases, found["eqb", 4, 1].biases)
        fallback = column(found[name, 4, 1], "fallback_share")
        # the first cuts and windows are around a bias of zero
        assert 0 < max(fallback[:L]) <= 1
        assert all(0 < share < 1 for share in column(found[name, 4, 1], "candidate_share"))
        # the first round of the candidates shows that they do not suffice, then come two over all margins
        assert column(found[name, 4, 1], "rounds") == [3 if share else rounds for share in fallback]
        assert min(fallback) == 0
    assert np.isnan(column(found["eqb", 4, 1], "fallback_share")).all()


def test_a_frozen_batch_is_iterated_until_the_bias_rests():
    estimators = {"coarse": estimator("HistogramQB", num_bins=4), "signed": estimator("SignedCount", rate=0.01)}
    found = outcomes_of(mode="frozen", steps=60, estimators=estimators, layers=1)
    rested = found["coarse", 4, 1]
    assert rested.note == f"converged after {len(rested.records) - 1} steps"
    assert len(rested.records) < 60
    assert [record["moved"] == 0 for record in rested.records].index(True) == len(rested.records) - 1
    assert len(found["signed", 4, 1].records) == 60
    assert found["signed", 4, 1].note.startswith("not converged in 60 steps")
    # the next batch is this batch
    assert column(rested, "maxvio_next") == column(rested, "maxvio_same")


class Broken(SignedCount):
    def solve(self):
        raise RuntimeError("no solution")
        yield


class Flip(BiasBalancer):
    """Two biases in turn."""

    def accumulate(self, routing):
        pass

    def solve(self):
        return -self.bias if self.bias.any() else torch.eye(E)[0]
        yield


def test_a_cycle_is_named_and_a_row_that_fails_does_not_stop_the_others(monkeypatch):
    monkeypatch.setattr("equipoise.balancers.Broken", Broken, raising=False)
    monkeypatch.setattr("equipoise.balancers.Flip", Flip, raising=False)
    estimators = {"broken": estimator("Broken"), "flip": estimator("Flip")}
    found = outcomes_of(mode="frozen", steps=5, estimators=estimators)
    assert found["broken", 1, 1].failed
    assert found["broken", 1, 1].note == "RuntimeError: no solution"
    assert not found["broken", 1, 1].records
    assert found["flip", 4, 1].note == "not converged in 5 steps: a cycle of 2"
    assert not found["flip", 4, 1].failed


class Short(Stream):
    """Two steps, whatever the seed."""

    seeded = False
    num_steps = 2

    def __init__(self, sizes, seed):
        self.sizes = sizes
        self.source = SyntheticStream(sizes, 0)

    def batch(self, step):
        assert step <= 2
        return self.source.batch(step)


def test_a_stream_that_ends_and_knows_no_seeds(monkeypatch):
    monkeypatch.setattr("equipoise.experiments.replay.streams.Short", Short, raising=False)
    short = {"_target_": "equipoise.experiments.replay.streams.Short"}
    assert {row.seed for row in plan.check(config(streams={"short": short}, seeds=[5, 6]))} == {5}
    outcome = outcomes_of(streams={"short": short})["eqb", 1, 1]
    assert column(outcome, "step") == [1, 1, 2, 2]
    assert np.isnan(column(outcome, "maxvio_next")).tolist() == [False, False, True, True]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mode": "still"}, "mode must be one of online, frozen, got 'still'"),
        ({"steps": 0}, "steps must be a positive whole number, got 0"),
        ({"seeds": []}, r"seeds must be a list with at least one number, got \[\]"),
        ({"ranks": 4}, "ranks must be a list with at least one number, got 4"),
        ({"ranks": [2, 0]}, "ranks must be a positive whole number, got 0"),
        ({"seeds": [1, 1]}, r"seeds must name each number once, got \[1, 1\]"),
        ({"ranks": [3]}, "ranks .* must divide the tokens of a step, got 3 . 1 and 512 tokens in the stream 'skewed'"),
        ({"microbatches": [256], "ranks": [4]}, "got 4 . 256 and 512"),
        ({"streams": {}}, "streams is empty"),
        ({"estimators": {}}, "estimators is empty"),
        ({"estimators": {"x": estimator("HistogramQB", num_bins=0)}}, "estimators.x: num_bins must be at least 1"),
        ({"estimators": {"x": estimator("LEI")}}, "estimators.x: expected a bias balancer, got LEI"),
        ({"streams": {"x": SYNTHETIC | {"noise": -1}}}, "streams.x: noise must be"),
    ],
)
def test_wrong_configs(changes, text):
    with pytest.raises(ValueError, match=text):
        plan.check(config(**changes))


def test_state_bytes_counts_what_a_balancer_holds_and_its_parts():
    balancer = ExactQB(E, K)
    before = study.state_bytes(balancer)
    balancer.reserve(10)
    assert study.state_bytes(balancer) - before == 10 * E * 2
