"""Which kernels run, and what is said where they cannot."""

import os
import subprocess
import sys

import pytest
import torch

from equipoise.kernels import backend, route

# Triton as if it were not installed
WITHOUT_TRITON = "import sys; sys.modules['triton'] = None\nimport importlib.util as u; found = u.find_spec\n"
WITHOUT_TRITON += "u.find_spec = lambda name, *a: None if name == 'triton' else found(name, *a)\nimport torch\n"


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON", "EQUIPOISE"))}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment | variables, capture_output=True, text=True, check=False
    )


def test_the_cpu_takes_the_reference_unless_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(backend.VARIABLE, raising=False)
    assert backend.forced() is None
    assert not backend.use_triton(torch.zeros(1))
    monkeypatch.setenv(backend.VARIABLE, "torch")
    assert not backend.use_triton(torch.zeros(1))


def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backend.VARIABLE, "cuda")
    with pytest.raises(ValueError, match="EQUIPOISE_KERNELS must be 'torch', 'triton' or unset, got 'cuda'"):
        route(torch.zeros(3, 8), None, 2)
    with pytest.raises(ValueError, match="got 'cuda'"):
        backend.check()


def test_the_triton_kernels_are_not_imported_where_they_are_not_used() -> None:
    code = "import sys, torch, equipoise.balancers\nfrom equipoise.kernels import route\n"
    code += "route(torch.zeros(3, 8), None, 2)\n"
    code += "assert not [name for name in sys.modules if name.startswith('equipoise.kernels.fused')]"
    result = run(code)
    assert result.returncode == 0, result.stderr


def test_everything_works_without_triton() -> None:
    code = WITHOUT_TRITON + "from equipoise.kernels import route, backend\nbackend.check()\n"
    code += "print(route(torch.zeros(3, 8), None, 2).load.tolist())"
    result = run(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[3, 3, 0, 0, 0, 0, 0, 0]"


@pytest.mark.parametrize("call", ["route(torch.zeros(3, 8), None, 2)", "backend.check()"])
def test_asking_for_triton_without_it_is_a_clear_error(call: str) -> None:
    code = WITHOUT_TRITON + f"from equipoise.kernels import route, backend\n{call}"
    result = run(code, EQUIPOISE_KERNELS="triton")
    assert result.returncode != 0
    expected = "EQUIPOISE_KERNELS=triton asks for the Triton kernels: Triton is not installed"
    assert expected in result.stderr.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU")
def test_asking_for_triton_on_the_cpu_names_the_interpreter() -> None:
    pytest.importorskip("triton")
    code = "import torch; from equipoise.kernels import route; route(torch.zeros(3, 8), None, 2)"
    result = run(code, EQUIPOISE_KERNELS="triton")
    assert "tensors on cpu need Triton's interpreter: set TRITON_INTERPRET=1" in result.stderr.splitlines()[-1]
    assert run(code, EQUIPOISE_KERNELS="triton", TRITON_INTERPRET="1").returncode == 0
