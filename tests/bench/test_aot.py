"""Kernels compiled for GPUs that are not here; in a process of its own, since here the interpreter is on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

MAX_REGISTERS = 128


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, int | str]]:
    """What `scripts/bench aot` writes."""
    out: Path = tmp_path_factory.mktemp("aot") / "aot.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "equipoise.bench.aot", "--out", str(out)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = json.loads(out.read_text(encoding="utf-8"))
    assert isinstance(rows, list)
    return rows


def test_every_kernel_compiles_for_every_target(rows: list[dict[str, int | str]]) -> None:
    targets = ("sm_80", "sm_90", "sm_100", "gfx942")
    kernels = dict.fromkeys(str(row["kernel"]) for row in rows)
    assert {name.split()[0] for name in kernels} == {"route", "route_backward", "radix", "select"}
    assert [(row["kernel"], row["target"]) for row in rows] == [(name, each) for name in kernels for each in targets]


def test_nothing_is_spilled_and_registers_are_bounded(rows: list[dict[str, int | str]]) -> None:
    for row in rows:
        assert set(row) == {"kernel", "target", "registers", "spills", "shared"}
        assert row["spills"] == 0, row
        assert 8 <= int(row["registers"]) <= MAX_REGISTERS, row
        assert 0 <= int(row["shared"]) <= 48 * 1024, row


def test_the_interpreter_is_refused() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "equipoise.bench.aot"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    assert "the interpreter compiles nothing: unset TRITON_INTERPRET" in result.stderr.splitlines()[-1]
