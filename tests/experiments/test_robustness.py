"""Runs that are killed, stopped or run out of disk go on to the bits of one left alone; checkpoints run no code."""

import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from equipoise.bench import torture
from equipoise.experiments import launch
from equipoise.experiments.checkpoint import load_checkpoint, save_checkpoint
from equipoise.experiments.tracker import Tracker

DEADLINE_SECONDS = 300.0

# the trainer with faults.json beside it: by seed, at which event of which rank it does what
HURT = """
import json, os, resource, signal, sys, time
from pathlib import Path

from torch.distributed.checkpoint import FileSystemWriter

from equipoise.experiments import launch, runs, tracker, train

validate = train.validate


def main(run_folder):
    faults = json.loads(Path(__file__).with_name("faults.json").read_text())
    event, number, rank, what = faults.get(str(runs.load_config(Path(run_folder))["seed"]), (None, 0, 0, None))
    if rank == int(os.environ["RANK"]):
        if event == "row":
            after(tracker.Tracker, "log", lambda count, row: row["step"] == number, what)
        if event == "checkpoint":
            before(FileSystemWriter, "write_data", lambda count, plan: count == number, what)
    train.main(run_folder)


def after(owner, name, due, what):
    plain, calls = getattr(owner, name), []

    def hooked(self, argument, *rest):
        calls.append(1)
        result = plain(self, argument, *rest)
        if due(len(calls), argument):
            hurt(what)
        return result

    setattr(owner, name, hooked)


def before(owner, name, due, what):
    plain, calls = getattr(owner, name), []

    def hooked(self, argument, *rest):
        calls.append(1)
        if due(len(calls), argument):
            hurt(what)
        return plain(self, argument, *rest)

    setattr(owner, name, hooked)


def hurt(what):
    launcher = int(os.environ["LAUNCHER"])
    if what == "disk":
        # nothing may grow beyond this any more: a write ends in the middle
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        return
    if what == "rank":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "launcher":
        os.kill(launcher, signal.SIGKILL)
    if what == "group":
        os.killpg(launcher, signal.SIGKILL)
    if what == "SIGTERM":
        os.kill(launcher, signal.SIGTERM)
    if what == "Ctrl-C":
        os.killpg(launcher, signal.SIGINT)
    while True:
        signal.pause()


if __name__ == "__main__":
    import hurt

    os.environ["LAUNCHER"] = str(os.getpid())
    sys.exit(launch.main(hurt))
"""
TINY = [
    *("balancer=eqb_lei", "model.width=16", "model.num_heads=2", "model.num_layers=2", "model.num_experts=8"),
    *("model.top_k=2", "model.expert_width=8", "model.shared_width=8", "data=text", "data.path=corpus.txt"),
    *("data.sequence_length=32", "data.microbatches=4", "data.validation_sequences=8", "optim.steps=12"),
    *("optim.warmup=2", "tracker=none", "validation.every=6", "checkpoint.every=4", "parallel.ranks=2"),
]
# what the launches of the hurt sweep of three seeds meet, one after the other
LAUNCHES: list[dict[int, tuple[str, int, int, str]]] = [
    {0: ("row", 6, 0, "rank"), 1: ("checkpoint", 2, 1, "disk"), 2: ("row", 6, 0, "SIGTERM")},
    {2: ("row", 7, 0, "Ctrl-C")},
    {2: ("row", 11, 0, "launcher")},
    {2: ("checkpoint", 1, 0, "group")},
    {},
]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("robustness")
    (folder / "hurt.py").write_text(HURT)
    (folder / "corpus.txt").write_text(" ".join(str(number * number) for number in range(20_000)))
    return folder


def start(folder: Path, name: str, faults: dict[int, Any]) -> SimpleNamespace:
    """One launch of the sweep to its end, however that comes, and until nothing of it is left."""
    (folder / "faults.json").write_text(json.dumps(faults))
    process = subprocess.Popen(
        [sys.executable, "hurt.py", "-m", "seed=0,1,2", f"name={name}", *TINY],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        out, _ = process.communicate(timeout=DEADLINE_SECONDS)
        deadline = time.monotonic() + torture.GONE_SECONDS
        while left := torture.living(process.pid):
            assert time.monotonic() < deadline, f"still there: {left}"
            time.sleep(0.01)
    finally:
        for pid in torture.living(process.pid):
            os.kill(pid, signal.SIGKILL)
    seeds = {seed: record_of(next(iter(folder.glob(f"runs/{name}/*-s{seed}-*")), None)) for seed in range(3)}
    return SimpleNamespace(status=process.returncode, out=out, seeds=seeds)


def record_of(run: Path | None) -> SimpleNamespace | None:
    """The state of a run: checkpoints, complete rows, why it failed."""
    if run is None:
        return None
    rows = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    checkpoints = sorted(path.name for path in run.glob("checkpoints/*"))
    failed = json.loads((run / "failed.json").read_text()) if (run / "failed.json").exists() else None
    return SimpleNamespace(rows=len(rows), checkpoints=checkpoints, failed=failed, path=run)


@pytest.fixture(scope="module")
def hurt(workplace: Path) -> list[SimpleNamespace]:
    """The hurt sweep, started again until it is complete."""
    return [start(workplace, "hurt", faults) for faults in LAUNCHES]


@pytest.fixture(scope="module")
def reference(workplace: Path, hurt: list[SimpleNamespace]) -> Path:
    assert start(workplace, "alone", {}).status == 0
    return workplace / "runs" / "alone"


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


@pytest.mark.slow
@needs_proc
def test_sigkill_of_a_rank_fails_its_job_and_no_other(hurt: list[SimpleNamespace]) -> None:
    first, second = (launched.seeds[0] for launched in hurt[:2])
    assert (first.rows, first.checkpoints) == (6, ["step-4"])
    assert first.failed["rank"] == 0
    assert "killed by signal 9" in first.failed["error"]
    assert (second.rows, second.failed) == (12, None)


@pytest.mark.slow
@needs_proc
def test_disk_full_on_another_rank_leaves_the_last_good_checkpoint(hurt: list[SimpleNamespace]) -> None:
    first, second = (launched.seeds[1] for launched in hurt[:2])
    assert first.checkpoints == [".step-8", "step-4"]
    assert re.search(r"step-8 was not written \(rank 1: OSError: .*File too large\)", first.failed["error"])
    assert second.checkpoints == ["step-12", "step-8"]


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize(
    ("index", "status", "rows", "checkpoints"),
    [
        (0, launch.STOPPED, 6, ["step-4"]),
        (1, launch.STOPPED, 7, ["step-4"]),
        (2, -signal.SIGKILL, 11, ["step-4", "step-8"]),
        (3, -signal.SIGKILL, 12, [".step-12", "step-4", "step-8"]),
    ],
    ids=["SIGTERM", "Ctrl-C", "SIGKILL of the launcher", "SIGKILL of the group"],
)
def test_what_stops_the_launcher_stops_everything(
    hurt: list[SimpleNamespace], index: int, status: int, rows: int, checkpoints: list[str]
) -> None:
    """That nothing is left is checked at every launch."""
    launched = hurt[index]
    assert launched.status == status, launched.out
    assert (launched.seeds[2].rows, launched.seeds[2].checkpoints) == (rows, checkpoints)
    assert launched.seeds[2].failed is None


@pytest.mark.slow
@needs_proc
def test_restarts_end_with_the_bits_of_an_uninterrupted_sweep(hurt: list[SimpleNamespace], reference: Path) -> None:
    assert hurt[-1].status == 0, hurt[-1].out
    assert torture.differences(reference, hurt[-1].seeds[0].path.parent) == []


# the record, with a disk that is full


def config() -> dict[str, Any]:
    return {"tracker": {"mode": "none"}, "balancer": {"name": "eqb"}}


def log(record: Tracker, *steps: int) -> None:
    for step in steps:
        record.log({"step": step, "loss": 1.0 / step}, torch.full((2, 3), step), torch.zeros(2, 3))
        if step % 4 == 0:
            record.flush()


def steps_of(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


class FullDisk:
    """A file that takes half of the next text."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def write(self, text: str) -> None:
        self.file.write(text[: len(text) // 2])
        self.file.flush()
        raise OSError(28, "No space left on device")


def test_disk_full_in_a_row_of_metrics_leaves_a_torn_line_that_goes(tmp_path: Path) -> None:
    record = Tracker(tmp_path, config(), 0)
    log(record, *range(1, 7))
    record.file = FullDisk(record.file)
    with pytest.raises(OSError, match="No space left"):
        log(record, 7)
    with pytest.raises(json.JSONDecodeError):
        steps_of(tmp_path)
    record = Tracker(tmp_path, config(), 4)
    log(record, *range(5, 9))
    assert steps_of(tmp_path) == list(range(1, 9))
    assert pd.read_parquet(tmp_path / "load.parquet").step.unique().tolist() == list(range(1, 9))


def test_disk_full_in_the_loads_leaves_no_half_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Tracker(tmp_path, config(), 0)
    log(record, *range(1, 8))

    def full(table: Any, path: Path) -> None:
        path.write_bytes(b"PAR1")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pq, "write_table", full)
        with pytest.raises(OSError, match="No space left"):
            log(record, 8)
    assert pd.read_parquet(tmp_path / "load.parquet").step.max() == 4
    log(Tracker(tmp_path, config(), 4), *range(5, 9))
    assert sorted(path.name for path in (tmp_path / "load.parquet").iterdir()) == [
        "part-00000001-00000004.parquet",
        "part-00000005-00000008.parquet",
    ]


@pytest.mark.parametrize("torn", ['{"step": 7, "lo', "", '{"step": 7, "loss": 0.1}'], ids=["half", "none", "no end"])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, torn: str) -> None:
    log(Tracker(tmp_path, config(), 0), *range(1, 7))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    log(Tracker(tmp_path, config(), 4), 5)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5]


def test_a_record_that_lacks_steps_of_its_checkpoint_is_refused(tmp_path: Path) -> None:
    log(Tracker(tmp_path, config(), 0), 1, 2)
    with pytest.raises(ValueError, match="does not hold the steps 1 to 4"):
        Tracker(tmp_path, config(), 4)


# checkpoints, with a kill between any two operations


class Killed(BaseException):
    """Where the process would have ended."""


@pytest.fixture
def single_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A process group of this process alone."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        model(torch.full((2, 3), float(step))).sum().backward()
        optimizer.step()
    return model, optimizer


def position(step: int) -> dict[str, int]:
    return {"step": step, "tokens": 64 * step, "skipped": 0}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def kill_before_rename(patch: pytest.MonkeyPatch) -> None:
    plain = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name == ".step-3":
            raise Killed
        return plain(path, target)

    patch.setattr(Path, "rename", rename)


def kill_before_removal(patch: pytest.MonkeyPatch) -> None:
    remove = shutil.rmtree

    def rmtree(path: Path, ignore_errors: bool = False) -> None:
        if path.exists() and path.name == "step-1":
            raise Killed
        remove(path, ignore_errors=ignore_errors)

    patch.setattr(shutil, "rmtree", rmtree)


def kill_half_way_through_removal(patch: pytest.MonkeyPatch) -> None:
    remove = shutil.rmtree

    def rmtree(path: Path, ignore_errors: bool = False) -> None:
        if path.exists() and path.name == "step-1":
            (path / ".metadata").unlink()
            raise Killed
        remove(path, ignore_errors=ignore_errors)

    patch.setattr(shutil, "rmtree", rmtree)


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize(
    ("kill", "left", "newest"),
    [
        (kill_before_rename, [".step-3", "step-1", "step-2"], 2),
        (kill_before_removal, ["step-1", "step-2", "step-3"], 3),
        (kill_half_way_through_removal, ["step-1", "step-2", "step-3"], 3),
    ],
)
def test_a_kill_between_rename_and_removal_leaves_a_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill: Any, left: list[str], newest: int
) -> None:
    model, optimizer = trained(1)
    for step in (1, 2):
        save_checkpoint(tmp_path, model, optimizer, position(step))
    with monkeypatch.context() as patch:
        kill(patch)
        with pytest.raises(Killed):
            save_checkpoint(tmp_path, model, optimizer, position(3))
    assert names(tmp_path) == left
    assert load_checkpoint(tmp_path, model, optimizer) == position(newest)
    save_checkpoint(tmp_path, model, optimizer, position(4))
    assert names(tmp_path) == sorted(["step-4", f"step-{newest}"])


@pytest.mark.usefixtures("single_rank")
def test_a_draft_of_another_step_goes_with_the_next_checkpoint(tmp_path: Path) -> None:
    """A run that was killed while it wrote may be resumed with other steps between checkpoints."""
    (tmp_path / ".step-3").mkdir()
    save_checkpoint(tmp_path, *trained(1), position(4))
    assert names(tmp_path) == ["step-4"]


@pytest.mark.usefixtures("single_rank")
def test_a_checkpoint_comes_back_to_the_last_bit(tmp_path: Path) -> None:
    model, optimizer = trained(3)
    save_checkpoint(tmp_path, model, optimizer, position(3))
    other, fresh = trained(0)
    assert load_checkpoint(tmp_path, other, fresh) == position(3)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    for ours, theirs in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ("step", "exp_avg", "exp_avg_sq"))


@pytest.mark.usefixtures("single_rank")
def test_a_checkpoint_of_sharded_tensors_comes_back(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    before = [parameter.full_tensor().clone() for parameter in model.parameters()]
    save_checkpoint(tmp_path, model, optimizer, position(1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert load_checkpoint(tmp_path, model, optimizer) == position(1)
    assert all(map(torch.equal, before, (parameter.full_tensor() for parameter in model.parameters())))


class Malicious:
    """Runs code where it is unpickled: makes the file ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def tamper(place: Path, change: Any) -> None:
    metadata = FileSystemReader(place).read_metadata()
    (place / ".metadata").write_bytes(pickle.dumps(change(metadata)))


@pytest.mark.usefixtures("single_rank")
def test_metadata_that_would_run_code_is_refused_and_not_run(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    save_checkpoint(tmp_path, model, optimizer, position(1))
    trap = tmp_path / "trap"

    def change(metadata: Any) -> Any:
        metadata.planner_data["trap"] = Malicious(trap)
        return metadata

    tamper(tmp_path / "step-1", change)
    pickle.loads((tmp_path / "step-1" / ".metadata").read_bytes())
    assert trap.exists()
    trap.unlink()
    with pytest.raises(
        ValueError, match=r"step-1 cannot be read .*asks for pathlib\S*\.touch, which describes no tensor"
    ):
        load_checkpoint(tmp_path, model, optimizer)
    assert not trap.exists()


@pytest.mark.usefixtures("single_rank")
def test_a_data_file_that_would_run_code_is_refused_and_not_run(tmp_path: Path) -> None:
    """The library reads what the metadata call bytes with ``weights_only=False``."""
    model, optimizer = trained(1)
    save_checkpoint(tmp_path, model, optimizer, position(1))
    place, trap = tmp_path / "step-1", tmp_path / "trap"

    def change(metadata: Any) -> Any:
        metadata.state_dict_metadata["position.step"] = BytesStorageMetadata()
        (index,) = (index for index in metadata.storage_data if index.fqn == "position.step")
        info = metadata.storage_data.pop(index)
        torch.save(Malicious(trap), place / info.relative_path)
        info.offset, info.length = 0, (place / info.relative_path).stat().st_size
        metadata.storage_data[type(index)("position.step")] = info
        return metadata

    tamper(place, change)
    dcp.load({"position": {"step": torch.tensor(0)}}, checkpoint_id=place)
    assert trap.exists()
    trap.unlink()
    with pytest.raises(ValueError, match=r"step-1 cannot be read .*BytesStorageMetadata"):
        load_checkpoint(tmp_path, model, optimizer)
    assert not trap.exists()


@pytest.mark.usefixtures("single_rank")
def test_every_tensor_of_a_checkpoint_loads_with_weights_only(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, *trained(1), position(1))
    metadata = FileSystemReader(tmp_path / "step-1").read_metadata()
    assert {index.fqn for index in metadata.storage_data} == metadata.state_dict_metadata.keys()
    for info in metadata.storage_data.values():
        part = (tmp_path / "step-1" / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        (tmp_path / "part").write_bytes(part)
        assert isinstance(torch.load(tmp_path / "part", weights_only=True), torch.Tensor)


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_torn_checkpoint_says_what_to_do(tmp_path: Path, name: str) -> None:
    model, optimizer = trained(1)
    for step in (1, 2):
        save_checkpoint(tmp_path, model, optimizer, position(step))
    whole = (tmp_path / "step-2" / name).read_bytes()
    (tmp_path / "step-2" / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"step-2 cannot be read .*remove it to go on from the one before"):
        load_checkpoint(tmp_path, model, optimizer)
    shutil.rmtree(tmp_path / "step-2")
    assert load_checkpoint(tmp_path, model, optimizer) == position(1)
