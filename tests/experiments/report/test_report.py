"""The report on synthetic run folders: numbers, order, refusals, what is missing, files, errors."""

import io
import re
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
from rich.console import Console

from equipoise.experiments.ledger import Entry, record
from equipoise.experiments.report import command as report

FIRST_COLUMNS = [
    "balancer",
    "seeds",
    "global_maxvio",
    "global_maxvio_std",
    "local_maxvio",
    "local_maxvio_std",
    "val_bpb",
    "val_bpb_std",
    "tokens",
    "tokens_per_s",
]


def csv_of(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "report" / "table.csv", index_col="balancer")


@pytest.mark.usefixtures("no_figures")
def test_table_by_hand(sweep: Path) -> None:
    built = report.build_report(sweep)
    written = pd.read_csv(sweep / "report" / "table.csv")
    assert list(written.columns[:10]) == FIRST_COLUMNS
    assert list(written["balancer"]) == ["none", "eqb"]
    none = written.iloc[0]
    assert (none["seeds"], none["tokens"], none["steps"]) == (3, 12 * 4096, 12)
    assert none["global_maxvio"] == pytest.approx(4.1)
    assert none["global_maxvio_std"] == pytest.approx(0.1)
    assert (none["local_maxvio"], none["local_maxvio_std"]) == (2.0, 0.0)
    # validations at steps 10 and 12 lie in the tail, the one at step 8 does not
    assert none["val_bpb"] == 3.0
    assert none["d_global_maxvio"] == pytest.approx(3.0)
    assert none["d_global_maxvio_low"] == pytest.approx(3.0)
    assert none["d_global_maxvio_real"]
    assert not none["d_local_maxvio_real"]
    assert written.iloc[1][["d_global_maxvio", "d_val_bpb_low"]].isna().all()
    assert built.complete
    assert built.reference == "eqb"
    assert "3 intervals" in built.rule


@pytest.mark.usefixtures("no_figures")
def test_tail_can_be_given(sweep: Path) -> None:
    report.build_report(sweep, tail=1.0)
    # eight steps of 50 and four of the tail's value
    assert csv_of(sweep).loc["eqb", "global_maxvio"] == pytest.approx((8 * 50 + 4 * 1.1) / 12)


@pytest.mark.usefixtures("no_figures")
def test_one_seed_has_no_spread_and_claims_nothing(fake_runs: ModuleType, tmp_path: Path) -> None:
    for name in ("none", "eqb"):
        fake_runs.write_run(tmp_path, name, 0)
    built = report.build_report(tmp_path)
    assert csv_of(tmp_path).loc["none", ["global_maxvio_std", "d_global_maxvio_low"]].isna().all()
    assert "(n=1)" in (built.folder / "table.md").read_text()
    assert "No interval is given" in built.rule


@pytest.mark.usefixtures("no_figures")
def test_without_eqb_the_first_row_is_the_reference(fake_runs: ModuleType, tmp_path: Path) -> None:
    for name in ("gshard", "none"):
        fake_runs.write_three_seeds(tmp_path, name, 0.0)
    built = report.build_report(tmp_path)
    assert built.reference == "none"
    assert "Differences are to none" in built.rule


@pytest.mark.usefixtures("no_figures")
def test_keys_that_change_no_result_may_differ(fake_runs: ModuleType, sweep: Path) -> None:
    changes = {"tracker.mode": "online", "name": "other", "runs": "elsewhere", "report.tail": 0.5}
    for seed in range(3):
        fake_runs.write_run(sweep, "lei", seed, changes=changes)
    assert report.build_report(sweep).complete


@pytest.mark.usefixtures("no_figures")
def test_cut_failed_and_missing_seeds_are_told(
    fake_runs: ModuleType, sweep: Path, capsys: pytest.CaptureFixture
) -> None:
    fake_runs.write_run(sweep, "gshard", 0, values={"global_maxvio": 1.0})
    fake_runs.write_run(sweep, "gshard", 1, steps=7, planned=12, values={"global_maxvio": 100.0})
    fake_runs.write_run(sweep, "lei", 0, steps=0, planned=12, error="rank 1: out of memory")
    assert report.main([str(sweep)]) == 3
    table = csv_of(sweep)
    assert (table.loc["gshard", "seeds"], table.loc["gshard", "global_maxvio"]) == (1, 1.0)
    assert not table.loc["gshard", "complete"]
    assert table.loc["lei", "seeds"] == 0
    assert pd.isna(table.loc["lei", "global_maxvio"])
    markdown = (sweep / "report" / "table.md").read_text()
    assert "1 of 3 seeds: s1 cut at step 7/12, s2 missing" in markdown
    assert "0 of 3 seeds: s0 failed at step 0/12: rank 1: out of memory, s1 missing, s2 missing" in markdown
    assert "1/3" in capsys.readouterr().out


@pytest.mark.usefixtures("no_figures")
def test_r5_a_missing_seed_is_said_and_the_exit_status_is_not_zero(
    fake_runs: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seeds in (("eqb", 3), ("none", 2)):
        for seed in range(seeds):
            fake_runs.write_run(tmp_path, name, seed)
    assert report.main([str(tmp_path)]) == report.INCOMPLETE == 3
    assert "warning: none: 2 of 3 seeds: s2 missing" in capsys.readouterr().out
    assert "| none | 2 of 3 seeds: s2 missing |" in (tmp_path / "report" / "table.md").read_text()
    table = pd.read_csv(tmp_path / "report" / "table.csv").set_index("balancer")
    assert list(table["complete"]) == [False, True]
    # two pairs are too few to call anything real
    assert (table.loc["none", "d_local_maxvio_n"], table.loc["none", "d_local_maxvio_real"]) == (2, False)
    fake_runs.write_run(tmp_path, "none", 2)
    assert report.main([str(tmp_path)]) == 0


@pytest.mark.usefixtures("no_figures")
def test_r5_a_seed_that_no_row_has_is_known_from_the_ledger(
    fake_runs: ModuleType, sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = Entry("eqb-s3", 12, "equipoise ...", "/place", None, "2026-11-30T00:00:00+00:00")
    record(sweep, {"eqb-s0-0123abcd": entry, "eqb-s3-0123abcd": entry})
    assert report.main([str(sweep)]) == report.INCOMPLETE
    output = capsys.readouterr().out
    assert "warning: eqb-s3: planned, never started" in output
    assert "warning: none: 3 of 4 seeds: s3 missing" in output


@pytest.mark.usefixtures("no_figures")
def test_r5_a_folder_without_a_config_is_a_run_that_never_started(sweep: Path) -> None:
    entry = Entry("eqb-s3", 12, "equipoise ...", "/place", None, "2026-11-30T00:00:00+00:00")
    record(sweep, {"eqb-s3-0123abcd": entry, "no seed in this name": entry})
    (sweep / "eqb-s3-0123abcd").mkdir()
    assert report.build_report(sweep).missing == ["eqb-s3", "eqb-s3"]


@pytest.mark.usefixtures("no_figures")
def test_axes_and_reference_of_the_command_line(
    fake_runs: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that runs that are done can be read in another way."""
    for width in (64, 128):
        for name in ("eqb", "none"):
            fake_runs.write_run(tmp_path, name, 0, changes={"model.width": width}, suffix=str(width))
    assert report.main([str(tmp_path)]) == 2
    assert "model.width: 128 in eqb-s0-0123abcd128, 64 in eqb-s0-0123abcd64" in capsys.readouterr().err
    assert report.main([str(tmp_path), "--axes", "model.width", "--reference", "none"]) == 0
    table = pd.read_csv(tmp_path / "report" / "table.csv")
    assert list(table["reference"]) == ["none [width=64]"] * 2 + ["none [width=128]"] * 2
    assert report.main([str(tmp_path), "--axes", "model.width", "--reference", "lei"]) == 2
    assert "reference: expected one of the rows none, eqb, got 'lei'" in capsys.readouterr().err


@pytest.mark.usefixtures("no_figures")
def test_runs_that_want_to_be_read_in_two_ways(fake_runs: ModuleType, tmp_path: Path) -> None:
    for name, tail in (("eqb", 0.25), ("none", 0.5)):
        fake_runs.write_run(tmp_path, name, 0, changes={"report.tail": tail, "report.reference": "lei"})
    built = report.build_report(tmp_path)
    assert "the runs have several report.tail (0.5, 0.25); the first is taken" in built.warnings
    assert "report.reference: there is no row 'lei'; the first of a block is taken" in built.warnings


@pytest.mark.usefixtures("no_figures")
def test_half_a_line_at_the_end_of_a_killed_run(fake_runs: ModuleType, sweep: Path) -> None:
    run = fake_runs.write_run(sweep, "gshard", 0, steps=5, planned=12)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "tok')
    assert "s0 cut at step 5/12" in report.build_report(sweep).table.set_index("balancer").loc["gshard", "note"]


@pytest.mark.usefixtures("no_figures")
def test_warnings(fake_runs: ModuleType, sweep: Path) -> None:
    values = {"skipped": [0] * 6 + [2] * 6, "clamped_share": [0.5] * 8 + [0.25] * 4}
    machine = {"versions": {"torch": "2.12.0"}}
    for seed in range(3):
        fake_runs.write_run(sweep, "lei", seed, every=100, values=values, environment=machine)
    built = report.build_report(sweep)
    text = "\n".join(built.warnings)
    assert "lei s0: 2 steps skipped" in text
    assert "lei s2: up to 0.25 of the margins were clamped" in text
    assert "lei s1: no validation in the tail window" in text
    assert "torch: 2.13.0 in eqb-s0-0123abcd, 2.12.0 in lei-s0-0123abcd" in text
    for name in ("table.md", "table.tex", "index.html"):
        assert "2 steps skipped" in (built.folder / name).read_text()


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda fake, folder: None, "no such folder"),
        (lambda fake, folder: folder.mkdir(), "holds no run"),
        (
            lambda fake, folder: fake.write_run(folder, "eqb", 0, steps=3, planned=12),
            "no complete run: s0 cut at step 3",
        ),
        (lambda fake, folder: broken_config(fake, folder), "is not the config of a run"),
        (lambda fake, folder: broken_metrics(fake, folder, drop=4), "line 5 is of step 6: expected every step once"),
        (lambda fake, folder: broken_metrics(fake, folder, garble=4), "line 5 is not JSON"),
    ],
)
def test_what_cannot_be_reported_is_one_clear_line(
    fake_runs: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture, prepare, message: str
) -> None:
    folder = tmp_path / "table"
    prepare(fake_runs, folder)
    assert report.main([str(folder)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("equipoise-report: ")
    assert error.count("\n") == 1


def broken_config(fake_runs: ModuleType, folder: Path) -> None:
    (fake_runs.write_run(folder, "eqb", 0) / "config.yaml").write_text("seed: 0\n")


def broken_metrics(fake_runs: ModuleType, folder: Path, *, drop: int | None = None, garble: int | None = None) -> None:
    path = fake_runs.write_run(folder, "eqb", 0) / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    if garble is not None:
        lines[garble] = "{\n"
    path.write_text("".join(line for number, line in enumerate(lines) if number != drop))


@pytest.mark.usefixtures("no_figures")
def test_a_bad_tail_is_refused(sweep: Path, capsys: pytest.CaptureFixture) -> None:
    assert report.main([str(sweep), "--tail", "1.5"]) == 2
    assert "got 1.5" in capsys.readouterr().err


@pytest.mark.usefixtures("no_figures")
def test_a_failure_leaves_the_old_report_whole(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report.build_report(sweep)
    before = {path.name: path.read_bytes() for path in (sweep / "report").iterdir()}

    def fail(*arguments: object) -> str:
        raise OSError("no space left on device")

    monkeypatch.setattr(report.page, "render", fail)
    with pytest.raises(OSError, match="no space left"):
        report.build_report(sweep, tail=1.0)
    assert {path.name: path.read_bytes() for path in (sweep / "report").iterdir()} == before


@pytest.mark.usefixtures("no_figures")
def test_out_keeps_what_else_is_there(sweep: Path, tmp_path: Path) -> None:
    out = tmp_path / "elsewhere"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    assert report.main([str(sweep), "--out", str(out)]) == 0
    assert (out / "mine.txt").read_text() == "keep"
    assert (out / "table.csv").exists()
    assert not (sweep / "report").exists()


@pytest.mark.usefixtures("no_figures")
def test_the_terminals_table_fits_100_columns(fake_runs: ModuleType, tmp_path: Path) -> None:
    for seed in range(2):
        for name in fake_runs.PRESETS:
            values = {"global_maxvio": 3.0 + seed, "tokens_per_s": 12345.0}
            fake_runs.write_run(tmp_path, name, seed, values=values)
    console = Console(file=io.StringIO(), width=100)
    report.print_table(report.build_report(tmp_path), console)
    text = console.file.getvalue()
    row = next(line for line in text.splitlines() if line.startswith(" rank_averaged_qb"))
    assert row.split()[:5] == ["rank_averaged_qb", "2", "3.50", "±", "0.71"]
    assert "+0.00?" in row
    assert row.split()[-1] == "12,345"
    assert "called real" in " ".join(text.split())
    assert "index.html" in text


def test_the_papers_rows_stand_apart(drawn: report.Report) -> None:
    markdown = (drawn.folder / "table.md").read_text()
    assert "| EQB + norm. LEI | 0.60 | 3.52 | 0.6720 |" in markdown
    assert "7.5B" not in (drawn.folder / "table.csv").read_text()
    ours, paper = markdown.split("ANOTHER MODEL AT ANOTHER SCALE")
    assert drawn.rule in ours
    assert "rank-averaged QB" in paper
    # a bar in a name would end the cell
    assert r"my_<own>\|one" in ours
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in ours.splitlines() if line.startswith("|")}
    assert len(widths) == 1
