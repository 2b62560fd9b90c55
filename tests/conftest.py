import os

import pytest
import torch

# the kernels are defined for the interpreter or for a GPU when they are imported; started processes inherit the choice
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def interpreter() -> None:
    """For tests that run the Triton kernels on CPU tensors: skip where they are compiled for a GPU."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels on CPU tensors need the interpreter: TRITON_INTERPRET=1")
