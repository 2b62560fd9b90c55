"""The rows of a bench in processes, one stream and seed at a time, and how far they are."""

import itertools
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..sweep.progress import PLAIN_SECONDS, POLL_SECONDS, format_seconds, print_line
from .plan import Row
from .study import Outcome, run_rows

# in a worker: where it says which row it begins
_begun: Any = None


def run_all(config: dict[str, Any], rows: Sequence[Row], console: Console) -> list[Outcome]:
    """Run all rows, in as many processes as there are cores (or ``processes``), and show how far they are."""
    units = [list(unit) for _, unit in itertools.groupby(rows, lambda row: (row.stream, row.seed))]
    cores = os.cpu_count() or 1
    processes = min(cores if config["processes"] == "auto" else config["processes"], len(units))
    threads = max(1, torch.get_num_threads() // processes)
    with _progress(console, len(rows)) as begin:
        if processes > 1:
            return _run_in_processes(config, units, processes, threads, begin)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return [outcome for unit in units for outcome in run_rows(config, unit, begin)]
        finally:
            torch.set_num_threads(before)


def _run_in_processes(
    config: dict[str, Any], units: Sequence[list[Row]], processes: int, threads: int, begin: Callable[[Row], None]
) -> list[Outcome]:
    context = multiprocessing.get_context("spawn")
    begun = context.Queue()
    pool = ProcessPoolExecutor(processes, context, _start, (begun, threads))
    try:
        futures = [pool.submit(_work, config, unit) for unit in units]
        left = set(futures)
        while left:
            done, left = wait(left, POLL_SECONDS, FIRST_COMPLETED)
            for future in done:
                future.result()
            _drain(begun, begin)
        pool.shutdown()
        return [outcome for future in futures for outcome in future.result()]
    # stopped, or a worker was killed: the others would work on
    except BaseException:
        workers = multiprocessing.active_children()
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.terminate()
        raise


def _drain(begun: Any, begin: Callable[[Row], None]) -> None:
    while True:
        try:
            begin(begun.get_nowait())
        except queue.Empty:
            return


def _start(begun: Any, threads: int) -> None:
    """Make a worker ready: Ctrl-C reaches it too, and its parent decides; without its parent it ends."""
    global _begun
    _begun = begun
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _work(config: dict[str, Any], rows: Sequence[Row]) -> list[Outcome]:
    return list(run_rows(config, rows, _begun.put))


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[Row], None]]:
    """A live line on a terminal, else a plain one now and then; gives what is to be called as a row begins."""
    if not console.is_terminal:
        yield _Lines(console, total)
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=total)
        begun = itertools.count()

        def begin(row: Row) -> None:
            progress.update(task, description=row.label, completed=next(begun))

        yield begin


class _Lines:
    """``[120/672] skewed-s0 eqb on 8x1, 40 s left``, every ten seconds."""

    def __init__(self, console: Console, total: int) -> None:
        self.console = console
        self.total = total
        self.begun = 0
        self.started = self.shown = time.monotonic()

    def __call__(self, row: Row) -> None:
        now = time.monotonic()
        if self.begun and now - self.shown >= PLAIN_SECONDS:
            self.shown = now
            left = (now - self.started) / self.begun * (self.total - self.begun)
            line = f"[{self.begun}/{self.total}] {row.label}, {format_seconds(left)} left"
            print_line(self.console, line)
        self.begun += 1
