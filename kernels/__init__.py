"""Routing, tallies and radix selection: the operations that all balancers share."""

from .gate import Gate, ShareGradient
from .radix import from_key, radix_counts, select_rank, target_rank, to_key
from .routing import Routing, replay, route
from .tally import MarginTally, RadixTally, Tally, UniformTally

__all__ = [
    "Gate",
    "MarginTally",
    "RadixTally",
    "Routing",
    "ShareGradient",
    "Tally",
    "UniformTally",
    "from_key",
    "radix_counts",
    "replay",
    "route",
    "select_rank",
    "target_rank",
    "to_key",
]
