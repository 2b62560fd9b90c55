"""Which keys of two configs differ, as the command lists them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from equipoise.experiments.sweep import diff

Differ = Callable[..., dict[str, Any]]


@pytest.fixture
def differ(capsys: pytest.CaptureFixture[str]) -> Differ:
    """The differences that ``equipoise diff --json`` prints."""

    def run(*arguments: str) -> dict[str, Any]:
        status = diff.main([*arguments, "--json"])
        found = json.loads(capsys.readouterr().out)["differences"]
        assert status == (diff.DIFFERENT if found else diff.SAME)
        return found

    return run


LEI = {"_target_": "equipoise.balancers.LEI", "eta": 1e-5, "tau": 1.0, "bound": "tanh", "units": "raw"}


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("eqb_fp32", "eqb", {"balancer.bias.key": {"a": "fp32", "b": "bf16"}}),
        ("gshard_global", "gshard", {"balancer.gradient.scope": {"a": "global", "b": "microbatch"}}),
        ("eqb_lei", "eqb", {f"balancer.gradient.{key}": {"a": value} for key, value in LEI.items()}),
        (
            "ddp",
            "fsdp",
            {
                "parallel.strategy": {"a": "ddp", "b": "fsdp"},
                "parallel.dp_replicate": {"b": 1},
                "parallel.ep": {"b": 1},
            },
        ),
        ("ep", "fsdp", {"parallel.ep": {"a": 2, "b": 1}}),
        ("small optim.steps=7", "default", {"optim.steps": {"a": 7, "b": 100}}),
    ],
)
def test_r4_a_preset_differs_from_its_parent_in_what_it_is_for(
    differ: Differ, a: str, b: str, expected: dict[str, Any]
) -> None:
    assert differ(a, b) == expected


@pytest.mark.parametrize(
    ("name", "keys", "swept"),
    [
        ("paper_table", [], {"balancer": None, "seed": "0,1,2"}),
        ("quick", ["optim.steps"], {"balancer": "none,rank_averaged_qb,eqb,eqb_lei", "seed": "0"}),
        (
            "smoke",
            ["optim.steps", "optim.warmup", "data.validation_sequences", "validation.every"],
            {"balancer": "none,eqb", "seed": "0"},
        ),
        (
            "bins",
            [],
            {"balancer": "histogram_qb", "balancer.bias.num_bins": None, "seed": None, "beside": "eqb,eqb_fp32"},
        ),
        ("eta_sweep", [], {"balancer": "eqb_lei", "balancer.gradient.eta": None, "seed": None, "beside": "eqb"}),
        (
            "gshard_sweep",
            [],
            {"balancer": "gshard", "balancer.gradient.coefficient": None, "seed": None, "beside": None},
        ),
        ("signed_rate", [], {"balancer": "signed_count", "balancer.bias.rate": None, "seed": None, "beside": "eqb"}),
        ("sharding", ["parallel.ranks"], {"data.microbatches": "1,2,4,8", "balancer": None, "seed": None}),
        ("two_scales", [], {"balancer/bias": None, "balancer/gradient": "none,gshard,lei", "seed": None}),
        ("scaling", [], {"model.width": None, "model.num_experts": None, "balancer": None, "seed": None}),
    ],
)
def test_r4_an_experiment_differs_from_the_default_in_what_it_says(
    differ: Differ, name: str, keys: list[str], swept: dict[str, str | None]
) -> None:
    found = differ(name, "default")
    assert set(found) == {*keys, *(f"sweep.{key}" for key in swept)}
    for key, values in swept.items():
        assert "b" not in found[f"sweep.{key}"]
        assert values is None or found[f"sweep.{key}"]["a"] == values


def test_what_cannot_change_a_result_is_listed_on_demand(differ: Differ) -> None:
    assert differ("name=a tracker=none", "default") == {}
    assert {"name", "tracker.mode"} <= differ("name=a tracker=none", "default", "--all").keys()
    assert differ("eqb_fp32", "eqb", "--all").keys() == {"balancer.name", "balancer.bias.key"}


def test_run_folders_and_files(differ: Differ, tmp_path: Path) -> None:
    config = {"seed": 0, "optim": {"steps": 3}, "balancer": {"name": "eqb", "gradient": None}}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "mine.yaml").write_text("seed: 0\noptim:\n  steps: 5\n  warmup: ${optim.steps}\nbalancer: {name: x}\n")
    assert differ(str(tmp_path / "run"), str(tmp_path / "mine.yaml")) == {
        "optim.steps": {"a": 3, "b": 5},
        "optim.warmup": {"b": 5},
        "balancer.gradient": {"a": None},
    }
    assert differ(str(tmp_path / "run"), str(tmp_path / "run" / "config.yaml")) == {}


def test_ranks_of_a_run_folder_are_what_auto_became(differ: Differ, tmp_path: Path) -> None:
    for name, value in (("run", 2), ("other", "auto")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump({"parallel": {"ranks": value}}))
    run, auto = str(tmp_path / "run"), tmp_path / "auto.yaml"
    auto.write_text("parallel: {ranks: auto}\n")
    assert differ(run, str(auto)) == differ(str(auto), run) == {}
    assert differ(f"{run}/config.yaml", str(auto)) == {"parallel.ranks": {"a": 2, "b": "auto"}}
    auto.write_text("parallel: {ranks: 4}\n")
    assert differ(run, str(auto)) == {"parallel.ranks": {"a": 2, "b": 4}}


def test_values_are_told_apart_as_the_hash_does(differ: Differ) -> None:
    assert differ("optim.clip=1", "optim.clip=1.0") == {"optim.clip": {"a": 1, "b": 1.0}}
    assert differ("optim.clip=nan", "optim.clip=nan") == {}


def test_presets_of_ones_own(differ: Differ, tmp_path: Path) -> None:
    (tmp_path / "balancer").mkdir()
    (tmp_path / "balancer" / "own.yaml").write_text("name: own\nbias: {_target_: x.Y}\ngradient: null\n")
    found = differ("own", "balancer=none", "--config-dir", str(tmp_path))
    assert found == {"balancer.bias._target_": {"a": "x.Y"}}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("none", "expected one of balancer=none, tracker=none"),
        ("eqbb", "did you mean one of eqb,"),
        ("optim.step=3", "there is no key 'step' in optim: expected one of betas"),
        ("nowhere.yaml", "there is no file nowhere.yaml"),
        ("balancer=nope", "balancer/nope"),
        ("it's", '"it\'s": expected words as on the command line; No closing quotation'),
        ("{folder}", "is not a run folder: it has no config.yaml"),
        ("{folder}/broken.yaml", "is not YAML"),
        ("{folder}/run", "config.yaml is not YAML"),
        ("{folder}/list.yaml", "expected a mapping of settings"),
    ],
)
def test_what_is_no_config_is_a_clear_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, spec: str, message: str
) -> None:
    (tmp_path / "run").mkdir()
    for name in ("broken.yaml", "run/config.yaml"):
        (tmp_path / name).write_text("a: [")
    (tmp_path / "list.yaml").write_text("- 1\n")
    assert diff.main([spec.format(folder=tmp_path), "default"]) == diff.TROUBLE
    errors = capsys.readouterr().err
    assert message in errors
    assert "Traceback" not in errors


def test_table_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert diff.main(["eqb_lei", "eqb"]) == diff.DIFFERENT
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0] == ["key", "eqb_lei", "eqb"]
    assert ["balancer.gradient.bound", "tanh", "absent"] in lines
    assert diff.main(["eqb", "eqb"]) == diff.SAME
    assert capsys.readouterr().out == "no difference between eqb and eqb\n"
