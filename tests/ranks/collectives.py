"""A recorder of everything that goes through a process group."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
ALL_REDUCE = "c10d::allreduce_"


class Collectives(TorchDispatchMode):
    """Inside ``with``, keeps the operations of process groups of any kind.

    Attributes:
        calls: ``(operation, dtype, number of elements)`` of each.
        tensors: the tensor that each was called with, after the last one the results.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str, int]] = []
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation.namespace in NAMESPACES:
            tensor = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            self.calls.append(
                (operation.name().rpartition(".")[0] or operation.name(), str(tensor.dtype), tensor.numel())
            )
            self.tensors.append(tensor)
        return operation(*args, **(kwargs or {}))
