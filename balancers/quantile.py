"""The exact quantile of margins that are spread over token shards: their store, and the coroutine that finds it.

``N`` margins of one expert on this shard, ``E`` experts, ``K`` experts a token.
"""

import torch
from torch import Tensor

from ..kernels import from_key, radix_counts, select_rank, target_rank
from ..kernels.radix import num_passes
from .base import FixedDtype, Solve


class MarginStore(FixedDtype):
    """The margins of one optimizer step, in one buffer ``[capacity, E]`` that stays in place once large enough."""

    buffer: Tensor

    def __init__(self, num_experts: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_rows = 0
        self.add_scratch("buffer", torch.empty(0, num_experts, dtype=dtype))

    def reserve(self, num_tokens: int) -> None:
        """Make room for ``num_tokens`` valid tokens of one optimizer step on this rank; what is stored stays."""
        if num_tokens > self.buffer.shape[0]:
            larger = self.buffer.new_empty(num_tokens, self.buffer.shape[1])
            larger[: self.num_rows] = self.buffer[: self.num_rows]
            self.buffer = larger

    def append(self, margins: Tensor) -> None:
        """Round ``margins [N, E]`` to the dtype of the store and keep them."""
        end = self.num_rows + margins.shape[0]
        self.reserve(end)
        self.buffer[self.num_rows : end] = margins
        self.num_rows = end

    @property
    def margins(self) -> Tensor:
        """What is stored, ``[N, E]``, a view."""
        return self.buffer[: self.num_rows]

    def reset(self) -> None:
        """Empty the store; the buffer stays."""
        self.num_rows = 0


def radix_quantile(margins: Tensor, top_k: int, order: str = "q", first: Tensor | None = None) -> Solve:
    """Coroutine: the ``K/E`` quantile of every column over all token shards, one byte of the key per round.

    Args:
        margins: ``[N, E]`` bf16 or fp32 of this shard.
        top_k: ``K``.
        order: see ``target_rank``.
        first: ``[E, 256]`` counts of the highest byte, if they are there already.

    Returns:
        ``[E]`` fp32; NaN where no shard has a token.
    """
    num_experts = margins.shape[1]
    prefix = rank = None
    for byte in range(num_passes(margins.dtype)):
        counts = yield first if byte == 0 and first is not None else radix_counts(margins, prefix, byte)
        if rank is None:
            rank = target_rank(counts.sum(-1), top_k, num_experts, order)
        prefix, rank = select_rank(counts, prefix, rank)
    assert prefix is not None
    return from_key(prefix, margins.dtype)
