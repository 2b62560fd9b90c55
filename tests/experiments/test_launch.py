"""The command: composing, the checks before training, the ledger, real ranks that fail, and stopping."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from equipoise.experiments import launch, runs
from equipoise.experiments.ledger import read_ledger
from equipoise.experiments.report import command as report
from equipoise.experiments.sweep import jobs, status
from equipoise.experiments.sweep.ranks import RankError

BALANCERS = ["none", "signed_count", "gshard", "rank_averaged_qb", "histogram_qb", "eqb", "eqb_gshard", "eqb_lei"]
DEADLINE_SECONDS = 120.0
GOES_ON = "equipoise: stopped; the same command goes on from the last checkpoints\n"

# a trainer that trains nothing; the ranks are new processes, so it has to be a module that they can import
STAND_IN = """
import json, os, sys, time
from pathlib import Path

from equipoise.experiments import launch, runs


def validate(config):
    pass


def main(run_folder):
    folder, rank = Path(run_folder), int(os.environ["RANK"])
    config = runs.load_config(folder)
    seed = config["seed"]
    print("rank", rank, "of", os.environ["WORLD_SIZE"], "threads", os.environ["OMP_NUM_THREADS"])
    if rank == 1 and seed == 1:
        raise RuntimeError("boom,\\nloudly")
    if rank == 0:
        for step in range(runs.checkpoint_step(folder) + 1, config["optim"]["steps"] + 1):
            record(folder, step)
            wait(seed)
        runs.write_json(folder / "summary.json", {"val_bpb": 2.5})
    wait(seed)


def record(folder, step):
    (folder / "checkpoints" / f"step-{step}").mkdir(parents=True)
    row = {"step": step, "tokens": 64, "loss": 2.0, "seconds": 0.1, "global_maxvio": 1.0, "local_maxvio": 2.0}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\\n")


def wait(seed):
    while str(seed) in os.environ.get("STAND_IN_WAITS", "").split(",") and not Path("go").exists():
        time.sleep(0.05)


if __name__ == "__main__":
    import stand_in

    sys.exit(launch.main(stand_in))
"""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a stand-in for the trainer in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    return tmp_path


def compose(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> launch.Composed:
    monkeypatch.setattr(sys, "argv", ["equipoise", *arguments])
    return launch.compose()


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "stand_in.py", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # a shell starts what runs in its background with Ctrl-C ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "gave up waiting"
        time.sleep(0.02)


# composing


@pytest.mark.parametrize(
    ("experiment", "balancers", "seeds"),
    [
        ("paper_table", BALANCERS, "0,1,2"),
        ("quick", ["none", "rank_averaged_qb", "eqb", "eqb_lei"], "0"),
        ("smoke", ["none", "eqb"], "0"),
    ],
)
def test_experiment_composes(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, experiment: str, balancers: list[str], seeds: str
) -> None:
    # composing takes a fifth of a second a job, so one seed, which replaces those of the experiment
    composed = compose(monkeypatch, f"experiment={experiment}", "seed=7")
    assert composed.sweep
    assert [runs.run_label(config) for config in composed.configs] == [f"{name}-s7" for name in balancers]
    assert {config["name"] for config in composed.configs} == {experiment}
    # nothing but Hydra's record of the sweep
    (record,) = (workplace / "runs" / experiment).iterdir()
    assert record.name == "multirun.yaml"
    assert str(yaml.safe_load(record.read_text())["hydra"]["sweeper"]["params"]["seed"]) == seeds


def test_override_replaces_what_an_experiment_sweeps(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    composed = compose(monkeypatch, "experiment=paper_table", "seed=7", "balancer=eqb,none", "name=mine")
    assert [runs.run_label(config) for config in composed.configs] == ["eqb-s7", "none-s7"]
    assert {config["name"] for config in composed.configs} == {"mine"}


def test_single_run_leaves_nothing(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    composed = compose(monkeypatch, "balancer=none", "seed=3")
    assert not composed.sweep
    assert [runs.run_label(config) for config in composed.configs] == ["none-s3"]
    assert sorted(path.name for path in workplace.iterdir()) == ["stand_in.py"]


def test_config_dir_adds_presets(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workplace / "mine" / "balancer").mkdir(parents=True)
    (workplace / "mine" / "balancer" / "own.yaml").write_text("name: own\nbias: null\ngradient: null\n")
    composed = compose(monkeypatch, "--config-dir", "mine", "-m", "balancer=own,eqb")
    assert [config["balancer"]["name"] for config in composed.configs] == ["own", "eqb"]


def test_cfg_prints_the_config(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["equipoise", "--cfg", "job", "seed=5"])
    assert launch.main() == 0
    assert "seed: 5" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("sede=1", ["'sede' at the top", "seed, tracker"]),
        ("tracker.mod=none", ["'mod' in tracker", "entity, metrics, mode, project"]),
        ("tracker=onlin", ["tracker/onlin", "offline", "online"]),
        ("balancer=eqb,none", ["--multirun"]),
        ("seed=???", ["seed is missing"]),
        ("data=text", ["data.path is missing"]),
        ("seed", ["missing EQUAL"]),
    ],
)
def test_config_errors_name_what_is_valid(
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argument: str,
    expected: list[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["equipoise", argument])
    assert launch.main() == 1
    errors = capsys.readouterr().err
    assert all(text in errors for text in expected), errors
    assert "Traceback" not in errors


def test_presets_beside_run_once_for_each_seed_and_other_setting(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    composed = compose(
        monkeypatch,
        "-m",
        "beside=[lei]",
        "balancer=eqb_lei",
        "balancer.gradient.eta=1e-5,2e-5",
        "+balancer.gradient.more=1",
        "~balancer.bias.order",
        "seed=1,2",
        "optim.steps=3",
    )
    names = [(config["balancer"]["name"], config["seed"]) for config in composed.configs]
    assert sorted(names) == [("eqb_lei", 1), ("eqb_lei", 1), ("eqb_lei", 2), ("eqb_lei", 2), ("lei", 1), ("lei", 2)]
    assert {config["optim"]["steps"] for config in composed.configs} == {3}
    lei = next(config["balancer"] for config in composed.configs if config["balancer"]["name"] == "lei")
    assert lei["gradient"]["eta"] == 1e-5
    assert "more" not in lei["gradient"]
    assert lei["bias"] is None


def test_preset_that_is_swept_and_beside_runs_once(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    composed = compose(monkeypatch, "-m", "beside=[eqb]", "balancer=none,eqb")
    assert [config["balancer"]["name"] for config in composed.configs] == ["none", "eqb"]


@pytest.mark.parametrize(
    ("value", "expected"), [("[eqbb]", ["balancer/eqbb", "eqb_gshard"]), ("eqb", ["a list of presets", "got 'eqb'"])]
)
def test_presets_beside_that_are_none(
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    value: str,
    expected: list[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["equipoise", "-m", f"beside={value}", "balancer=none"])
    assert launch.main() == 1
    errors = capsys.readouterr().err
    assert all(text in errors for text in expected), errors


def test_dry_run_leaves_what_is_there_as_it_is(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = workplace / "runs/smoke/multirun.yaml"
    record.parent.mkdir(parents=True)
    record.write_text("mine")
    composed = compose(monkeypatch, "experiment=smoke", "balancer=none", "dry_run=True")
    assert [config["dry_run"] for config in composed.configs] == [True]
    assert record.read_text() == "mine"
    assert sys.argv[-1] == "dry_run=True"
    assert list(record.parent.iterdir()) == [record]


@pytest.mark.parametrize("name", launch.SUBCOMMANDS)
def test_subcommands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str) -> None:
    monkeypatch.setattr(sys, "argv", ["equipoise", name, "--help"])
    with pytest.raises(SystemExit):
        launch.main()
    assert f"usage: equipoise {name}" in capsys.readouterr().out


def test_subcommands_do_without_torch() -> None:
    code = "import sys; from equipoise.experiments.sweep import diff, status; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# checks and ledger, with ranks that are functions


def config_of(seed: int = 0, ranks: Any = 2, **sections: Any) -> dict[str, Any]:
    sizes = {"width": 8, "num_heads": 1, "num_layers": 1, "num_experts": 4, "top_k": 2, "expert_width": 4}
    return {
        "name": "table",
        "runs": "runs",
        "seed": seed,
        "launch": True,
        "dry_run": False,
        "beside": [],
        "balancer": {"name": "eqb", "bias": None, "gradient": None},
        "model": sizes,
        "data": {"microbatches": 8, "microbatch_sequences": 2, "sequence_length": 4},
        "optim": {"steps": 1},
        "parallel": {"strategy": "ddp", "ranks": ranks, "recompute": "none"},
        "validation": {"every": 2},
        "checkpoint": {"every": 1, "keep": True},
        "tracker": {"mode": "none"},
        "report": {"tail": 1.0},
    } | sections


def refuse(config: dict[str, Any]) -> None:
    if config["optim"]["steps"] < 1:
        raise ValueError(f"optim.steps: expected a positive number, got {config['optim']['steps']}")


TRAINER = SimpleNamespace(validate=refuse, main=None)


def finish(main: Any, folder: Path, ranks: int) -> None:
    """What two ranks leave."""
    row = '{"step": 1, "tokens": 64, "global_maxvio": 1.0, "local_maxvio": null, "seconds": 0.1}\n'
    (folder / "metrics.jsonl").write_text(row)
    runs.write_json(folder / "summary.json", {"val_bpb": 2.5})


def outcomes(lines: list[str]) -> list[str]:
    """What is said of each job in the end, without times and results."""
    return [line.split(":")[0].split(" in ")[0] for line in lines if line.startswith("[") and " done" in line]


def run(configs: list[dict[str, Any]], sweep: bool = True) -> tuple[int, list[str]]:
    out = io.StringIO()
    status = jobs.run_all(configs, sweep=sweep, trainer=TRAINER, console=Console(file=out, width=200))
    return status, out.getvalue().splitlines()


@pytest.fixture
def started(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the folders in which ranks were started; they do as ``finish`` and the report, seconds, is left out."""
    names: list[str] = []
    monkeypatch.setattr(report, "build_report", lambda folder: SimpleNamespace(complete=True))
    monkeypatch.setattr(report, "print_table", lambda table, console: None)

    def run_ranks(main: Any, folder: Path, ranks: int) -> None:
        names.append(folder.name)
        finish(main, folder, ranks)

    monkeypatch.setattr(jobs, "run_ranks", run_ranks)
    return names


@pytest.mark.parametrize(
    ("ranks", "gpus", "microbatches", "expected"),
    [("auto", 0, 8, 2), ("auto", 0, 3, 1), ("auto", 4, 8, 4), ("auto", 3, 8, 2), ("auto", 16, 8, 8), (4, 0, 8, 4)],
)
def test_ranks(monkeypatch: pytest.MonkeyPatch, ranks: Any, gpus: int, microbatches: int, expected: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    settled = jobs.settle_ranks(config_of(ranks=ranks, data={"microbatches": microbatches}))
    assert settled["parallel"]["ranks"] == expected


@pytest.mark.parametrize(
    ("ranks", "gpus", "microbatches", "message"),
    [
        (0, 0, 8, "auto or a positive whole number, got 0"),
        (-1, 0, 8, "got -1"),
        (1.5, 0, 8, "got 1.5"),
        (True, 0, 8, "got True"),
        ("all", 0, 8, "got 'all'"),
        (4, 2, 8, "at most 2, the GPUs that are visible here, got 4"),
        (3, 0, 8, r"data\.microbatches=8 .* multiple of parallel\.ranks=3"),
        (2, 0, "8", r"data\.microbatches: expected a positive whole number, got '8'"),
    ],
)
def test_ranks_refused(monkeypatch: pytest.MonkeyPatch, ranks: Any, gpus: int, microbatches: Any, message: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ValueError, match=message):
        jobs.settle_ranks(config_of(ranks=ranks, data={"microbatches": microbatches}))


def test_more_ranks_than_cores_are_named_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(jobs.os, "cpu_count", lambda: 4)
    jobs._warn.cache_clear()
    for changes in ({"ranks": 4}, {"ranks": 8, "launch": False}, {"ranks": "auto"}):
        jobs.settle_ranks(config_of(**changes))
    assert capsys.readouterr().err == ""
    for seed in range(2):
        jobs.settle_ranks(config_of(seed=seed, ranks=8))
    assert capsys.readouterr().err == (
        "equipoise: parallel.ranks=8 on 4 cores and no GPU: the ranks share cores, which is slow\n"
    )


def test_single_run_and_its_second_call(started: list[str]) -> None:
    status, lines = run([config_of()], sweep=False)
    assert status == 0
    assert "val_bpb 2.500, MaxVio global 1.00 local nan from step 1" in lines[-2]
    assert lines[-1] == f"runs/table/{started[0]}"
    stored = runs.load_config(Path(lines[-1]))
    assert stored["parallel"]["ranks"] == 2
    assert "launch" not in stored
    status, lines = run([config_of()], sweep=False)
    assert status == 0
    assert "was done before" in lines[0]
    assert len(started) == 1


def test_sweep_skips_what_is_done_and_resumes_what_was_cut(started: list[str]) -> None:
    assert run([config_of(seed=0), config_of(seed=1)])[0] == 0
    first = list(started)
    cut = Path("runs/table") / first[1]
    (cut / "summary.json").unlink()
    (cut / "checkpoints").mkdir()
    status, lines = run([config_of(seed=seed) for seed in range(3)])
    assert status == 0
    assert started[2:3] == first[1:]
    assert len(started) == 4
    assert (cut / "checkpoints").is_dir()
    assert outcomes(lines) == ["[1/3] eqb-s0 was done before", "[2/3] eqb-s1 done", "[3/3] eqb-s2 done"]


def test_run_that_is_done_takes_new_values_of_what_cannot_change_its_result(started: list[str]) -> None:
    run([config_of()], sweep=False)
    folder = Path("runs/table") / started[0]
    rows = [{"step": step, "global_maxvio": float(step), "local_maxvio": None} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = contents(folder)
    with runs.claim(folder):
        assert run([config_of(report={"tail": 0.5})], sweep=False)[0] == 0
    # of another launcher that is at work there nothing is changed
    assert contents(folder)["config.yaml"] == before["config.yaml"]
    for launches, new in ((True, {"tail": 0.5, "axes": ["model.width"]}), (False, {"tail": 0.25})):
        assert run([config_of(report=new, launch=launches)], sweep=False)[0] == 0
        after = contents(folder)
        assert {name for name in after if after[name] != before[name]} - {runs.LOCK} == {"config.yaml"}
        assert after[runs.LOCK][0] == b""
        assert runs.load_config(folder)["report"] == new
    assert len(started) == 1


def test_what_is_said_of_a_run_is_over_the_tail_of_the_new_command(started: list[str]) -> None:
    run([config_of(optim={"steps": 2})], sweep=False)
    rows = [{"step": step, "global_maxvio": float(step), "local_maxvio": None} for step in (1, 2)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (Path("runs/table") / started[0] / "metrics.jsonl").write_text(text)
    for tail, found in ((1.0, "MaxVio global 1.50"), (0.5, "MaxVio global 2.00")):
        assert found in run([config_of(optim={"steps": 2}, report={"tail": tail})], sweep=False)[1][0]


@pytest.mark.parametrize("text", [None, '{"step": 1', "1\n"], ids=["none", "half", "no row"])
def test_metrics_that_cannot_be_read_do_not_stop_the_sweep(started: list[str], text: str | None) -> None:
    run([config_of()])
    metrics = Path("runs/table") / started[0] / "metrics.jsonl"
    metrics.unlink() if text is None else metrics.write_text(text)
    status, lines = run([config_of(), config_of(seed=1)])
    assert status == 0
    assert "eqb-s0 was done before: its metrics cannot be read (" in "".join(lines)
    assert [name[:6] for name in started] == ["eqb-s0", "eqb-s1"]


def test_config_that_is_not_yaml_fails_its_job_alone(started: list[str]) -> None:
    run([config_of()])
    (Path("runs/table") / started[0] / "config.yaml").write_text("a: [")
    status, lines = run([config_of(), config_of(seed=1)])
    assert status == 1
    assert "config.yaml is not YAML" in lines[1]
    assert [name[:6] for name in started] == ["eqb-s0", "eqb-s1"]


def test_bad_config_is_named_before_training_and_others_run(started: list[str]) -> None:
    status, lines = run([config_of(seed=0, optim={"steps": 0}), config_of(seed=1)])
    assert status == 1
    assert lines[:2] == ["1 of 2 jobs failed:", "  eqb-s0: optim.steps: expected a positive number, got 0"]
    assert lines[-2:] == lines[:2]
    assert [name[:6] for name in started] == ["eqb-s1"]


@pytest.mark.parametrize("changes", [{}, {"launch": False}, {"dry_run": True}])
def test_sweep_of_bad_configs_only_says_so_once(started: list[str], changes: dict[str, Any]) -> None:
    status, lines = run([config_of(optim={"steps": 0}, **changes)])
    assert status == 1
    assert lines == ["1 of 1 jobs failed:", "  eqb-s0: optim.steps: expected a positive number, got 0"]
    assert not Path("runs").exists()


def test_bad_config_of_a_single_run_raises(started: list[str]) -> None:
    with pytest.raises(ValueError, match=r"optim\.steps: expected a positive number, got 0"):
        run([config_of(optim={"steps": 0})], sweep=False)
    assert not Path("runs").exists()


def test_folder_of_another_config_is_an_error(started: list[str]) -> None:
    run([config_of()])
    path = Path("runs/table") / started[0] / "config.yaml"
    path.write_text(path.read_text().replace("microbatches: 8", "microbatches: 16"))
    status, lines = run([config_of()])
    assert status == 1
    assert "data.microbatches is 16 there and 8 here" in lines[1]
    assert len(started) == 1


def test_incomplete_row_and_a_report_that_refuses_end_with_1(
    started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "build_report", lambda folder: SimpleNamespace(complete=False))
    assert run([config_of()])[0] == 1

    def build_report(folder: Path) -> None:
        raise ValueError("optim.steps: 1 in a, 2 in b")

    monkeypatch.setattr(report, "build_report", build_report)
    status, lines = run([config_of()])
    assert status == 1
    assert lines[-1] == "no report of runs/table: optim.steps: 1 in a, 2 in b"


def test_failed_job_is_recorded_and_does_not_stop_the_sweep(
    started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_ranks(main: Any, folder: Path, ranks: int) -> None:
        if "-s0-" in folder.name:
            raise RankError("RuntimeError: boom", 1, folder / "log/1/rank1.err")
        if "-s1-" in folder.name:
            raise OSError("no port")
        if "-s2-" not in folder.name:
            finish(main, folder, ranks)

    monkeypatch.setattr(jobs, "run_ranks", run_ranks)
    status, lines = run([config_of(seed=seed) for seed in range(4)])
    folders = sorted(Path("runs/table").glob("eqb-*"))
    assert status == 1
    assert runs.read_json(folders[0] / "failed.json")["rank"] == 1
    assert lines[-4:] == [
        "3 of 4 jobs failed:",
        f"  eqb-s0: rank 1: RuntimeError: boom (log: {folders[0]}/log/1/rank1.err)",
        "  eqb-s1: OSError: no port",
        "  eqb-s2: the ranks ended, but wrote no summary.json",
    ]
    assert runs.run_state(folders[3]) == runs.RunState.DONE


@pytest.mark.parametrize("module", ["submitit.core.utils", "elsewhere"])
def test_job_whose_time_is_up_is_cut(started: list[str], monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """submitit raises in the middle of whatever is under way."""
    error = type("UncompletedJobError", (RuntimeError,), {"__module__": module})

    def run_ranks(main: Any, folder: Path, ranks: int) -> None:
        raise error("timed-out too many times")

    monkeypatch.setattr(jobs, "run_ranks", run_ranks)
    with pytest.raises(error if module.startswith("submitit") else RuntimeError, match="timed-out"):
        jobs.run_one(config_of(), TRAINER)
    (folder,) = Path("runs/table").glob("eqb-*")
    assert runs.run_state(folder) == runs.RunState.CUT
    assert (folder / "failed.json").exists() == (module == "elsewhere")


def test_launch_false_writes_folders_and_prints_commands(started: list[str]) -> None:
    status, lines = run([config_of(seed=seed, launch=False) for seed in range(2)])
    folders = sorted(Path("runs/table").glob("eqb-*"))
    assert status == 0
    assert lines == [f"torchrun --nproc-per-node=2 -m equipoise.experiments.train {folder}" for folder in folders]
    assert runs.run_state(folders[0]) == runs.RunState.CUT
    assert not started
    entries = read_ledger(Path("runs/table"))
    assert [entries[folder.name].command for folder in folders] == lines
    assert {entry.host for entry in entries.values()} == {None}


def test_plan_is_printed_before_the_first_job_and_recorded(started: list[str]) -> None:
    configs = [config_of(seed=seed, optim={"steps": steps}) for seed in (0, 1) for steps in (1, 3)]
    run(configs[:1], sweep=False)
    cut = jobs.prepare(1, configs[3], TRAINER)
    runs.open_run(cut.folder, cut.config)
    (cut.folder / "checkpoints/step-2").mkdir(parents=True)
    status, lines = run(configs)
    assert status == 0
    assert lines[:3] == [
        "jobs: 4 in runs/table: 2 to run, 1 done, 1 to resume (eqb-s1 steps=3 from step 2)",
        "swept: seed (2), optim.steps (2); ranks 2, steps 1 to 3, tokens a run 64 to 192",
        "parameters: 4,792 total, 4,600 active for a token",
    ]
    assert outcomes(lines)[1] == "[2/4] eqb-s0 steps=3 done"
    assert [entry.label for entry in read_ledger(Path("runs/table")).values()] == [
        "eqb-s0 steps=1",
        "eqb-s0 steps=3",
        "eqb-s1 steps=1",
        "eqb-s1 steps=3",
    ]


def test_ledger_that_cannot_be_read_stops_the_sweep(started: list[str]) -> None:
    Path("runs/table").mkdir(parents=True)
    (Path("runs/table") / "ledger.json").write_text("{")
    with pytest.raises(ValueError, match=r"ledger\.json cannot be read as a ledger"):
        run([config_of()])
    assert not started


def test_under_torchrun_is_an_error(started: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match=r"torchrun .* -m equipoise\.experiments\.train"):
        run([config_of()])


def test_run_for_a_plugin(started: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert jobs.run_one(config_of(), TRAINER) == 2.5
    assert [entry.label for entry in read_ledger(Path("runs/table")).values()] == ["eqb-s0"]
    monkeypatch.setattr(jobs, "run_ranks", lambda main, folder, ranks: None)
    with pytest.raises(RuntimeError, match=r"eqb-s1: the ranks ended, but wrote no summary\.json"):
        jobs.run_one(config_of(seed=1), TRAINER)


# real ranks


def test_rank_that_fails_does_not_stop_the_sweep(workplace: Path) -> None:
    process = start(workplace, "-m", "balancer=none", "seed=1,0", "optim.steps=1")
    out, errors = process.communicate(timeout=DEADLINE_SECONDS)
    failed, done = (next(workplace.glob(f"runs/default/none-s{seed}-*")) for seed in (1, 0))
    assert process.returncode == 1, out + errors
    log = failed / "log/1/rank1.err"
    assert runs.read_json(failed / "failed.json") == {
        "error": "RuntimeError: boom, loudly",
        "rank": 1,
        "log": "log/1/rank1.err",
    }
    assert "Traceback" in log.read_text()
    assert runs.run_state(done) == runs.RunState.DONE
    assert (done / "log/1/rank1.out").read_text() == "rank 1 of 2 threads 1\n"
    assert out.splitlines()[-2:] == [
        "1 of 2 jobs failed:",
        f"  none-s1: rank 1: RuntimeError: boom, loudly (log: {log.relative_to(workplace)})",
    ]
    assert (workplace / "runs/default/report/table.csv").is_file()
    assert errors == ""


def test_r1_two_ranks_of_one_job_share_one_folder_and_one_config(workplace: Path) -> None:
    process = start(workplace, "balancer=none", "parallel.ranks=2")
    out, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0, out + errors
    (folder,) = workplace.glob("runs/*/*/")
    assert list(workplace.rglob("*.yaml")) == [folder / "config.yaml"]
    assert runs.load_config(folder)["parallel"]["ranks"] == 2
    assert [path.read_text() for path in sorted(folder.glob("log/*/rank*.out"))] == [
        f"rank {rank} of 2 threads 1\n" for rank in range(2)
    ]
    assert {path.name for path in workplace.iterdir()} - {"__pycache__"} == {"runs", "stand_in.py"}


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and time of every file."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def living(session: int) -> list[int]:
    """Processes of a session that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, owner = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(owner) == session and state != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_r2_a_sweep_of_six_that_was_killed_in_the_fourth_goes_on(workplace: Path, stop: signal.Signals) -> None:
    experiment, command = workplace / "runs/default", ["-m", "balancer=none", "seed=2,3,4,5,6,7", "optim.steps=2"]
    process = start(workplace, *command, STAND_IN_WAITS="5")
    wait_for(lambda: list(workplace.glob("runs/*/none-s5-*/metrics.jsonl")) or process.poll() is not None)
    # a scheduler's SIGTERM often reaches the launcher alone
    kill = os.kill if stop == signal.SIGTERM else os.killpg
    kill(process.pid, stop)
    _, errors = process.communicate(timeout=DEADLINE_SECONDS)
    wait_for(lambda: not living(process.pid))
    assert process.returncode == (launch.STOPPED if stop == signal.SIGTERM else -stop)
    assert errors == GOES_ON * (stop == signal.SIGTERM)
    assert not list(experiment.glob("*/failed.json"))
    lines = status.collect(experiment)
    # of a launcher that was killed nobody knows for a while whether torchrun goes on with its run
    assert [line.state for line in lines] == ["done"] * 3 + ["running?" if stop == signal.SIGKILL else "cut"] + [
        "missing"
    ] * 2
    assert status.commands(lines) == [f"equipoise {' '.join(command)}"]
    done = {seed: next(workplace.glob(f"runs/default/none-s{seed}-*")) for seed in (2, 3, 4)}
    before = {seed: contents(folder) for seed, folder in done.items()}
    cut = next(workplace.glob("runs/default/none-s5-*"))
    process = start(workplace, *command)
    out, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0, out + errors
    assert "jobs: 6 in runs/default: 2 to run, 3 done, 1 to resume (none-s5 from step 1)" in out.splitlines()
    skipped = [f"[{index}/6] none-s{index + 1} was done before" for index in (1, 2, 3)]
    assert outcomes(out.splitlines()) == skipped + [f"[{index}/6] none-s{index + 1} done" for index in (4, 5, 6)]
    assert {seed: contents(folder) for seed, folder in done.items()} == before
    # its attempts: cut and resumed; those that came after have one
    assert sorted(path.name for path in (cut / "log").iterdir()) == ["1", "2"]
    assert [json.loads(line)["step"] for line in (cut / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert len(list(workplace.glob("runs/default/none-s[67]-*/log/1"))) == 2
    assert len(list(workplace.glob("runs/default/none-*"))) == 6
    assert status.main([str(experiment)]) == 0


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_ctrl_c_stops_the_whole_sweep(workplace: Path) -> None:
    process = start(workplace, "-m", "balancer=none", "seed=0,3", STAND_IN_WAITS="0,3")
    try:
        wait_for(lambda: list(workplace.glob("runs/*/*/metrics.jsonl")) or process.poll() is not None)
        # it reaches every process of the terminal
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE_SECONDS)
        wait_for(lambda: not living(process.pid))
    finally:
        for survivor in living(process.pid):
            os.kill(survivor, signal.SIGKILL)
    assert process.returncode == launch.STOPPED
    # a rank that Ctrl-C meets before its output is redirected has its own say first
    assert errors.endswith(GOES_ON)
    assert [path.name[:7] for path in workplace.glob("runs/default/none-*")] == ["none-s0"]
    assert not list(workplace.glob("runs/*/*/failed.json"))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_slurm_tells_all_processes_that_time_is_up_and_the_launcher_alone_listens(workplace: Path) -> None:
    process = start(workplace, "balancer=none", "optim.steps=1", "parallel.ranks=1", STAND_IN_WAITS="0")
    try:
        wait_for(lambda: list(workplace.glob("runs/*/*/metrics.jsonl")) or process.poll() is not None)
        others = [number for number in living(process.pid) if number != process.pid]
        # the server that forks the ranks, and a rank
        assert len(others) >= 2
        for number in others:
            os.kill(number, signal.SIGUSR2)
        (workplace / "go").touch()
        out, errors = process.communicate(timeout=DEADLINE_SECONDS)
    finally:
        for survivor in living(process.pid):
            os.kill(survivor, signal.SIGKILL)
    assert process.returncode == 0, out + errors


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_ranks_end_when_their_launcher_is_killed(workplace: Path) -> None:
    process = start(workplace, "balancer=none", STAND_IN_WAITS="0")
    try:
        wait_for(lambda: list(workplace.glob("runs/*/*/metrics.jsonl")) or process.poll() is not None)
        process.kill()
        process.communicate(timeout=DEADLINE_SECONDS)
        wait_for(lambda: not living(process.pid))
    finally:
        for survivor in living(process.pid):
            os.kill(survivor, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not list(workplace.glob("runs/*/*/summary.json"))
