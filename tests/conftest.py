import os

import torch

# the kernels are defined for the interpreter or for a GPU when they are imported; started processes inherit the choice
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
