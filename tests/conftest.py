import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

# the kernels are defined for the interpreter or for a GPU when they are imported; started processes inherit the choice
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

TESTS = Path(__file__).parent
# what ranks run is a package, which both they and the tests import
sys.path.insert(0, str(TESTS))


@pytest.fixture
def interpreter() -> None:
    """For tests that run the Triton kernels on CPU tensors: skip where they are compiled for a GPU."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels on CPU tensors need the interpreter: TRITON_INTERPRET=1")


@pytest.fixture(scope="session")
def rank_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Where the eight ranks of ``ranks.worker`` have written what they found; they run once for all tests."""
    base = tmp_path_factory.getbasetemp()
    # of several test processes, one runs them and the others wait
    shared = base if worker_id == "master" else base.parent
    folder = shared / "ranks"
    with FileLock(shared / "ranks.lock"):
        if not folder.exists():
            folder.mkdir()
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
            with (folder / "log").open("w") as log:
                command = [sys.executable, "-m", "ranks.worker", str(folder)]
                subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False)
    return folder


@pytest.fixture(scope="session")
def eight_ranks(rank_folder: Path) -> Callable[[str], list[Any]]:
    """``eight_ranks(check)``: what each rank found in a check of ``ranks.worker``; fails with its traces, if any."""
    cache: dict[str, list[dict[str, Any]]] = {}

    def read(check: str) -> list[Any]:
        if check not in cache:
            paths = [rank_folder / f"{check}-{rank}.pt" for rank in range(8)]
            cache[check] = [torch.load(path) if path.exists() else {"trace": "nothing written"} for path in paths]
        traces = [f"rank {rank}: {found['trace']}" for rank, found in enumerate(cache[check]) if "trace" in found]
        if traces:
            pytest.fail("\n".join([*traces, (rank_folder / "log").read_text()]))
        return [found["found"] for found in cache[check]]

    return read
