"""Device functions that the kernels share, and the facts about this process that they are launched by."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# fp32 operations may be fused only where a kernel says so (tl.fma): counts must not depend on the compiler's taste
COMPILE_OPTIONS = {"enable_fp_fusion": False}


@triton.jit
def sigmoid(x, PTX: tl.constexpr):
    """``1 / (1 + exp(-x))``; in PTX two instructions of the special-function unit and two others."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.ftz.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.ftz.f32 t, t, 0f3F800000;"
            " rcp.approx.ftz.f32 $0, t; }",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def log_sigmoid(x):
    """``log(1 / (1 + exp(-x)))``, right where the score itself underflows."""
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def is_finite(x):
    """False for NaN and infinity."""
    return tl.abs(x) < float("inf")


@triton.jit
def bf16_bits(x, PTX: tl.constexpr):
    """The bits of fp32 ``x`` rounded to bf16 (to nearest even), int16. The interpreter's own cast truncates."""
    if PTX:
        return x.to(tl.bfloat16).to(tl.int16, bitcast=True)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def to_key(bits, WIDTH: tl.constexpr):
    """Bits to the key of the same order; -0.0 counts as +0.0."""
    SIGN: tl.constexpr = 1 << (WIDTH - 1)
    ALL: tl.constexpr = (1 << WIDTH) - 1
    bits = tl.where(bits == SIGN, 0, bits).to(tl.uint32)
    return bits ^ tl.where(bits >= SIGN, ALL, SIGN).to(tl.uint32)


INTERPRETED = not isinstance(sigmoid, triton.JITFunction)
PTX = not INTERPRETED and torch.version.hip is None


def launch(kernel: Any, grid: tuple[int, ...], tensor: Tensor, *args: Any, num_warps: int, **constants: Any) -> None:
    """Start ``kernel`` on the device of ``tensor``, which need not be the current one; an empty grid starts nothing."""
    if 0 in grid:
        return
    with torch.cuda.device_of(tensor):
        kernel[grid](*args, num_warps=num_warps, **constants, **COMPILE_OPTIONS)
