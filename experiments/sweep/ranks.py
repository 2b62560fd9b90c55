"""Start the ranks of one job with torchrun's own API, and say in one line why one of them failed."""

import contextlib
import json
import logging
import multiprocessing
import os
import pickle
import select
import signal
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from .nodes import PATIENCE_SECONDS, Node, find_node
from .plugins import PluginJobError

# the optimizer imports torch._dynamo, which takes as long as torch itself
PRELOADED = ["equipoise.experiments.train", "torch._dynamo", "wandb"]
# what reading a file raises that is not all there
CUT_SHORT = (json.JSONDecodeError, pickle.UnpicklingError, EOFError)
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
        # by local rank, of which every node has a 0
        out, err, errors = (
            {local: str(self.path(int(env["RANK"]), kind)) for local, env in envs.items()}
            for kind in ("out", "err", "error.json")
        )
        for local, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = errors[local]
        return LogsDest(stdouts=out, stderrs=err, error_files=errors)


def run_ranks(main: Callable[[str], None], folder: Path, ranks: int) -> None:
    """Run ``main(folder)`` in ``ranks`` new processes and wait for them; ``main`` must be importable by its name.

    Of a job on several nodes every node calls this and starts its share of the ranks, once all are there. Their output
    goes to ``<folder>/log/<attempt>/``, attempts counted from 1.

    Raises:
        ValueError: if the ranks cannot be shared out evenly over the nodes.
        RankError: if a rank failed; the others have been stopped.
        KeyboardInterrupt: on Ctrl-C, SIGTERM, SIGHUP or SIGQUIT; all ranks have been stopped.
    """
    logs = RankLogs(_next_attempt(folder / "log"))
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    config = LaunchConfig(
        **_rendezvous(find_node(), folder, ranks),
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
    _start_server()
    _quiet_torch()
    try:
        try:
            elastic_launch(config, _run_rank)(main, str(folder), os.getpid())
        # the agent reads what ranks that failed have left, JSON and a pickle, and a full disk cuts them short
        except (ChildFailedError, *CUT_SHORT) as error:
            raise _root_cause(error, logs, ranks) from error
        finally:
            for child in multiprocessing.active_children():
                child.kill()
            for number, handler in handlers.items():
                signal.signal(number, handler)
    # an Exception, so it would pass for the failure of one job and the next would start; the clean-up may be hit too
    except SignalException as stopped:
        raise KeyboardInterrupt(str(stopped)) from stopped


def take_part(main: Callable[[str], None], folder: Path, ranks: int) -> None:
    """Run this node's share of the ``ranks`` of a job whose folder node 0 has made ready.

    Raises:
        PluginJobError: if a rank failed; node 0 writes down why.
    """
    try:
        run_ranks(main, folder, ranks)
    except RankError as error:
        # what submitit hands back is pickled, and that one does not come out again
        raise PluginJobError(f"rank {error.rank}: {error} (log: {error.log})") from None


def _rendezvous(node: Node, folder: Path, ranks: int) -> dict[str, Any]:
    """How the agents of all nodes meet, each of which starts the ranks of its node."""
    here = {"min_nodes": node.count, "max_nodes": node.count, "nproc_per_node": node.local_ranks(ranks)}
    if node.count == 1:
        return here | {"run_id": uuid.uuid4().hex, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    # c10d numbers the nodes by their names; this keeps rank 0, which writes the record, on node 0, which reads it
    meeting = {"rdzv_backend": "static", "rdzv_endpoint": node.endpoint}
    patience = {"rank": node.index, "timeout": PATIENCE_SECONDS}
    return here | meeting | {"run_id": f"{node.job}-{folder.name}", "rdzv_configs": patience}


def _start_server() -> None:
    """Start the server that forks the ranks, so that it and they ignore SIGUSR2.

    Slurm sends it when time is up, to tell the launcher, but to all processes. What is ignored stays so in a program
    that is started.
    """
    handler = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGUSR2, handler)


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


def _root_cause(error: Exception, logs: RankLogs, ranks: int) -> RankError:
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
