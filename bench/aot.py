"""Compile every kernel ahead of time, without a GPU, and read registers, spills and shared memory off the machine code.

`scripts/bench aot` prints the table and writes bench/aot.json. What is compiled is what the launchers launch: they
are called on small CPU tensors, and the launch is recorded instead of made.
"""

import argparse
import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

# a kernel that is found in the cache is not compiled again, and then there is no log to read
os.environ["TRITON_ALWAYS_COMPILE"] = "1"

import torch
import triton
from rich.console import Console
from rich.table import Table
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ..kernels.fused import radix, route, route_backward
from ..kernels.fused.numerics import COMPILE_OPTIONS, INTERPRETED
from .timing import FOLDER

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# then a multiprocessor holds 16 warps or more
MAX_REGISTERS = 128
TOKENS = 64
DTYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}


@dataclass(frozen=True)
class Launch:
    """One kernel as a launcher starts it."""

    name: str
    kernel: Any
    arguments: dict[str, Any]
    constants: dict[str, Any]
    num_warps: int

    def source(self, target: GPUTarget) -> ASTSource:
        """What the just-in-time compiler would compile: specialised by None, by 1, and by divisibility by 16."""
        signature = dict.fromkeys(self.kernel.arg_names, "constexpr")
        constants = dict(self.constants)
        # the inline assembly is for NVIDIA
        if "PTX" in constants:
            constants["PTX"] = target.backend == "cuda"
        attributes: dict[tuple[int, ...], Any] = {}
        for parameter in self.kernel.params:
            if parameter.name not in self.arguments:
                continue
            value = self.arguments[parameter.name]
            if value is None or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize):
                constants[parameter.name] = value
                continue
            if isinstance(value, Tensor):
                signature[parameter.name] = f"*{DTYPES[value.dtype]}"
                aligned = True
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
                aligned = isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
            if aligned:
                attributes[(self.kernel.arg_names.index(parameter.name),)] = [["tt.divisibility", 16]]
        return ASTSource(self.kernel, signature=signature, constexprs=constants, attrs=attributes)


def route_call(
    num_experts: int, top_k: int, dtype: torch.dtype = torch.bfloat16, *, tally: str = "", **options: Any
) -> None:
    """Call the launcher of the routing kernel."""
    logits = torch.zeros(TOKENS, num_experts, dtype=dtype)
    counts = clamped = lower = upper = kept = filled = first = None
    levels = 0
    if tally.startswith("window"):
        counts, first = torch.zeros(num_experts, 256, dtype=torch.int32), torch.zeros(num_experts, dtype=torch.int64)
        if tally.endswith("fixed12"):
            lower, upper, levels = torch.tensor(-1.0), torch.tensor(1.0), 4096
    elif tally == "uniform":
        counts = torch.zeros(1000, num_experts, dtype=torch.int32).t()
        clamped = torch.zeros(num_experts, dtype=torch.int32)
        lower, upper = torch.tensor(-1.0), torch.tensor(1.0)
    elif tally:
        kept = torch.zeros(TOKENS, num_experts, dtype=torch.bfloat16 if tally == "bf16" else torch.float32)
        filled = torch.zeros(1, dtype=torch.int64)
    choices: dict[str, Any] = {"selection": "score", "gate": "sigmoid", "normalise": True, "scale": 1.0, "exact": False}
    bias, valid = torch.zeros(num_experts), torch.ones(TOKENS, dtype=torch.bool)
    choices |= options
    writes = counts, clamped, lower, upper, kept, filled, first, levels
    route.route(logits, bias, valid, *writes, top_k=top_k, **choices)


def backward_call(
    num_experts: int, top_k: int, *, injected: bool, gate: str = "sigmoid", dtype: torch.dtype = torch.bfloat16
) -> None:
    """Call the launcher of the backward kernel."""
    logits = torch.zeros(TOKENS, num_experts, dtype=dtype)
    experts = torch.zeros(TOKENS, top_k, dtype=torch.int64)
    injection = torch.zeros(num_experts) if injected else None
    gradient = torch.zeros(TOKENS, top_k)
    route_backward.route_backward(logits, experts, gradient, injection, None, gate=gate, normalise=True, scale=1.0)


def radix_call(byte: int, dtype: torch.dtype) -> None:
    """Call the launcher of one radix pass."""
    values = torch.zeros(TOKENS, 256, dtype=dtype)
    prefix = torch.zeros(256, dtype=torch.int64) if byte else None
    radix.radix_counts(values, prefix, byte, torch.zeros(1, dtype=torch.int64))


def select_call(*, prefix: bool) -> None:
    """Call the launcher of the selection."""
    counts = torch.zeros(256, 256, dtype=torch.int32).t()
    ranks = torch.zeros(256, dtype=torch.int64)
    radix.select_rank(counts, ranks if prefix else None, ranks)


CALLS = {
    "route E256 K6": partial(route_call, 256, 6),
    "route E256 K6 fp32": partial(route_call, 256, 6, torch.float32),
    "route E256 K6 exact": partial(route_call, 256, 6, exact=True),
    "route E256 K6 logit": partial(route_call, 256, 6, selection="logit"),
    "route E256 K6 softmax": partial(route_call, 256, 6, gate="softmax"),
    "route E256 K6 uniform": partial(route_call, 256, 6, tally="uniform"),
    "route E256 K6 window": partial(route_call, 256, 6, tally="window"),
    "route E256 K6 window fixed12": partial(route_call, 256, 6, tally="window fixed12"),
    "route E256 K6 bf16 margins": partial(route_call, 256, 6, tally="bf16"),
    "route E256 K6 fp32 margins": partial(route_call, 256, 6, tally="fp32"),
    "route E8 K2": partial(route_call, 8, 2),
    "route E60 K4": partial(route_call, 60, 4),
    "route E128 K8 fp16": partial(route_call, 128, 8, torch.float16),
    "route E512 K16": partial(route_call, 512, 16),
    "route E1024 K16": partial(route_call, 1024, 16),
    "route_backward E256 K6": partial(backward_call, 256, 6, injected=False),
    "route_backward E256 K6 injection": partial(backward_call, 256, 6, injected=True),
    "route_backward E256 K6 softmax": partial(backward_call, 256, 6, injected=True, gate="softmax"),
    "route_backward E512 K16 fp32": partial(backward_call, 512, 16, injected=True, dtype=torch.float32),
    "radix bf16 byte 0": partial(radix_call, 0, torch.bfloat16),
    "radix bf16 byte 1": partial(radix_call, 1, torch.bfloat16),
    "radix fp32 byte 0": partial(radix_call, 0, torch.float32),
    "radix fp32 byte 3": partial(radix_call, 3, torch.float32),
    "select": partial(select_call, prefix=False),
    "select with prefix": partial(select_call, prefix=True),
}


def record(name: str) -> Launch:
    """What the call of that name launches last or, with a tally, first: one kernel."""
    launches: list[Launch] = []

    def keep(kernel: Any, grid: tuple[int, ...], tensor: Tensor, *args: Any, num_warps: int, **constants: Any) -> None:
        arguments = dict(zip(kernel.arg_names, args, strict=False))
        launches.append(Launch(name, kernel, arguments, constants, num_warps))

    with contextlib.ExitStack() as stack:
        for module in (radix, route, route_backward):
            stack.enter_context(mock.patch.object(module, "launch", keep))
        CALLS[name]()
    return launches[0]


def compile_for(launch: Launch, target: str) -> dict[str, Any]:
    """``{kernel, target, registers, spills, shared}``: registers a thread, spilled bytes a thread, shared bytes."""
    log = io.StringIO()
    with mock.patch.object(knobs.nvidia, "dump_ptxas_log", True), contextlib.redirect_stdout(log):
        source = launch.source(TARGETS[target])
        compiled = triton.compile(
            source, target=TARGETS[target], options={"num_warps": launch.num_warps, **COMPILE_OPTIONS}
        )
    if TARGETS[target].backend == "cuda":
        registers = re.findall(r"Used (\d+) registers", log.getvalue())
        spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log.getvalue())
    else:
        registers = re.findall(r"\.vgpr_count:\s*(\d+)", compiled.asm["amdgcn"])
        spills = re.findall(r"\.[vs]gpr_spill_count:\s*(\d+)", compiled.asm["amdgcn"])
    if not registers or not spills:
        raise RuntimeError(f"{launch.name} for {target}: the compiler's log tells no registers or spills")
    return {
        "kernel": launch.name,
        "target": target,
        "registers": int(registers[-1]),
        "spills": sum(map(int, spills)),
        "shared": compiled.metadata.shared,
    }


def compile_all(names: list[str] | None = None, targets: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Every kernel for every target, one after the other."""
    if INTERPRETED:
        raise ValueError("the interpreter compiles nothing: unset TRITON_INTERPRET")
    for name in names or CALLS:
        launch = record(name)
        for target in targets or TARGETS:
            yield compile_for(launch, target)


def main(arguments: Sequence[str] | None = None) -> None:
    """``scripts/bench aot``; exit status 1 if a bound does not hold."""
    parser = argparse.ArgumentParser(prog="scripts/bench aot", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER / "aot.json")
    options = parser.parse_args(arguments)
    console = Console()
    with console.status("compiling"):
        rows = list(compile_all())
    table = Table("kernel", *TARGETS, title=f"registers / spilled bytes / shared bytes, Triton {triton.__version__}")
    for name in CALLS:
        cells = [row for row in rows if row["kernel"] == name]
        table.add_row(name, *(f"{row['registers']} / {row['spills']} / {row['shared']}" for row in cells))
    console.print(table)
    options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {options.out}")
    over = [row for row in rows if row["spills"] or row["registers"] > MAX_REGISTERS]
    for row in over:
        console.print(f"{row['kernel']} for {row['target']}: {row['registers']} registers, {row['spills']} spilled")
    sys.exit(bool(over))


if __name__ == "__main__":
    main()
