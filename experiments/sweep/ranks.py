"""Start the ranks of one job with torchrun's own API, and say in one line why one of them failed."""

import contextlib
import json
import logging
import multiprocessing
import os
import select
import signal
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

# the optimizer imports torch._dynamo, which takes as long as torch itself
PRELOADED = ["equipoise.experiments.train", "torch._dynamo", "wandb"]
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class RankError(Exception):
    """A rank failed: its own message (type and text), the global rank, the file with its output and trace."""

    def __init__(self, message: str, rank: int, log: Path) -> None:
        super().__init__(message)
        self.message, self.rank, self.log = message, rank, log


class RankLogs(LogsSpecs):
    """``rank<r>.out``, ``rank<r>.err`` and, of a rank that raised, ``rank<r>.error.json``, all in one folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(log_dir=str(folder))
        self.folder = folder

    @property
    def root_log_dir(self) -> str:
        return str(self.folder)

    def path(self, rank: int, kind: str) -> Path:
        return self.folder / f"rank{rank}.{kind}"

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self.folder.mkdir(parents=True, exist_ok=True)
        for rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = str(self.path(rank, "error.json"))
        return LogsDest(
            stdouts={rank: str(self.path(rank, "out")) for rank in envs},
            stderrs={rank: str(self.path(rank, "err")) for rank in envs},
            error_files={rank: str(self.path(rank, "error.json")) for rank in envs},
        )


def run_ranks(main: Callable[[str], None], folder: Path, ranks: int) -> None:
    """Run ``main(folder)`` in ``ranks`` new processes and wait for them; ``main`` must be importable by its name.

    Their output goes to ``<folder>/log/<attempt>/``, attempts counted from 1.

    Raises:
        RankError: if a rank failed; the others have been stopped.
        KeyboardInterrupt: on Ctrl-C, SIGTERM, SIGHUP or SIGQUIT; all ranks have been stopped.
    """
    logs = RankLogs(_next_attempt(folder / "log"))
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="forkserver",
        logs_specs=logs,
        # under nohup a hangup is ignored, and stays so
        signals_to_handle=",".join(number.name for number in STOP_SIGNALS if handlers[number] != signal.SIG_IGN),
    )
    # the API does not set it as torchrun does, and two ranks with a thread a core each wait for one another
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # one server imports what a rank needs; the ranks of all jobs of a sweep are forked from it
    multiprocessing.set_forkserver_preload(PRELOADED)
    _quiet_torch()
    try:
        try:
            elastic_launch(config, _run_rank)(main, str(folder), os.getpid())
        # the agent reads the error files of ranks that failed, and a full disk cuts them short
        except (ChildFailedError, json.JSONDecodeError) as error:
            raise _root_cause(error, logs, ranks) from error
        finally:
            for child in multiprocessing.active_children():
                child.kill()
            for number, handler in handlers.items():
                signal.signal(number, handler)
    # an Exception, so it would pass for the failure of one job and the next would start; the clean-up may be hit too
    except SignalException as stopped:
        raise KeyboardInterrupt(str(stopped)) from stopped


def _quiet_torch() -> None:
    """Silence what torch logs about ranks that fail or are stopped: the launcher says it in a line."""
    for name in list(logging.root.manager.loggerDict):
        # each of them has a level of its own, so their parent's would not do
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _run_rank(main: Callable[[str], None], folder: str, launcher: int) -> None:
    threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
    try:
        main(folder)
    except Exception:
        # the agent keeps the trace in a JSON file, people look for it in the log
        traceback.print_exc()
        raise


def _end_with(launcher: int) -> None:
    """End this rank when the launcher is gone: killed, it stops nobody, and who starts the job again would meet it."""
    try:
        # readable as soon as the process has ended
        select.select([os.pidfd_open(launcher)], [], [])
    except (AttributeError, OSError):
        # a system without it
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.kill(launcher, 0)
                time.sleep(1)
    os._exit(1)


def _next_attempt(log: Path) -> Path:
    attempts = [int(path.name) for path in log.glob("*") if path.name.isdigit()]
    return log / str(max(attempts, default=0) + 1)


def _root_cause(error: ChildFailedError | json.JSONDecodeError, logs: RankLogs, ranks: int) -> RankError:
    """The rank that failed first.

    The agent reports one rank, and where several fail at almost the same time not always the one that made the others
    lose their connection. The error files tell by their times; a signal leaves none.
    """
    rank, killed, message = 0, False, "an error file was cut short, so there is no message; is the disk full?"
    if isinstance(error, ChildFailedError):
        rank, failure = error.get_first_failure()
        killed, message = failure.exitcode < 0, _exit_message(failure)
    paths = {number: logs.path(number, "error.json") for number in range(ranks)}
    recorded = {number: text for number, path in paths.items() if (text := _recorded(path))}
    if recorded and not killed:
        rank = min(recorded, key=lambda number: paths[number].stat().st_mtime_ns)
        message = recorded[rank]
    return RankError(" ".join(message.split()), rank, logs.path(rank, "err"))


def _recorded(path: Path) -> str | None:
    """The message in an error file; None if there is none, or it was cut short by a disk that is full."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))["message"]["message"]
    except (OSError, ValueError):
        return None


def _exit_message(failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        return f"killed by signal {-failure.exitcode} ({failure.signal_name()})"
    return f"ended with exit code {failure.exitcode}"
