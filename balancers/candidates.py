"""What is kept of the margins where the quantile is known to lie near the bias: the pairs under a cut, or a window.

``T`` tokens, ``E`` experts, ``K`` experts a token. A margin is at most the bias of its expert exactly if the expert is
among the token's top K+1, so ``T * (K+1)`` of the ``T * E`` pairs lie there, and the K/E quantile of an expert does not
stray far from its bias. Both forms are told by the sums over token shards whether the quantile is among what they
have; it is then the same, to the last bit, as that of all margins.
"""

from collections.abc import Generator

import torch
from torch import Tensor

from ..kernels import CutTally, Tally, WindowTally, pair_counts, select_rank, target_rank
from ..kernels.radix import num_passes, to_key_unchecked
from ..kernels.tally import WINDOW_BINS, WINDOW_KEYS
from .base import FixedDtype
from .rounding import Rounding

# a cut lies this many times the root mean square of an expert's recent moves above its bias; a move is forgotten by a
# tenth a step. Of the rules tried on a real run it kept the fewest pairs at equal fallbacks (docs/log.md)
REACH = 4.0
MEMORY = 0.9

# the key of every quantile, or None where one of them is not among the candidates
Found = Generator[Tensor, Tensor, Tensor | None]


class Candidates(FixedDtype):
    """Base of both forms.

    Attributes:
        fallback_share: 0-dim fp64, share of the experts whose quantile was not among the candidates, last update.
        candidate_share: 0-dim fp64, share of the pairs that were kept or counted, last update.
    """

    fallback_share: Tensor
    candidate_share: Tensor

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.add_scratch("fallback_share", torch.zeros((), dtype=torch.float64))
        self.add_scratch("candidate_share", torch.zeros((), dtype=torch.float64))

    def certify(self, found: Tensor, tokens: Tensor, complete: Tensor) -> bool:
        """Note what was found, and say whether every expert's quantile is among it.

        Args:
            found: ``[E]`` candidates of each expert over all token shards.
            tokens: ``[E]``, all of them the number of tokens over all token shards.
            complete: ``[E]`` bool.
        """
        self.candidate_share.copy_(found.sum().double() / tokens.sum().clamp(min=1))
        self.fallback_share.copy_((~complete).double().mean())
        return bool(complete.all())

    def reset_parameters(self) -> None:
        """Nothing found yet."""
        self.fallback_share.zero_()
        self.candidate_share.zero_()

    def learn(self, move: Tensor) -> None:
        """Take in how far the quantiles lay from the bias, ``[E]``, NaN where there was no token."""


class Cut(Candidates):
    """The pairs under a cut of each expert, 4 bytes each for bf16 margins, in two buffers that grow as they need to.

    Two or four rounds, as for all margins; the first carries the number of tokens too.
    """

    values: Tensor
    experts: Tensor
    square: Tensor

    def __init__(self, num_experts: int, dtype: torch.dtype) -> None:
        super().__init__(num_experts)
        self._filled = 0
        self._selected: tuple[Tensor, Tensor] | None = None
        self.add_scratch("values", torch.empty(0, dtype=dtype))
        index = torch.int16 if num_experts <= torch.iinfo(torch.int16).max else torch.int32
        self.add_scratch("experts", torch.empty(0, dtype=index))
        # of recent moves, the mean
        self.add_scratch("square", torch.zeros(num_experts, dtype=torch.float32))

    def tally(self, bias: Tensor, rounding: Rounding) -> CutTally:
        """Keeps the pairs under the cut, which follows from the bias and what was learnt, alike on all ranks."""
        return CutTally(self, rounding.encode(bias + REACH * self.square.sqrt()), rounding.encode)

    def is_filled_by(self, tally: Tally | None) -> bool:
        """Whether the pass with this tally has left its pairs here."""
        return isinstance(tally, CutTally) and tally.pairs is self

    def select(self, rows: Tensor, bias: Tensor, rounding: Rounding) -> None:
        """Take the pairs of margins ``[T, E]`` that are rounded and kept elsewhere; rows of NaN have none."""
        self._selected = self.tally(bias, rounding).select(rows)

    def append(self, values: Tensor, experts: Tensor) -> None:
        """Take pairs ``[N]``."""
        end = self._filled + len(values)
        if end > len(self.values):
            for name in ("values", "experts"):
                smaller = getattr(self, name)
                larger = smaller.new_empty(max(end, 3 * len(smaller) // 2))
                larger[: len(smaller)] = smaller
                setattr(self, name, larger)
        self.values[self._filled : end] = values
        self.experts[self._filled : end] = experts
        self._filled = end

    def solve(self, num_tokens: Tensor, top_k: int, order: str, rounding: Rounding) -> Found:
        """Coroutine: the key of the ``K/E`` quantile of every expert; ``num_tokens [1]`` are those of this shard."""
        values, experts = self._selected or (self.values[: self._filled], self.experts[: self._filled])
        counts = pair_counts(values, experts, self.num_experts, None, 0)
        pooled = yield torch.cat([counts, num_tokens.to(counts.dtype).expand(self.num_experts, 1)], dim=1)
        counts, tokens = pooled[:, :-1], pooled[:, -1]
        rank, found = target_rank(tokens, top_k, self.num_experts, order), counts.sum(-1)
        if not self.certify(found, tokens, found >= rank):
            return None
        prefix, rank = select_rank(counts, None, rank)
        for byte in range(1, num_passes(values.dtype)):
            counts = yield pair_counts(values, experts, self.num_experts, prefix, byte)
            prefix, rank = select_rank(counts, prefix, rank)
        return prefix

    def reset(self) -> None:
        """Drop the pairs; the buffers stay."""
        self._filled = 0
        self._selected = None

    def learn(self, move: Tensor) -> None:
        """The moves of late decide how far above the bias the next cut lies."""
        square = move.float().square()
        mean = torch.where(self.square > 0, MEMORY * self.square + (1 - MEMORY) * square, square)
        torch.where(square.isnan(), self.square, mean, out=self.square)

    def reset_parameters(self) -> None:
        """Nothing learnt, nothing found."""
        super().reset_parameters()
        self.square.zero_()


class Window(Candidates):
    """Counts of the 254 keys around each bias and of what lies below and above: one round of ``E * 256`` int32.

    Nothing of the size of the tokens is kept. The spacing of the keys decides how far a quantile may move in a step:
    with ``fixed12`` keys by 127 * 2**-12 of the range, 0.06 and more; bf16 keys lie so close at zero that the window
    of an expert without much of a bias is narrow.
    """

    counts: Tensor
    first: Tensor

    def __init__(self, num_experts: int, dtype: torch.dtype) -> None:
        super().__init__(num_experts)
        self.add_scratch("counts", torch.zeros(num_experts, WINDOW_BINS, dtype=torch.int32))
        self.add_scratch("first", torch.zeros(num_experts, dtype=torch.int64))

    def tally(self, bias: Tensor, rounding: Rounding) -> WindowTally:
        """Counts under the bias that routes now."""
        scale = rounding.scale
        centre = to_key_unchecked(bias.bfloat16()) if scale is None else scale.to_level(bias).long()
        self.first.copy_(centre - WINDOW_KEYS // 2)
        return WindowTally(self.counts, self.first, scale)

    def is_filled_by(self, tally: Tally | None) -> bool:
        """Whether the pass with this tally has counted here."""
        return isinstance(tally, WindowTally) and tally.counts is self.counts

    def select(self, rows: Tensor, bias: Tensor, rounding: Rounding) -> None:
        """Count margins ``[T, E]`` that are rounded and kept elsewhere: all of the step, but for rows of NaN."""
        self.counts.zero_()
        broken = rows[:, 0].isnan()
        self.tally(bias, rounding).add_rows(rows[~broken] if broken.any() else rows)

    def solve(self, num_tokens: Tensor, top_k: int, order: str, rounding: Rounding) -> Found:
        """Coroutine: the key of the ``K/E`` quantile of every expert."""
        pooled = yield self.counts
        tokens = pooled.sum(-1)
        rank = target_rank(tokens, top_k, self.num_experts, order)
        upto = pooled[:, :-1].cumsum(-1)
        complete = (tokens == 0) | (rank > upto[:, 0]) & (rank <= upto[:, -1])
        if not self.certify(upto[:, -1], tokens, complete):
            return None
        bins = torch.searchsorted(upto, rank[:, None]).squeeze(-1)
        key = self.first - 1 + bins
        key = key if rounding.scale is None else rounding.scale.to_code_key(key)
        # no token: the key of nothing
        return torch.where(tokens > 0, key, 0)

    def reset(self) -> None:
        """Zero counts, in place."""
        self.counts.zero_()
        self.first.zero_()

    def reset_parameters(self) -> None:
        """Zero counts, nothing found."""
        super().reset_parameters()
        self.reset()


FORMS: dict[str, type[Cut] | type[Window]] = {"cut": Cut, "window": Window}
