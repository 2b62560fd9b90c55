"""Reading, refusing and grouping run folders."""

from pathlib import Path
from types import ModuleType

import pytest

from equipoise.experiments.report import command as report
from equipoise.experiments.report.comparison import ORDER, group_rows, refuse_incomparable
from equipoise.experiments.report.reading import load_runs


def test_order_of_the_rows(fake_runs: ModuleType, tmp_path: Path) -> None:
    for name in ["zeta", *reversed(ORDER), "alpha"]:
        fake_runs.write_run(tmp_path, name, 0)
    assert [row.label for row in group_rows(load_runs(tmp_path))] == [*ORDER, "alpha", "zeta"]


def test_options_set_rows_of_one_name_apart(fake_runs: ModuleType, tmp_path: Path) -> None:
    for eta in (1e-4, 2e-5, 5e-6):
        changes = {"balancer.gradient.eta": eta}
        fake_runs.write_run(tmp_path, "eqb_lei", 0, changes=changes, suffix=str(eta))
    fake_runs.write_run(tmp_path, "eqb", 0)
    labels = [row.label for row in group_rows(load_runs(tmp_path))]
    etas = ["5e-06", "2e-05", "0.0001"]
    assert labels == ["eqb", *(f"eqb_lei (eta={eta})" for eta in etas)]


def test_null_and_absent_and_numbers_of_two_types_are_told_apart(fake_runs: ModuleType, tmp_path: Path) -> None:
    """As they are by the hash of the config."""
    options: list[dict] = [{}, {"extra": None}, {"extra": 1}, {"extra": 1.0}]
    for number, option in enumerate(options):
        changes = {f"balancer.{key}": value for key, value in option.items()}
        fake_runs.write_run(tmp_path, "eqb", 0, changes=changes, suffix=str(number))
    labels = [row.label for row in group_rows(load_runs(tmp_path))]
    assert sorted(labels) == ["eqb", "eqb (extra=1)", "eqb (extra=1.0)", "eqb (extra=None)"]


@pytest.mark.parametrize("key", ["balancer.extra", "model.extra"])
def test_rows_that_would_read_alike_are_refused(fake_runs: ModuleType, tmp_path: Path, key: str) -> None:
    for number, value in enumerate((1, "1")):
        changes = {key: value, "report.axes": [] if "balancer" in key else [key]}
        fake_runs.write_run(tmp_path, "eqb", 0, changes=changes, suffix=str(number))
    with pytest.raises(ValueError, match=r"eqb-s0-0123abcd0 and eqb-s0-0123abcd1 differ in \S*extra, .* read alike"):
        report.build_report(tmp_path)


def test_points_that_would_read_alike_are_refused_whatever_the_balancer(fake_runs: ModuleType, tmp_path: Path) -> None:
    for name, value in (("eqb", 1), ("none", "1")):
        fake_runs.write_run(tmp_path, name, 0, changes={"model.extra": value, "report.axes": ["model"]})
    with pytest.raises(ValueError, match=r"differ in .*model\.extra, .* read alike"):
        group_rows(load_runs(tmp_path))


@pytest.mark.parametrize("axis", ["parallel", "parallel.ranks"])
def test_ranks_as_an_axis_may_change_the_world_size(fake_runs: ModuleType, tmp_path: Path, axis: str) -> None:
    for ranks in (1, 2):
        changes = {"parallel.ranks": ranks, "report.axes": [axis]}
        environment = {"world_size": ranks}
        fake_runs.write_run(tmp_path, "eqb", 0, changes=changes, environment=environment, suffix=str(ranks))
    refuse_incomparable(load_runs(tmp_path))
    assert [row.label for row in group_rows(load_runs(tmp_path))] == ["eqb [ranks=1]", "eqb [ranks=2]"]


@pytest.mark.parametrize(
    ("changes", "environment", "message"),
    [
        ({"optim.learning_rate": 0.001}, None, r"optim\.learning_rate: 0\.002 in eqb-s0-\S+, 0\.001 in none-s0-"),
        ({"optim.steps": 12.0}, None, r"optim\.steps: 12 in eqb-s0-\S+, 12\.0 in none-s0-"),
        ({"model.new": None}, None, r"model\.new: absent in eqb-s0-\S+, None in none-s0-"),
        ({"model.top_k": None}, None, r"model\.top_k: 4 in eqb-s0-\S+, None in none-s0-"),
        ({"model.new": 1}, None, r"model\.new: absent in eqb-s0-\S+, 1 in none-s0-"),
        (None, {"data": {"sha256": "6" * 64}}, r"data\.sha256: 5{64} in eqb-s0-\S+, 6{64} in none-s0-"),
        (None, {"world_size": 4}, r"world_size: 2 in eqb-s0-\S+, 4 in none-s0-"),
        (None, {"metric_schema": 2}, r"metric_schema: 1 in eqb-s0-\S+, 2 in none-s0-"),
    ],
)
def test_incomparable_runs_are_refused(
    fake_runs: ModuleType, tmp_path: Path, changes: dict | None, environment: dict | None, message: str
) -> None:
    fake_runs.write_run(tmp_path, "eqb", 0)
    fake_runs.write_run(tmp_path, "none", 0, changes=changes, environment=environment)
    with pytest.raises(ValueError, match=message):
        report.build_report(tmp_path)
    assert not (tmp_path / "report").exists()


def test_runs_that_record_other_metrics_are_refused(fake_runs: ModuleType, tmp_path: Path) -> None:
    fake_runs.write_run(tmp_path, "eqb", 0)
    fake_runs.write_run(tmp_path, "none", 0, values={"loss": 2.0})
    with pytest.raises(ValueError, match=r"metrics\.loss: absent in eqb-s0-\S+, recorded in none-s0-"):
        report.build_report(tmp_path)


@pytest.mark.parametrize("axes", [[], ["optim.steps"], ["optim"]])
def test_r6_runs_at_different_fractions_of_their_schedules_are_refused(
    fake_runs: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], axes: list[str]
) -> None:
    """Step 12 is the end of one schedule and the middle of the other; naming it as an axis does not help."""
    fake_runs.write_run(tmp_path, "eqb", 0, steps=12, changes={"report.axes": axes})
    fake_runs.write_run(tmp_path, "none", 0, steps=24, changes={"report.axes": axes})
    assert report.main([str(tmp_path)]) == 2
    message = capsys.readouterr().err
    if axes:
        assert "would compare runs at different fractions of their schedules" in message
    else:
        assert "optim.steps: 12 in eqb-s0-0123abcd, 24 in none-s0-0123abcd" in message
        assert "Step 12 is the end of one schedule and 50% of another" in message
    assert not (tmp_path / "report").exists()


@pytest.mark.usefixtures("no_figures")
def test_axes_make_blocks_with_a_reference_each(fake_runs: ModuleType, tmp_path: Path) -> None:
    for width, offset in ((64, 0.0), (128, 5.0)):
        for name, value in (("eqb", 1.0), ("none", 3.0)):
            for seed in range(3):
                changes = {
                    "model.width": width,
                    "model.num_experts": width // 2,
                    "report.axes": ["model.width", "model"],
                }
                values = {"global_maxvio": value + offset + 0.01 * seed}
                fake_runs.write_run(tmp_path, name, seed, changes=changes, values=values, suffix=str(width))
    table = report.build_report(tmp_path).table.set_index("balancer")
    # what follows from the width says nothing new
    labels = ["none [width=64]", "eqb [width=64]", "none [width=128]", "eqb [width=128]"]
    assert list(table.index) == labels
    assert list(table["model.width"]) == [64, 64, 128, 128]
    assert "model.num_experts" not in table
    assert list(table["reference"]) == ["eqb [width=64]"] * 2 + ["eqb [width=128]"] * 2
    assert list(table["d_global_maxvio"].fillna(0).round(9)) == [2.0, 0.0, 2.0, 0.0]
    assert "Differences are to eqb of the same block" in (tmp_path / "report" / "table.md").read_text()


@pytest.mark.usefixtures("no_figures")
def test_a_lone_balancer_is_compared_over_the_axis(fake_runs: ModuleType, tmp_path: Path) -> None:
    for rate in (0.002, 0.001):
        changes = {"optim.learning_rate": rate, "report.axes": ["optim.learning_rate"]}
        fake_runs.write_run(tmp_path, "eqb", 0, changes=changes, values={"local_maxvio": 1000 * rate}, suffix=str(rate))
    table = report.build_report(tmp_path).table
    assert list(table["balancer"]) == ["eqb [learning_rate=0.001]", "eqb [learning_rate=0.002]"]
    assert list(table["reference"]) == ["eqb [learning_rate=0.001]"] * 2
    assert table["d_local_maxvio"].iloc[1] == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"report.axes": "model.width"}, r"report\.axes: expected a list of keys such as \[model\.width\], got 'model"),
        ({"report.axes": ["model.depth"]}, r"report\.axes: no run has a key 'model\.depth'"),
        ({"report.tail": None}, r"report\.tail: expected a share of the steps, got None in .*none-s0"),
    ],
)
def test_wrong_settings_of_the_report(fake_runs: ModuleType, tmp_path: Path, changes: dict, message: str) -> None:
    for name in ("eqb", "none"):
        fake_runs.write_run(tmp_path, name, 0, changes=changes)
    with pytest.raises(ValueError, match=message):
        report.build_report(tmp_path)


@pytest.mark.usefixtures("no_figures")
def test_a_named_reference(fake_runs: ModuleType, tmp_path: Path) -> None:
    for name in ("eqb", "none"):
        fake_runs.write_run(tmp_path, name, 0, changes={"report.reference": "none"})
    built = report.build_report(tmp_path)
    assert built.reference == "none"
    assert list(built.table["is_reference"]) == [True, False]


def test_a_seed_twice_is_refused(fake_runs: ModuleType, sweep: Path) -> None:
    fake_runs.write_run(sweep, "eqb", 1, changes={"tracker.mode": "none"}, suffix="b")
    with pytest.raises(ValueError, match="seed 1 of eqb is there twice: eqb-s1-0123abcd and eqb-s1-0123abcdb"):
        report.build_report(sweep)


def test_the_folder_of_a_run_is_not_one_of_an_experiment(fake_runs: ModuleType, tmp_path: Path) -> None:
    run = fake_runs.write_run(tmp_path / "table", "eqb", 0)
    with pytest.raises(ValueError, match=r"is the folder of one run; expected that of its experiment, .*table"):
        report.build_report(run)
