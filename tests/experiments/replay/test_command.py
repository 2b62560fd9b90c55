import json
import sys

import pandas as pd
import pytest
import torch
import yaml
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from equipoise.balancers import SignedCount
from equipoise.experiments.replay import command, report, table, workers
from equipoise.experiments.replay.plan import Row

SMALL = ["tokens=64", "num_experts=8", "top_k=2", "steps=2", "ranks=[1,4]", "seeds=[0,1]", "processes=1"]
KEYS = ["stream", "estimator", "seed", "ranks", "microbatches", "step", "layer"]


@pytest.fixture(scope="module")
def small():
    """The resolved defaults, at small sizes."""
    with initialize_config_module("equipoise.configs", version_base="1.3"):
        return OmegaConf.to_container(compose("replay", overrides=SMALL), resolve=True)


@pytest.fixture
def replay(small, tmp_path, monkeypatch):
    """A run with changes of ``small``, without the page: its exit status; and the folder that it writes to."""
    torch.set_num_threads(1)
    pages = []
    monkeypatch.setattr(report, "write_report", lambda folder: pages.append(folder) or folder / "report/index.html")

    def run(**changes):
        given = {"runs": str(tmp_path), "name": "it", "only": ["even", "skewed", "eqb", "histogram_100"], **changes}
        return command.run(command.select(small | given))

    run.folder, run.pages = tmp_path / "it", pages
    return run


@pytest.fixture
def main(replay, tmp_path, monkeypatch):
    """The same from the command line, with overrides."""

    def run(*overrides):
        monkeypatch.setattr(sys, "argv", ["equipoise-replay", f"runs={tmp_path}", "name=it", *SMALL, *overrides])
        return command.main()

    return run


def steps_of(folder):
    return pd.read_parquet(folder / "steps.parquet").drop(columns="seconds")


def test_the_folder_of_a_result_whatever_the_processes(replay, capsys):
    assert replay() == 0
    frame = pd.read_parquet(replay.folder / "steps.parquet")
    assert list(frame.columns) == table.CONTRACT
    # streams, estimators, seeds, ranks, steps
    assert len(frame) == 2 * 2 * 2 * 2 * 2
    assert not frame.duplicated(KEYS).any()
    assert frame.drop(columns=["fallback_share", "candidate_share"]).notna().all(axis=None)
    assert set(frame["step"]) == {1, 2}
    assert (frame["spread"] == 0).all()
    rows = pd.read_csv(replay.folder / "rows.csv")
    assert len(rows) == 16
    assert not rows["failed"].any()
    stored = yaml.safe_load((replay.folder / "config.yaml").read_text())
    assert list(stored["streams"]) == ["even", "skewed"]
    assert list(stored["estimators"]) == ["histogram_100", "eqb"]
    assert stored["tokens"] == 64
    assert "only" not in stored
    environment = json.loads((replay.folder / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["seconds"] > 0
    assert replay.pages == [replay.folder]
    assert f"report: {replay.folder / 'report/index.html'}" in capsys.readouterr().out
    assert not [path for path in replay.folder.iterdir() if path.name.startswith(".") and path.name != ".lock"]
    alone = steps_of(replay.folder)
    assert replay(processes=2) == 0
    pd.testing.assert_frame_equal(steps_of(replay.folder), alone, check_exact=True)


def test_another_config_is_refused_and_the_same_may_run_again(replay):
    few = {"only": ["even", "eqb"]}
    assert replay(**few, seeds=[0]) == 0
    before = steps_of(replay.folder)
    with pytest.raises(ValueError, match=r"holds the run of another config: seeds is \[0\] there and \[1\] here"):
        replay(**few, seeds=[1])
    assert replay(**few, seeds=[0]) == 0
    pd.testing.assert_frame_equal(steps_of(replay.folder), before, check_exact=True)
    foreign = replay.folder.with_name("foreign")
    foreign.mkdir()
    (foreign / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"holds files but no config.yaml"):
        replay(**few, name="foreign")
    assert [path.name for path in foreign.iterdir()] == ["thesis.tex"]


def test_estimators_and_streams_from_the_command_line(main, replay):
    added = ["+stream@streams.mine=tied", "+balancer/bias@estimators.mine=histogram_qb", "estimators.mine.num_bins=7"]
    taken = ["~estimators.eqb", "~streams.even", "~estimators.histogram_4000"]
    assert main(*added, *taken, "seeds=[0]", "ranks=[1]", "steps=1", "layers=2", "microbatches=[2]") == 0
    frame = pd.read_parquet(replay.folder / "steps.parquet")
    assert {"mine", "skewed"} <= set(frame["stream"])
    assert "even" not in set(frame["stream"])
    assert {"mine", "eqb_cut", "signed_count"} <= set(frame["estimator"])
    assert not {"eqb", "histogram_4000"} & set(frame["estimator"])
    assert set(frame.loc[frame["estimator"] == "mine", "bytes"]) == {8 * 8 * 4}
    assert set(frame["layer"]) == {0, 1}
    # the equal bytes of which the config speaks
    per_step = frame.groupby("estimator")["bytes"].max()
    assert per_step["histogram_511"] == per_step["eqb_fixed16"]


class Failing(SignedCount):
    """Fails in its second update."""

    def solve(self):
        if self.bias.any():
            raise RuntimeError("no more")
        return (yield from super().solve())


def test_a_row_that_fails_is_named_and_the_others_are_kept(replay, small, capsys, monkeypatch):
    monkeypatch.setattr("equipoise.balancers.SignedCount", Failing)
    estimators = small["estimators"] | {"mine": {"_target_": "equipoise.balancers.SignedCount"}}
    only = ["even", "eqb", "histogram_100", "mine"]
    assert replay(seeds=[0], estimators=estimators, only=only) == 1
    assert "failed: even-s0 mine on 4x1: RuntimeError: no more" in capsys.readouterr().out
    assert set(pd.read_parquet(replay.folder / "steps.parquet")["estimator"]) == {"eqb", "histogram_100"}
    rows = pd.read_csv(replay.folder / "rows.csv")
    assert set(rows.loc[rows["failed"], "estimator"]) == {"mine"}
    assert replay.pages == [replay.folder]
    # nothing to report
    assert replay(seeds=[0], estimators=estimators, only=["even", "mine"], name="all") == 1
    assert len(replay.pages) == 1


def test_an_estimator_that_cannot_run_on_a_stream_is_refused_before_any_row(replay):
    with pytest.raises(ValueError, match=r"estimators.histogram_100 needs selection=score, got selection=logit"):
        replay(selection="logit")


def test_frozen_batches_say_whether_they_converged(replay, capsys):
    assert replay(mode="frozen", steps=60, seeds=[0], only=["even", "histogram_100"]) == 0
    assert "even histogram_100: converged after" in capsys.readouterr().out
    assert pd.read_csv(replay.folder / "rows.csv")["note"].str.startswith("converged after").all()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"ranks": [3]}, "ranks . microbatches must divide the tokens of a step, got 3 . 1 and 64 tokens"),
        ({"name": "a/b"}, "name names a folder: expected letters, digits and . _ . -, got 'a/b'"),
        ({"processes": 0}, r"processes \(or auto\) must be a positive whole number, got 0"),
        ({"only": ["even", "x"]}, "there is no stream or estimator 'x': expected streams of even, skewed, .* eqb_cut"),
        ({"only": "eqb"}, r"only must be a list of streams and estimators, say \[even,eqb\], got 'eqb'"),
    ],
)
def test_wrong_configs_leave_no_folder(replay, changes, text):
    with pytest.raises(ValueError, match=text):
        replay(**changes)
    assert not replay.folder.exists()


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["+stream@streams.run=captured"], "streams.run.folder is missing: it has no default, give it a value"),
        (["stepz=3"], "there is no key 'stepz' at the top: expected one of estimators, gate"),
        (["-m"], "are lists of one run: expected no -m"),
    ],
)
def test_errors_of_the_command_line(main, replay, capsys, overrides, text):
    assert main(*overrides) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("equipoise-replay: ")
    assert text in printed.err
    assert not printed.out
    assert not replay.folder.exists()


def test_a_stop_leaves_the_last_result(main, replay, monkeypatch, capsys):
    assert replay() == 0
    before = {path.name: path.read_bytes() for path in replay.folder.iterdir()}

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "run_rows", stop)
    assert main("only=[even,skewed,eqb,histogram_100]") == 130
    assert "stopped, no result was written" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in replay.folder.iterdir()} == before


def test_only_keeps_all_of_a_kind_of_which_it_names_none():
    config = {"streams": {"even": 1, "skewed": 2}, "estimators": {"eqb": 3, "mine": 4}, "only": ["mine"]}
    assert command.select(config) == config | {"estimators": {"mine": 4}}
    assert command.select(config | {"only": []}) == config | {"only": []}


def test_plain_lines_come_now_and_then_with_the_time_left(capsys, monkeypatch):
    seconds = iter([0.0, 1.0, 8.0, 12.0, 13.0])
    monkeypatch.setattr(workers.time, "monotonic", lambda: next(seconds))
    lines = workers._Lines(workers.Console(width=100), 8)
    for ranks in (1, 2, 4, 8):
        lines(Row("even", 0, "eqb", ranks, 1))
    # two rows in twelve seconds, six to come
    assert capsys.readouterr().out == "[2/8] even-s0 eqb on 4x1, 36 s left\n"
