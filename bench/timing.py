"""What the benchmarks share: interleaved timing in one process, quartiles, facts about the machine, the result file."""

import platform
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDER = Path(__file__).parent


def interleave(calls: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 1) -> dict[str, list[float]]:
    """Time every call once a round, in turn, so that what disturbs the machine disturbs all alike.

    Returns:
        seconds of every round, by name.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warmup + repeats):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            taken = time.perf_counter() - started
            if turn >= warmup:
                seconds[name].append(taken)
    return seconds


def quartiles(values: list[float]) -> dict[str, float]:
    """Median, lower and upper quartile.

    >>> quartiles([3.0, 1.0, 2.0, 4.0, 5.0])
    {'median': 3.0, 'lower': 2.0, 'upper': 4.0}
    """
    lower, median, upper = (float(value) for value in np.quantile(values, [0.25, 0.5, 0.75]))
    return {"median": median, "lower": lower, "upper": upper}


def facts() -> dict[str, Any]:
    """Date, processor, threads and versions."""
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "numpy")},
        },
    }


def cpu_model() -> str:
    """Name of the processor, as far as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
