"""What the README shows works as it stands there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)


def block(start):
    (found,) = [body for _, body in BLOCKS if start in body]
    return found


def test_own_router():
    space = {}
    exec(block("class Router"), space)
    router = space["Router"](16, 8, 2)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    routing = router(x, valid=torch.arange(64) < 60)
    routing.weights.square().sum().backward()
    space["update_balancers"](router)
    assert routing.load.sum() == 60 * 2
    assert router.bias.bias.abs().sum() > 0
    assert router.weight.grad.abs().sum() > 0
    assert block("class Router").count("\n") <= 20


def test_own_balancer_from_another_package(tmp_path):
    (tmp_path / "my_balancers.py").write_text(block("class TanhCount"))
    (tmp_path / "my_configs" / "balancer").mkdir(parents=True)
    (tmp_path / "my_configs" / "balancer" / "tanh_count.yaml").write_text(block("name: tanh_count"))
    assert block("class TanhCount").count("\n") + block("name: tanh_count").count("\n") < 40
    command = [Path(sys.executable).parent / "equipoise", "--config-dir", "my_configs", "balancer=tanh_count"]
    sizes = ["parallel.ranks=1", "optim.steps=2", "optim.warmup=1", "tracker=none", "data.validation_sequences=2"]
    result = subprocess.run(
        [*command, *sizes],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": "."},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (folder,) = (tmp_path / "runs" / "default").glob("tanh_count-s0-*")
    assert (folder / "summary.json").exists()


def test_commands_compose():
    """Every command of the section on runs is accepted by Hydra, without running it."""
    section = README.split("## Runs and sweeps")[1].split("##")[0]
    # status and diff are run in tests/test_docs.py
    commands = re.findall(r"^    equipoise (?!status|diff)([^#\n]*)", section, flags=re.MULTILINE)
    assert len(commands) >= 5
    for command in commands:
        arguments = [part for part in command.split() if part not in ("-m", "--cfg", "job")]
        # --cfg shows one job: of a swept key, its first value
        first = [re.sub(r"=([^,]*),.*", r"=\1", argument) for argument in arguments]
        equipoise = Path(sys.executable).parent / "equipoise"
        result = subprocess.run([equipoise, "--cfg", "job", *first], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert "balancer:" in result.stdout


def test_the_files_it_names_exist():
    for name in re.findall(r"\./(scripts/\w+)", README):
        assert shutil.which(ROOT / name), name
    for name in re.findall(r"!\[.*?\]\((.*?)\)", README):
        assert (ROOT / name).is_file(), name
    assert "@RESULT@" not in README
