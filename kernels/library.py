"""The ops of this package in torch's registry: what a compiler sees in place of their insides.

An op holds both backends, so that the same graph is traced on every device. Not a ``triton_op``: that one takes no
kernel in the interpreter, and there is nothing around the kernels that a compiler could fuse with them. Not
``custom_op``: its wrapper costs a tenth of a millisecond a call on the CPU, and imports the compiler with the first
one.
"""

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "equipoise"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def define_op(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register an op and return it.

    Args:
        schema: ``name(arguments) -> results``; arguments that are written to are marked ``Tensor(a!)``. Inputs carry
            no gradient.
        implementation: for tensors of any device.
        fake: results of the right shape, dtype, device and strides, without a value.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default
