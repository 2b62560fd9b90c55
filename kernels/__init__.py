"""Routing, tallies and radix selection: the operations that all balancers share."""

from .fixed import FixedScale
from .gate import Gate, ShareGradient
from .radix import from_key, pair_counts, radix_counts, select_rank, target_rank, to_key
from .routing import Routing, replay, route
from .tally import CodedTally, CutTally, MarginTally, RadixTally, Tally, UniformTally, WindowTally

__all__ = [
    "CodedTally",
    "CutTally",
    "FixedScale",
    "Gate",
    "MarginTally",
    "RadixTally",
    "Routing",
    "ShareGradient",
    "Tally",
    "UniformTally",
    "WindowTally",
    "from_key",
    "pair_counts",
    "radix_counts",
    "replay",
    "route",
    "select_rank",
    "target_rank",
    "to_key",
]
