"""How a tally passes into the routing op, which takes tensors and numbers, and out of it again."""

from torch import Tensor

from .fixed import FixedScale
from .tally import CodedTally, CutTally, FixedRows, MarginTally, RadixTally, Tally, UniformTally, WindowTally

# what the op writes to and reads for a tally: counts, clamped, lower, upper, kept, filled, first, levels
Writes = tuple[
    Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, int
]
# tallies that the op fills in its pass
BY_THE_OP = (UniformTally, RadixTally, WindowTally, MarginTally)


def refuse_other_tally(tally: Tally | None, given: int) -> None:
    """Check that a tally is for ``given`` experts.

    Raises:
        ValueError: with both numbers.
    """
    num_experts = None
    if isinstance(tally, UniformTally | RadixTally | WindowTally):
        num_experts = tally.counts.shape[0]
    elif isinstance(tally, MarginTally | CodedTally):
        num_experts = tally.rows.room(0)[0].shape[1]
    elif isinstance(tally, CutTally):
        num_experts = tally.cut.shape[0]
    if num_experts not in (None, given):
        raise ValueError(f"tally counts {num_experts} experts, the logits have {given}")


def with_room(tally: Tally | None, num_tokens: int) -> Tally | None:
    """The same tally, with room for all tokens at once where it needs any."""
    if isinstance(tally, MarginTally | CodedTally):
        rows = FixedRows(*tally.rows.room(num_tokens))
        return MarginTally(rows) if isinstance(tally, MarginTally) else CodedTally(rows, tally.encode)
    return tally


def open_tally(tally: Tally | None, num_tokens: int) -> Writes:
    """What the op is given; none for a tally that it does not know."""
    if isinstance(tally, UniformTally):
        return tally.counts, tally.clamped, tally.lower, tally.upper, None, None, None, 0
    if isinstance(tally, RadixTally):
        return tally.counts, None, None, None, None, None, None, 0
    if isinstance(tally, WindowTally):
        scale = tally.scale
        bounds = (None, None, 0) if scale is None else (scale.lower, scale.upper, scale.levels)
        return tally.counts, None, *bounds[:2], None, None, tally.first, bounds[2]
    if isinstance(tally, MarginTally):
        return None, None, None, None, *tally.rows.room(num_tokens), None, 0
    return None, None, None, None, None, None, None, 0


def close_tally(
    counts: Tensor | None,
    clamped: Tensor | None,
    lower: Tensor | None,
    upper: Tensor | None,
    kept: Tensor | None,
    filled: Tensor | None,
    first: Tensor | None,
    levels: int,
) -> Tally | None:
    """The tally that was opened, for the reference inside the op."""
    if counts is not None and first is not None:
        scale = None if lower is None or upper is None else FixedScale(lower, upper, levels)
        return WindowTally(counts, first, scale)
    if counts is not None and clamped is not None and lower is not None and upper is not None:
        return UniformTally(counts, clamped, lower, upper)
    if counts is not None:
        return RadixTally(counts)
    return MarginTally(FixedRows(kept, filled)) if kept is not None and filled is not None else None
