"""What a margin is rounded to before its order statistic is taken, exactly: bf16, fp32, or a fixed-point number."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import FixedScale, from_key

FLOATS = {"bf16": torch.bfloat16, "fp32": torch.float32}


def fixed_bits(key: str) -> int | None:
    """The bits of a fixed-point key, None for a floating-point one.

    Raises:
        ValueError: neither.

    >>> fixed_bits("fixed12"), fixed_bits("bf16")
    (12, None)
    """
    found = re.fullmatch(r"fixed(8|9|1[0-6])", str(key))
    if not found and key not in FLOATS:
        raise ValueError(f"key must be 'bf16', 'fp32' or 'fixed8' to 'fixed16', got {key!r}")
    return int(found[1]) if found else None


@dataclass(frozen=True, eq=False)
class Rounding:
    """From margins to what is stored, and from its key, as in ``kernels.to_key``, back to a margin.

    Args:
        dtype: of what is stored.
        scale: of fixed-point margins, which are stored as bf16 numbers; None for others.
    """

    dtype: torch.dtype
    scale: FixedScale | None = None

    @classmethod
    def fixed(cls, bits: int, bias: Tensor) -> "Rounding":
        """To ``bits`` bits of the range that the margins have under a bias ``[E]``, as a histogram's."""
        lowest, highest = bias.aminmax()
        return cls(torch.bfloat16, FixedScale.of_bits(lowest - 1, highest + 1, bits))

    def encode(self, margins: Tensor) -> Tensor:
        """Margins as they are stored, in the same order."""
        return margins.to(self.dtype) if self.scale is None else self.scale.to_code(margins)

    def decode(self, key: Tensor) -> Tensor:
        """The margins of keys int64, fp32 or fp64; NaN for key 0."""
        return from_key(key, self.dtype) if self.scale is None else self.scale.from_code_key(key)
