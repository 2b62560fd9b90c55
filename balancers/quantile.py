"""The exact quantile of margins that are spread over token shards: their store, and the coroutine that finds it.

``N`` margins of one expert on this shard, ``E`` experts, ``K`` experts a token.
"""

import numpy as np
import torch
from torch import Tensor

from ..kernels import MarginTally, Routing, from_key, radix_counts, select_rank, target_rank
from ..kernels.backend import use_triton
from ..kernels.radix import num_passes, ordered_bits, ordered_counts
from .base import FixedDtype, Solve

# up to here, on the CPU, a partial sort takes less than four passes, and passes over ordered bits less than over values
FEW_MARGINS = 2**16


class MarginStore(FixedDtype):
    """The margins of one optimizer step, in one buffer ``[capacity, E]`` that stays in place once large enough.

    How many rows are in use is kept on the device, so that appending needs no synchronisation and can be captured
    in a graph; whether they fit is known on the host as well, except in compiled or replayed code: there ``reserve``
    must have made the room.
    """

    buffer: Tensor
    filled: Tensor

    def __init__(self, num_experts: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._expected = 0
        self.add_scratch("buffer", torch.empty(0, num_experts, dtype=dtype))
        self.add_scratch("filled", torch.zeros(1, dtype=torch.int64))

    def reserve(self, num_tokens: int) -> None:
        """Make room for ``num_tokens`` tokens of one optimizer step on this rank; what is stored stays."""
        if num_tokens > self.buffer.shape[0]:
            larger = self.buffer.new_empty(num_tokens, self.buffer.shape[1])
            larger[: self.buffer.shape[0]] = self.buffer
            self.buffer = larger

    def room(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """The buffer, with room for ``num_tokens`` more rows, and ``filled [1]`` int64.

        Raises:
            ValueError: no room, in code that is being compiled.
        """
        if torch.compiler.is_compiling():
            if num_tokens > self.buffer.shape[0]:
                raise ValueError(
                    f"compiled code cannot grow the margin store: call reserve(tokens per step) before the first step, "
                    f"got {num_tokens} tokens and room for {self.buffer.shape[0]}"
                )
        else:
            self._expected += num_tokens
            self.reserve(self._expected)
        return self.buffer, self.filled

    def take(self, routing: Routing) -> None:
        """Keep the margins of a routing, unless its pass has left them here."""
        if not isinstance(routing.tally, MarginTally) or routing.tally.rows is not self:
            MarginTally(self).add(routing.valid_margins)

    @property
    def margins(self) -> Tensor:
        """What is stored, ``[N, E]``, a view; rows of NaN belong to tokens that do not count."""
        return self.buffer[: int(self.filled)]

    def reset(self) -> None:
        """Empty the store; the buffer stays."""
        self.filled.zero_()
        self._expected = 0

    def release(self) -> None:
        """Give the memory of the buffer back."""
        if len(self.buffer):
            self.buffer = self.buffer.new_empty(0, self.buffer.shape[1])


def radix_key(margins: Tensor, top_k: int, order: str = "q", num_rows: Tensor | None = None) -> Solve:
    """Coroutine: the key of the ``K/E`` quantile of every column over all token shards, one byte of it per round.

    Args:
        margins: ``[N, E]`` bf16 or fp32 of this shard.
        top_k: ``K``.
        order: see ``target_rank``.
        num_rows: ``[1]`` int64, how many of the rows are in use; None for all.

    Returns:
        ``[E]`` int64, see ``from_key``; 0 where no shard has a token.
    """
    prefix = rank = bits = None
    passes = num_passes(margins.dtype)
    if not torch.compiler.is_compiling() and not use_triton(margins):
        margins, num_rows = margins if num_rows is None else margins[: int(num_rows)], None
        bits = ordered_bits(margins) if margins.numel() <= FEW_MARGINS else None
    for byte in range(passes):
        if bits is None:
            counts = yield radix_counts(margins, prefix, byte, num_rows)
        else:
            counts = yield ordered_counts(bits, prefix, byte, passes)
        prefix, rank = _narrow(counts, prefix, rank, top_k, order)
    assert prefix is not None
    return prefix


def radix_quantile(margins: Tensor, top_k: int, order: str = "q", num_rows: Tensor | None = None) -> Solve:
    """Coroutine: as ``radix_key``, the quantile itself, ``[E]`` fp32; NaN where no shard has a token."""
    return from_key((yield from radix_key(margins, top_k, order, num_rows)), margins.dtype)


def local_quantile(store: MarginStore, top_k: int) -> Tensor:
    """The ``K/E`` quantile of what this process alone has stored, ``[E]`` fp32; NaN where it has no token."""
    buffer = store.buffer
    if buffer.device.type == "cpu" and not torch.compiler.is_compiling() and not use_triton(buffer):
        margins = store.margins
        if 0 < margins.numel() <= FEW_MARGINS:
            rank = -(-len(margins) * top_k // buffer.shape[1])
            # the same order statistic, but for the sign of a zero
            return torch.from_numpy(np.partition(margins.numpy(), rank - 1, axis=0)[rank - 1])
    # as above, without a coroutine, which no compiler follows
    prefix = left = None
    for byte in range(num_passes(buffer.dtype)):
        prefix, left = _narrow(radix_counts(buffer, prefix, byte, store.filled), prefix, left, top_k, "q")
    assert prefix is not None
    return from_key(prefix, buffer.dtype)


def _narrow(
    counts: Tensor, prefix: Tensor | None, rank: Tensor | None, top_k: int, order: str
) -> tuple[Tensor, Tensor]:
    """One pass further: the prefix longer by a byte, and the rank under it."""
    if rank is None:
        rank = target_rank(counts.sum(-1), top_k, len(counts), order)
    return select_rank(counts, prefix, rank)
