"""Which rank a failed job is blamed on, and where its log lies. Real ranks are started in ``test_launch.py``."""

import json
import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from equipoise.experiments.sweep import ranks
from equipoise.experiments.sweep.ranks import RankLogs


def record(logs: RankLogs, rank: int, message: str, second: float) -> None:
    """What a rank leaves that raised at ``second``."""
    path = logs.path(rank, "error.json")
    path.write_text(json.dumps({"message": {"message": message, "extraInfo": {"timestamp": "0"}}}))
    os.utime(path, (second, second))


def failed(logs: RankLogs, rank: int, exitcode: int) -> ChildFailedError:
    path = str(logs.path(rank, "error.json"))
    return ChildFailedError("main", {rank: ProcessFailure(local_rank=rank, pid=1, exitcode=exitcode, error_file=path)})


def test_rank_that_raised_first_is_blamed(tmp_path: Path) -> None:
    logs = RankLogs(tmp_path)
    record(logs, 0, "RuntimeError: Connection closed by peer", second=5.0)
    record(logs, 1, "ValueError: the cause,\n  in two lines", second=4.5)
    error = ranks._root_cause(failed(logs, 0, exitcode=1), logs, 2)
    assert (str(error), error.rank, error.log) == (
        "ValueError: the cause, in two lines",
        1,
        tmp_path / "rank1.err",
    )


@pytest.mark.parametrize(("exitcode", "message"), [(-9, "killed by signal 9 (SIGKILL)"), (3, "ended with exit code 3")])
def test_rank_without_a_message(tmp_path: Path, exitcode: int, message: str) -> None:
    logs = RankLogs(tmp_path)
    error = ranks._root_cause(failed(logs, 1, exitcode), logs, 2)
    assert (str(error), error.rank) == (message, 1)


def test_rank_that_was_killed_is_blamed_for_lost_connections(tmp_path: Path) -> None:
    logs = RankLogs(tmp_path)
    record(logs, 0, "RuntimeError: Connection closed by peer", second=5.0)
    assert ranks._root_cause(failed(logs, 1, exitcode=-9), logs, 2).rank == 1


def test_error_file_that_was_cut_short_is_passed_over(tmp_path: Path) -> None:
    """The disk is full: the rank that failed first could not say why."""
    logs = RankLogs(tmp_path)
    logs.path(1, "error.json").write_text('{"message": {"mess')
    record(logs, 0, "OSError: rank 1 has no space left", second=time.time() + 1)
    with pytest.raises(json.JSONDecodeError) as agent:
        failed(logs, 1, exitcode=1)
    error = ranks._root_cause(agent.value, logs, 2)
    assert (str(error), error.rank) == ("OSError: rank 1 has no space left", 0)
    logs.path(0, "error.json").unlink()
    assert "is the disk full?" in str(ranks._root_cause(agent.value, logs, 2))


@pytest.mark.parametrize("left", [b"", pickle.dumps("OSError: no space left")[:-5]])
def test_pickle_of_a_rank_that_was_cut_short_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: bytes
) -> None:
    """torch hands the trace of a rank on in a file too, which the full disk cuts as well."""
    monkeypatch.setattr(ranks, "elastic_launch", lambda config, main: lambda *arguments: pickle.loads(left))
    with pytest.raises(ranks.RankError, match="an error file was cut short"):
        ranks.run_ranks(print, tmp_path, 2)


@pytest.mark.parametrize("number", ranks.STOP_SIGNALS)
def test_a_signal_during_the_clean_up_stops_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """The agent's handlers, which raise an ``Exception``, are still in place then."""

    def interrupted() -> list[Any]:
        raise SignalException("stopped", number)

    def launch(config: Any, main: Any) -> Any:
        return lambda *arguments: None

    monkeypatch.setattr(ranks, "elastic_launch", launch)
    monkeypatch.setattr(ranks.multiprocessing, "active_children", interrupted)
    with pytest.raises(KeyboardInterrupt, match="stopped"):
        ranks.run_ranks(print, tmp_path, 2)


def test_logs_of_an_attempt_are_named_by_the_rank_among_all_nodes(tmp_path: Path) -> None:
    logs = RankLogs(ranks._next_attempt(tmp_path))
    # by local rank, of the second of two nodes
    environments = {0: {"RANK": "2"}, 1: {"RANK": "3"}}
    places = logs.reify(environments)
    assert places.stdouts == {local: str(tmp_path / "1" / f"rank{2 + local}.out") for local in (0, 1)}
    assert places.stderrs == {local: str(tmp_path / "1" / f"rank{2 + local}.err") for local in (0, 1)}
    assert environments[1]["TORCHELASTIC_ERROR_FILE"] == places.error_files[1]
    assert Path(places.error_files[1]).name == "rank3.error.json"
    assert ranks._next_attempt(tmp_path) == tmp_path / "2"
