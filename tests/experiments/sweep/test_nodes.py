"""Jobs on Slurm: where nodes meet, who writes the run folder, and a job of two nodes on a fake Slurm."""

import contextlib
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from equipoise.experiments import build, runs
from equipoise.experiments.sweep import jobs, nodes, ranks
from equipoise.experiments.sweep.nodes import Node, find_node
from equipoise.experiments.sweep.plugins import PluginJobError, PluginNotes
from equipoise.experiments.sweep.ranks import RankError

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
ARRAY_JOB = {
    "SUBMITIT_EXECUTOR": "slurm",
    "SLURM_JOB_ID": "4712",
    "SLURM_ARRAY_JOB_ID": "4711",
    "SLURM_ARRAY_TASK_ID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-08],login",
}

# nothing is queued, and all nodes are this machine
SLURM = {
    "sbatch": """
cp "$1" script
export SLURM_JOB_ID=4711 SLURM_JOB_NUM_NODES=$(sed -n 's/^#SBATCH --nodes=//p' "$1") SLURM_JOB_NODELIST=localhost
bash "$1" >slurm.out 2>&1 </dev/null &
echo "Submitted batch job $SLURM_JOB_ID"
""",
    "srun": """
while [[ $1 == --* ]]; do
    case $1 in --output) out=${2//%j/$SLURM_JOB_ID}; shift ;; --error) shift ;; esac
    shift
done
export SLURM_NTASKS=$SLURM_JOB_NUM_NODES SLURM_LOCALID=0
for node in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do
    SLURM_NODEID=$node SLURM_PROCID=$node "$@" >"${out//%t/$node}" 2>&1 &
done
wait
""",
    "sacct": "echo 'JobID|State|NodeList'",
}

# a trainer of one sum over the ranks
STAND_IN = """
import json, os, signal, sys
from pathlib import Path

import torch
import torch.distributed as dist

from equipoise.experiments import launch, runs
from equipoise.experiments.sweep import ranks

# nothing of what a real trainer needs
ranks.PRELOADED = ["torch"]


def validate(config):
    pass


def main(run_folder):
    folder, rank = Path(run_folder), int(os.environ["RANK"])
    # Slurm tells all processes that time is up soon
    os.kill(os.getpid(), signal.SIGUSR2)
    dist.init_process_group("gloo")
    if os.environ.get("STAND_IN_FAILS") == str(rank):
        raise RuntimeError("boom")
    total = torch.tensor([1.0 + rank])
    dist.all_reduce(total)
    print("rank", rank, "local", os.environ["LOCAL_RANK"], "node", os.environ["SLURM_NODEID"], "sum", total.item())
    if rank == 0:
        row = {"step": 1, "tokens": 64, "loss": 2.0, "seconds": 0.1, "global_maxvio": 1.0, "local_maxvio": 2.0}
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\\n")
        runs.write_json(folder / "summary.json", {"val_bpb": 2.5})


if __name__ == "__main__":
    import stand_in

    sys.exit(launch.main(stand_in))
"""


def commands(folder: Path, texts: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make shell scripts the commands of these names."""
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\nset -eu\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def settings(*overrides: str) -> Any:
    with initialize_config_module("equipoise.configs", version_base="1.3"):
        return OmegaConf.to_container(compose("config", overrides=list(overrides)), resolve=True)


# who is who


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three nodes."""
    pytest.importorskip("submitit")
    for name, value in ARRAY_JOB.items():
        monkeypatch.setenv(name, value)


def test_nodes_of_a_job_meet_on_the_first(slurm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_node() == Node(index=1, count=3, job="4712", head="gpu07")
    assert find_node().endpoint == "gpu07:24712"
    # its neighbour in the array may share a machine
    monkeypatch.setenv("SLURM_JOB_ID", "4713")
    assert find_node().endpoint == "gpu07:24713"


def test_allocation_without_submitit_is_one_node(slurm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUBMITIT_EXECUTOR")
    assert find_node() == Node()


def test_a_process_a_gpu_is_refused(slurm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "24")
    with pytest.raises(ValueError, match=r"tasks_per_node=1, got 24 processes on 3 nodes"):
        find_node()


def test_ranks_are_shared_out_evenly() -> None:
    assert Node(0, 3).local_ranks(24) == 8
    with pytest.raises(ValueError, match=r"multiple of the 3 nodes .*hydra\.launcher\.nodes.*, got 8"):
        Node(0, 3).local_ranks(8)


def test_agents_meet_by_the_number_of_their_node() -> None:
    there = ranks._rendezvous(Node(1, 2, "4711", "gpu07"), Path("runs/table/eqb-s0-1a2b"), 16)
    assert {there[name] for name in ("min_nodes", "max_nodes")} == {2}
    assert (there["nproc_per_node"], there["run_id"]) == (8, "4711-eqb-s0-1a2b")
    assert (there["rdzv_backend"], there["rdzv_endpoint"]) == ("static", "gpu07:24711")
    assert there["rdzv_configs"]["rank"] == 1
    alone = ranks._rendezvous(Node(), Path("eqb"), 16)
    assert (alone["max_nodes"], alone["nproc_per_node"], alone["rdzv_endpoint"]) == (1, 16, "localhost:0")


# what the other nodes do

CONFIG = {
    "name": "table",
    "runs": "runs",
    "seed": 0,
    "launch": True,
    "balancer": {"name": "eqb"},
    "data": {"microbatches": 8},
    "optim": {"steps": 1},
    "parallel": {"ranks": 2},
}
TRAINER: Any = SimpleNamespace(validate=lambda config: None, main=None)


@pytest.fixture
def second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The run folders in which this node, the second of two, has started its ranks."""
    started: list[Path] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs, "find_node", lambda: Node(1, 2))
    monkeypatch.setattr(jobs, "wait_for", lambda path: None)
    monkeypatch.setattr(jobs, "take_part", lambda main, folder, ranks: started.append(folder))
    return started


def test_other_nodes_write_nothing(second: list[Path]) -> None:
    assert jobs.run_one(CONFIG, TRAINER) is None
    assert second == [runs.run_folder(CONFIG)]
    assert not Path("runs").exists()


def test_other_nodes_have_nothing_to_do_in_a_run_that_is_done(second: list[Path]) -> None:
    folder = runs.run_folder(CONFIG)
    runs.open_run(folder, {key: value for key, value in CONFIG.items() if key != "launch"})
    runs.write_json(folder / "summary.json", {})
    assert jobs.run_one(CONFIG, TRAINER) is None
    assert second == []


@pytest.mark.parametrize(("there", "message"), [(2, None), (4, r"parallel\.ranks is 4 there and 2 here")])
def test_other_nodes_look_into_the_folder_when_node_0_has_written_its_config(
    second: list[Path], monkeypatch: pytest.MonkeyPatch, there: int, message: str | None
) -> None:
    """What a slow disk shows of it before is not a folder of somebody else."""
    folder = runs.run_folder(CONFIG)
    (folder / "log").mkdir(parents=True)

    def write(path: Path) -> None:
        assert path == folder / "config.yaml"
        path.write_text(yaml.safe_dump(CONFIG | {"parallel": {"ranks": there}}))

    monkeypatch.setattr(jobs, "wait_for", write)
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        jobs.run_one(CONFIG, TRAINER)
    assert second == ([] if message else [folder])


def test_bad_config_is_refused_before_the_others_wait(second: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: Any) -> None:
        raise ValueError("optim.steps: bad")

    monkeypatch.setattr(jobs, "wait_for", lambda path: pytest.fail("waited"))
    with pytest.raises(ValueError, match=r"optim\.steps: bad"):
        jobs.run_one(CONFIG, SimpleNamespace(validate=refuse, main=None))


def test_uneven_ranks_are_refused_before_anything_is_written(second: list[Path]) -> None:
    with pytest.raises(ValueError, match="multiple of the 2 nodes"):
        jobs.run_one(CONFIG | {"parallel": {"ranks": 1}}, TRAINER)
    assert not Path("runs").exists()


def test_error_of_a_rank_can_be_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_ranks(main: Any, folder: Path, ranks: int) -> None:
        raise RankError("ValueError: boom", 3, folder / "rank3.err")

    monkeypatch.setattr(ranks, "run_ranks", run_ranks)
    with pytest.raises(PluginJobError) as error:
        ranks.take_part(print, tmp_path, 4)
    assert str(pickle.loads(pickle.dumps(error.value))) == f"rank 3: ValueError: boom (log: {tmp_path}/rank3.err)"
    # so the command prints it without a trace
    assert isinstance(error.value, HydraException)


def test_a_folder_that_comes_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes.time, "sleep", lambda seconds: (tmp_path / "config.yaml").touch())
    nodes.wait_for(tmp_path / "config.yaml", seconds=60)
    assert (tmp_path / "config.yaml").exists()


def test_a_folder_that_never_comes_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"node 0 has not written .*config\.yaml in 0 s"):
        nodes.wait_for(tmp_path / "config.yaml", seconds=0)


def sweep_config(changes: dict[str, bool] | None = None, **plugins: str) -> DictConfig:
    parts = {part: plugins.get(part, "hydra._internal.core_plugins.basic_x.X") for part in ("launcher", "sweeper")}
    config = {"runs": "runs", "name": "table", "beside": ["eqb", "lei"], "dry_run": False, "launch": True}
    return OmegaConf.create(
        config | (changes or {}) | {"hydra": {part: {"_target_": target} for part, target in parts.items()}}
    )


def test_what_a_plugin_cannot_do_is_refused_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"
    monkeypatch.setenv("PATH", str(tmp_path))
    for changes in ({"dry_run": True}, {"launch": False}):
        with pytest.raises(SystemExit, match=r"dry_run=true and launch=false know Hydra's own launcher"):
            PluginNotes().on_multirun_start(sweep_config(changes, launcher=slurm))
    with pytest.raises(SystemExit, match="there is no Slurm here"):
        PluginNotes().on_multirun_start(sweep_config(launcher=slurm))
    PluginNotes().on_multirun_start(sweep_config({"dry_run": True}))
    (tmp_path / "srun").touch(mode=0o755)
    PluginNotes().on_multirun_start(sweep_config(launcher=slurm))


@pytest.mark.parametrize(("plugin", "said"), [("launcher", True), ("sweeper", True), ("", False)])
def test_sweep_of_a_plugin_says_what_is_left_to_do(capsys: pytest.CaptureFixture[str], plugin: str, said: bool) -> None:
    config = sweep_config(**({plugin: "hydra_plugins.own.Own"} if plugin else {}))
    PluginNotes().on_multirun_start(config)
    PluginNotes().on_multirun_end(config)
    out, errors = capsys.readouterr()
    assert out == "the table: equipoise-report runs/table\n" * said
    assert errors == "equipoise: beside is not run by a plugin: add balancer=eqb,lei as a sweep\n" * said


# a job


Submit = Callable[[], tuple["subprocess.CompletedProcess[str]", str]]


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submit:
    """Submits a job of two nodes to the fake Slurm and waits for it; gives what the command and the nodes said."""
    pytest.importorskip("submitit")
    commands(tmp_path / "bin", SLURM, monkeypatch)
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = [sys.executable, "stand_in.py", "-m", "hydra/launcher=slurm", "hydra.launcher.nodes=2", "balancer=none"]
    command += ["hydra.launcher.partition=long", "name=table", "optim.steps=1", "parallel.ranks=2"]

    def run() -> tuple["subprocess.CompletedProcess[str]", str]:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        return done, "\n".join(path.read_text() for path in tmp_path.glob("runs/table/.submitit/*/*.out"))

    return run


@pytest.mark.slow
def test_rank_of_another_node_that_fails_on_a_fake_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, submit: Submit
) -> None:
    monkeypatch.setenv("STAND_IN_FAILS", "1")
    done, logs = submit()
    assert done.returncode == 1, done.stderr + logs
    (folder,) = tmp_path.glob("runs/table/none-*")
    assert runs.run_state(folder) == runs.RunState.CUT
    failed = runs.read_json(folder / "failed.json")
    assert (failed["rank"], failed["error"], failed["log"]) == (1, "RuntimeError: boom", "log/1/rank1.err")
    assert "rank 1: RuntimeError: boom" in done.stderr


@pytest.mark.slow
def test_job_of_two_nodes_on_a_fake_slurm(tmp_path: Path, submit: Submit) -> None:
    done, logs = submit()
    assert done.returncode == 0, done.stderr + logs
    assert done.stdout == "the table: equipoise-report runs/table\n"
    (folder,) = tmp_path.glob("runs/table/none-*")
    assert runs.run_state(folder) == runs.RunState.DONE
    assert runs.load_config(folder)["parallel"]["ranks"] == 2
    assert [path.read_text() for path in sorted(folder.glob("log/*/*.out"))] == [
        f"rank {rank} local 0 node {rank} sum 3.0\n" for rank in (0, 1)
    ]
    asked = {line.removeprefix("#SBATCH --") for line in (tmp_path / "script").read_text().splitlines()}
    assert {"nodes=2", "ntasks-per-node=1", "gpus-per-node=8", "cpus-per-task=64", "time=240"} <= asked
    assert {"partition=long", "job-name=table"} <= asked


# presets and examples


@pytest.mark.parametrize("count", [1, 8, 64])
def test_presets_of_gpus_pass_the_checks(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(f"parallel=gpu{count}", "model=medium", "data.microbatches=64")
    build.check(config)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert jobs.settle_ranks(config)["parallel"]["ranks"] == count
    parallel = build.make_parallel(config)
    assert parallel.dtype == torch.bfloat16
    assert parallel.dp_replicate * parallel.dp_shard * parallel.ep == (count if count > 1 else 1)


Run = Callable[..., tuple[str, str]]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a script of the examples on commands that print what they were given."""

    def run(script: str, **environment: str) -> tuple[str, str]:
        called = subprocess.run(
            ["bash", "-c", script, "example", "seed=3"],
            cwd=tmp_path,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return called.stderr, called.stdout

    given = 'echo "$@" >&2; [ -n "${DONE-}" ] || echo "torchrun --nproc-per-node=1 -m train runs/a/eqb"'
    fakes = {"equipoise": given, "torchrun": 'echo "$@"', "srun": '"$@"', "scontrol": "echo gpu07; echo gpu08"}
    commands(tmp_path / "bin", fakes, monkeypatch)
    return run


def test_example_for_sbatch(example: Run) -> None:
    script = (EXAMPLES / "slurm.sbatch").read_text()
    slurm = {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "x"}
    overrides, started = example(script, **slurm)
    config = settings(*overrides.split())
    assert (config["seed"], config["launch"], config["parallel"]["ranks"]) == (3, False, 16)
    jobs.settle_ranks(config)
    assert started == (
        "--nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-id=4711 --rdzv-endpoint=gpu07:24711 "
        "-m equipoise.experiments.train runs/a/eqb\n"
    )
    assert example(script, **slurm, DONE="1")[1] == ""
    assert re.findall(r"^#SBATCH --([a-z-]+)", script, re.MULTILINE)[1:4] == [
        "nodes",
        "ntasks-per-node",
        "gpus-per-node",
    ]


def test_example_for_kubernetes(tmp_path: Path, example: Run) -> None:
    job = yaml.safe_load((EXAMPLES / "trainjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    shell, option, script = trainer["command"]
    assert (shell, option) == ("bash", "-c")
    script = script.replace("/runs", str(tmp_path))
    (env,) = trainer["env"]
    # not of the TrainJob, which may be made again under its name
    assert env["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['batch.kubernetes.io/controller-uid']"
    overrides, started = example(script, PET_NODE_RANK="0", JOB_UID="a")
    config = settings(*overrides.split())
    assert config["parallel"]["ranks"] == trainer["numNodes"] * trainer["numProcPerNode"]
    jobs.settle_ranks(config)
    assert started == "-m equipoise.experiments.train runs/a/eqb\n"
    # the other node finds what node 0 has written
    assert example(script, PET_NODE_RANK="1", JOB_UID="a") == ("", started)
    # that of another job waits
    (tmp_path / "bin" / "sleep").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "bin" / "sleep").chmod(0o755)
    with pytest.raises(subprocess.CalledProcessError, match="exit status 9"):
        example(script, PET_NODE_RANK="1", JOB_UID="b")
    assert example(script, PET_NODE_RANK="0", JOB_UID="a", DONE="1")[1] == ""
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["volumeMounts"][0]["name"] == pod["volumes"][0]["name"]
