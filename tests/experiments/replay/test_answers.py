"""What is read off the rows: the window, means over seeds, the sentences; on rows whose answers are known."""

import doctest
import importlib.util
import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest

from equipoise.experiments.replay import answers, marks, table
from equipoise.experiments.replay.answers import Facts
from equipoise.experiments.report import base

SKEWED = Facts(num_experts=64, skewed=["rank_skew"])
# the mean over three seeds of what seed s has s per cent more of
MEAN = 1.01


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fake_steps = load("fake_steps").fake_steps


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    return fake_steps()


@pytest.mark.parametrize("module", [answers, marks, table, base], ids=lambda module: module.__name__)
def test_doctests(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0 or module is answers
    assert result.failed == 0


def test_means_leave_out_the_first_third_of_the_steps(frame: pd.DataFrame) -> None:
    found = table.make_table(frame).set_index(table.ROW)
    # the first three steps are a hundred times as far off
    row = found.loc[("rank_skew", "rank_averaged_qb", 64, 1)]
    errors = [0.01 * 6.9 * (1 + 0.01 * seed) for seed in range(3)]
    assert row["error_mean"] == pytest.approx(np.mean(errors))
    assert row["error_mean_std"] == pytest.approx(np.std(errors, ddof=1))
    assert row["error_max"] == pytest.approx(3 * np.mean(errors))
    assert row["noise_ratio"] == pytest.approx(6.9 * MEAN)
    assert row["seeds"] == 3
    assert table.window_words(frame) == "steps 4 to 9"


def test_rows_stand_in_the_order_of_the_config(frame: pd.DataFrame) -> None:
    found = table.make_table(frame)
    assert table.names(found, "stream") == table.names(frame, "stream") == ["plain", "rank_skew", "drift"]
    assert table.names(found, "estimator") == table.names(frame, "estimator")
    assert found["ranks"].iloc[:4].tolist() == [1, 2, 8, 64]


def test_costs_of_a_row(frame: pd.DataFrame) -> None:
    found = table.make_table(frame).set_index(table.ROW)
    row = found.loc[("plain", "eqb_cut", 8, 1)]
    assert row["bytes"] == 64 * 2304
    assert row["memory"] == 5000
    # 4 ms * 0.5 * (1, 1.1, 1.2)
    assert [row[f"seconds{end}"] for end in ("_low", "", "_high")] == pytest.approx([0.002, 0.0022, 0.0024])
    assert row["time_ratio"] == pytest.approx(0.5)
    assert row["fallback_steps"] == 0
    assert found.loc[("drift", "eqb_window", 8, 1), "fallback_steps"] == pytest.approx(1 / 6)
    assert math.isnan(found.loc[("plain", "eqb", 8, 1), "fallback_steps"])


def test_ratio_pairs_the_same_step() -> None:
    frame = fake_steps(["plain"], ["eqb", "eqb_cut"], [1], seeds=1)
    # a machine that becomes slower does so for both
    frame["seconds"] *= frame["step"] ** 2
    # and one step is held up
    frame.loc[(frame["estimator"] == "eqb_cut") & (frame["step"] == 5), "seconds"] *= 100
    assert table.make_table(frame)["time_ratio"].tolist() == pytest.approx([1.0, 0.5])
    assert table.make_table(frame[frame["estimator"] != "eqb"])["time_ratio"].isna().all()


def test_runs_of_unequal_length_have_windows_of_their_own() -> None:
    short, long = fake_steps(["plain"], ["eqb"], [1], steps=3), fake_steps(["drift"], ["eqb"], [1], steps=9)
    frame = pd.concat([short, long])
    kept = table.window(frame).groupby("stream")["step"].min()
    assert kept.to_dict() == {"plain": 2, "drift": 4}
    assert table.window_words(frame) == "the last two thirds of each run (3 to 9 steps)"


def test_few_seeds_are_marked(frame: pd.DataFrame) -> None:
    by_seeds = {seeds: table.make_table(fake_steps(["plain"], ["eqb"], [1], seeds=seeds)) for seeds in (1, 2, 3)}
    first = {seeds: table.cells(found.iloc[0])[0] for seeds, found in by_seeds.items()}
    assert first == {1: "eqb *", 2: "eqb *", 3: "eqb"}
    assert " ± " not in table.cells(by_seeds[1].iloc[0])[4]
    assert len(table.cells(by_seeds[1].iloc[0])) == len(table.COLUMNS)


def test_main_microbatches_have_the_most_ranks() -> None:
    frame = fake_steps(["plain"], ["eqb"], [1, 2])
    other = fake_steps(["plain"], ["eqb"], [1, 2, 8]).assign(microbatches=4)
    assert table.main_microbatches(pd.concat([frame, other])) == 4
    assert table.main_microbatches(pd.concat([frame, other[other["ranks"] < 8]])) == 1


def test_steps_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected the folder of a replay, which holds steps\.parquet, got"):
        table.read_steps(tmp_path)
    fake_steps(["plain"], ["eqb"], [1]).drop(columns=["noise", "moved"]).to_parquet(tmp_path / "steps.parquet")
    with pytest.raises(ValueError, match="noise, moved missing"):
        table.read_steps(tmp_path)
    fake_steps(["plain"], ["eqb"], [1]).iloc[:0].to_parquet(tmp_path / "steps.parquet")
    with pytest.raises(ValueError, match="no row"):
        table.read_steps(tmp_path)


def test_rank_averaging(frame: pd.DataFrame) -> None:
    text = answers.rank_averaging(frame, SKEWED)
    assert "At 1, 2, 8 and 64 virtual ranks the mean error of rank_averaged_qb is" in text
    assert "0.00515, 0.00525, 0.00586 and 0.0115 (eqb: 0.00101) without skew on plain, the worst of 2" in text
    assert "0.00606, 0.00707, 0.0131 and 0.0697 (eqb: 0.00101) with skew on rank_skew, 0.606 to 6.97 times" in text
    assert "MaxVio of the next batch of 0.261 to 0.897 (eqb: 0.21)" in text
    assert "missing" not in text


def test_rank_averaging_says_what_is_missing() -> None:
    few = fake_steps(["plain"], ["rank_averaged_qb", "histogram_100"], [1, 2])
    text = answers.rank_averaging(few, SKEWED)
    assert "cannot be told with skew: no such stream was run" in text
    assert text.endswith("Ranks 8 and 64 missing.")
    assert "eqb" not in text
    one = few[few["ranks"] == 1]
    assert answers.rank_averaging(one, SKEWED).startswith("Cannot be told: one partition")
    pooled = few[few["estimator"] == "histogram_100"]
    assert answers.rank_averaging(pooled, SKEWED).startswith("No estimator depends on")


def test_equal_bytes(frame: pd.DataFrame) -> None:
    text = answers.equal_bytes(frame, SKEWED)
    assert "With 2,048 bytes an expert and step, eqb has a mean error of 0.101 times" in text
    assert "histogram_500, nearest to it with 2,000 bytes" in text
    assert "4 times the error of eqb over the 3 streams" in text
    assert "131,072 bytes a layer and step" in answers.equal_bytes(frame, Facts())
    without = frame[frame["estimator"] != "eqb"]
    assert answers.equal_bytes(without, SKEWED) == "Cannot be told: eqb missing."
    without = frame[~frame["estimator"].str.contains("histogram")]
    assert answers.equal_bytes(without, SKEWED) == "Cannot be told: a histogram missing."


def test_precision(frame: pd.DataFrame) -> None:
    text = answers.precision(frame, SKEWED)
    everywhere, nowhere = text.split("; ")
    assert "At 64 ranks" in everywhere
    assert "on all 3 streams for histogram_500 (0.404), histogram_4000 (0.0505), eqb (0.101)" in everywhere
    assert "on none for rank_averaged_qb (1.15 to 6.97)" in nowhere
    assert "on some for rank_averaged_qb (0.586 to 1.31)" in answers.precision(frame[frame["ranks"] <= 8], SKEWED)
    assert answers.precision(frame.assign(noise=np.nan), SKEWED).startswith("Cannot be told: the sampling noise")


def test_fallback(frame: pd.DataFrame) -> None:
    rows = answers.candidate_rows(frame).set_index(["estimator", "stream"])
    late = rows.loc[("eqb_window", "drift")]
    # steps 1 and 5 of 9, then 5 of 8; a quarter and a half of the experts
    assert late["fallback, all steps"] == pytest.approx(2 / 9)
    assert late["after step 1"] == pytest.approx(1 / 8)
    assert late["experts, all steps"] == pytest.approx(0.75 / 9)
    assert late["experts, after step 1"] == pytest.approx(0.5 / 8)
    assert rows.loc[("eqb_cut", "plain"), "memory / eqb"] == pytest.approx(0.1)
    text = answers.fallback(frame, SKEWED)
    assert "eqb_window falls back in 15 % of the layers and steps and after step 1 in 4.2 %" in text
    assert "at most 12 % on drift" in text
    assert "keeps 10 % of the pairs and takes 0.508 times the bytes, 0.1 times the memory and 0.25 times" in text
    without = frame[frame["candidate_share"].isna()]
    assert answers.fallback(without, SKEWED) == "Cannot be told: an estimator with candidates missing."
    no_reference = answers.candidate_rows(frame[frame["estimator"] != "eqb"])
    assert no_reference["bytes / eqb"].isna().all()


def test_costs(frame: pd.DataFrame) -> None:
    text = answers.costs(frame, SKEWED)
    assert "256 (rank_averaged_qb) to 1,024,000 (histogram_4000) bytes (131,072 for eqb)" in text
    assert "0.88 (signed_count) to 8.8 (eqb_fp32) ms (4.4 for eqb), in 2 rounds" in text
    assert "for eqb" not in answers.costs(frame[frame["estimator"] != "eqb"], SKEWED)


def test_spread(frame: pd.DataFrame) -> None:
    text = answers.spread(frame, SKEWED)
    assert "Over 4 partitions" in text
    assert text.endswith("for rank_averaged_qb (3) and rank_averaged_microbatch (3).")
    assert "signed_count, eqb, eqb_fp32, eqb_cut and eqb_window; it differs" in text
    # one bit in one early step is enough
    torn = frame.copy()
    torn.loc[(torn["estimator"] == "eqb") & (torn["step"] == 1) & (torn["seed"] == 2), "spread"] = 2.0**-24
    assert "eqb (5.96e-08)" in answers.spread(torn, SKEWED)
    assert table.make_table(torn).groupby("estimator")["spread"].max()["eqb"] == 2.0**-24
    assert answers.spread(frame[frame["ranks"] == 8], SKEWED).startswith("Cannot be told: one partition")


def test_over_steps(frame: pd.DataFrame) -> None:
    text = answers.over_steps(frame, SKEWED)
    assert "eqb 0.21, eqb_fp32 0.2" in text
    assert text.endswith("at 64 ranks.")


def test_frozen_batches_settle_or_do_not(frame: pd.DataFrame) -> None:
    steps = answers.steps_to_settle(frame)
    assert (steps.loc["eqb"] == 5).all()
    assert steps.loc["rank_averaged_qb"].isna().all()
    slow = frame.copy()
    late = (slow["estimator"] == "eqb") & (slow["stream"] == "drift") & (slow["step"] == 7) & (slow["layer"] == 1)
    slow.loc[late & (slow["seed"] == 1), "moved"] = 1e-9
    assert answers.steps_to_settle(slow).loc["eqb"].to_dict() == {"plain": 5, "rank_skew": 5, "drift": 8}
    text = answers.over_steps(slow, Facts(frozen=True))
    assert "eqb in step 5 to 8;" in text
    assert "rank_averaged_qb cycles or still moves on 3 of 3 streams" in text


def test_colours_are_told_apart() -> None:
    names = [*load("fake_steps").ESTIMATORS, "eqb_fixed16", "eqb_window12", "mine"]
    styles = marks.styles_of(names)
    assert len({style.colour for style in styles.values()}) == len(names)
    assert styles["eqb"].colour == "#0072b2"
    assert styles["signed_count"].colour == "#e69f00"
