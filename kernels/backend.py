"""Which implementation runs: the Triton kernels on a GPU, the torch reference elsewhere.

``EQUIPOISE_KERNELS=torch`` or ``triton`` in the environment forces one. Triton is imported when its first kernel is
about to run. On the CPU its kernels run in Triton's interpreter (``TRITON_INTERPRET=1``), which is for tests.
"""

import importlib.util
import os
from functools import cache

from torch import Tensor

VARIABLE = "EQUIPOISE_KERNELS"


def forced() -> str | None:
    """What the environment asks for: ``torch``, ``triton``, or None.

    Raises:
        ValueError: anything else.
    """
    choice = os.environ.get(VARIABLE, "")
    if choice not in ("", "torch", "triton"):
        raise ValueError(f"{VARIABLE} must be 'torch', 'triton' or unset, got {choice!r}")
    return choice or None


def use_triton(tensor: Tensor, unsupported: str | None = None) -> bool:
    """Whether the Triton kernel runs on ``tensor``.

    Args:
        tensor: decides by its device.
        unsupported: what the kernel cannot do with this input, in words: then the reference runs.

    Raises:
        ValueError: Triton is asked for by the environment, and cannot run: it says why.
    """
    choice = forced()
    if choice == "torch" or (choice is None and tensor.device.type != "cuda"):
        return False
    reason = unsupported
    if not _is_installed():
        reason = "Triton is not installed (pip install 'equipoise[triton]')"
    elif tensor.device.type != "cuda" and not _is_interpreted():
        reason = f"tensors on {tensor.device.type} need Triton's interpreter: set TRITON_INTERPRET=1 before the start"
    if reason and choice == "triton":
        raise ValueError(f"{VARIABLE}=triton asks for the Triton kernels: {reason}")
    return reason is None


def check() -> None:
    """Refuse a request of the environment that cannot be met on this machine, before anything runs.

    Raises:
        ValueError: it says why.
    """
    if forced() == "triton" and not _is_installed():
        raise ValueError(
            f"{VARIABLE}=triton asks for the Triton kernels: Triton is not installed (pip install 'equipoise[triton]')"
        )


@cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _is_interpreted() -> bool:
    from .fused.numerics import INTERPRETED

    return INTERPRETED
