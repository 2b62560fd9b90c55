"""Fixed-point keys: a margin on a scale of up to 65,024 equal steps, as a bf16 number that takes its place in order.

The radix passes and everything that stores margins know two dtypes, bf16 and fp32. A fixed-point margin travels as
the bf16 number at the same place of the order of all normal bf16 numbers, so that nothing else needs to know of it.
Subnormal numbers are left out, since a processor may be set to flush them to zero.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# keys of the normal bf16 numbers: FEWER negative ones from FIRST, and as many positive ones behind a gap
FIRST = 0x0080
FEWER = 0x7F00
GAP = 0x0100
MAX_LEVELS = 2 * FEWER


@dataclass(frozen=True, eq=False)
class FixedScale:
    """``levels`` equally spaced numbers from ``lower`` to ``upper``; a margin becomes the number of the nearest one.

    Args:
        lower, upper: 0-dim fp32; what lies outside takes the outermost level.
        levels: at most ``MAX_LEVELS``.

    >>> scale = FixedScale(torch.tensor(-1.0), torch.tensor(1.0), 5)
    >>> scale.to_level(torch.tensor([-1.0, 0.2, 0.3, 7.0])).tolist(), scale.to_margin(torch.tensor([2, 3])).tolist()
    ([0, 2, 3, 4], [0.0, 0.5])
    """

    lower: Tensor
    upper: Tensor
    levels: int

    @classmethod
    def of_bits(cls, lower: Tensor, upper: Tensor, bits: int) -> "FixedScale":
        """``2**bits`` levels, of 16 bits those that there are."""
        return cls(lower, upper, min(2**bits, MAX_LEVELS))

    @property
    def slope(self) -> Tensor:
        """Levels per unit of the margin, 0-dim fp32; the factor is rounded after each operation, in every backend."""
        return (self.upper - self.lower).reciprocal_().mul_(self.levels - 1)

    def to_level(self, margins: Tensor) -> Tensor:
        """The nearest level, int32."""
        scaled = (margins - self.lower).mul_(self.slope).add_(0.5)
        return scaled.floor_().clamp_(0, self.levels - 1).int()

    def to_margin(self, level: Tensor) -> Tensor:
        """The margin at a level, fp64."""
        lower = self.lower.double()
        return lower + level * ((self.upper.double() - lower) / (self.levels - 1))

    def to_code(self, margins: Tensor) -> Tensor:
        """Margins as bf16 numbers of the same order as their levels; NaN stays NaN."""
        key = self.to_code_key(self.to_level(margins))
        bits = torch.where(key >= 0x8000, key - 0x8000, -1 - key)
        return bits.to(torch.int16).view(torch.bfloat16).masked_fill_(margins.isnan(), torch.nan)

    def to_code_key(self, level: Tensor) -> Tensor:
        """The key, as in ``to_key``, of a level's code."""
        return level + FIRST + GAP * (level >= FEWER)

    def code_level(self, key: Tensor) -> Tensor:
        """Inverse of ``to_code_key``."""
        return key - FIRST - GAP * (key >= 0x8000)

    def from_code_key(self, key: Tensor) -> Tensor:
        """The margin, fp64, of a code's key; NaN for key 0, where nothing was counted."""
        return torch.where(key > 0, self.to_margin(self.code_level(key)), torch.nan)
