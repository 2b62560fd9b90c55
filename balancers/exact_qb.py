"""Quantile Balancing by the exact pooled order statistic (EQB)."""

from typing import Any

import torch
from torch import Tensor

from ..kernels import CodedTally, MarginTally, Routing, Tally
from .base import BiasBalancer, Solve
from .candidates import FORMS
from .quantile import MarginStore, radix_key
from .rounding import FLOATS, Rounding, fixed_bits


class ExactQB(BiasBalancer):
    """The K/E quantile of every expert's margins over the global batch, exact on margins rounded to ``key``.

    Two rounds (bf16, fixed point) or four (fp32) of ``E * 256`` int32, whatever the number of tokens; the same tokens
    split over any number of ranks and microbatches give the same bits. The routing kernel leaves the margins.

    **Candidates.** The quantile lies near the bias, so that few of the ``T * E`` margins decide it. ``cut`` keeps the
    pairs under a cut of each expert, which follows its recent moves; ``window`` counts the 254 keys around each bias
    and needs one round only. The sums over token shards tell whether the quantile is among the candidates. Where it
    is not, for any expert, the layer falls back for that step to all margins, so the result is bit for bit that of
    ``candidates=None``. ``diagnostics`` says how often.

    Args:
        key: ``bf16`` (2 rounds; spacing 0.0039 in [.5, 1)), ``fp32`` (4 rounds), or ``fixed8`` to ``fixed16`` (2
            rounds): so many bits for the range ``[min(b) - 1, max(b) + 1]``, equally spaced.
        order: ``q`` takes the ``ceil(T*K/E)``-th smallest margin, so that it and the histogram aim at the same
            token; ``q_plus_1`` the one after it, as Su and the EQB write-up do. Any value between the two balances
            an untied expert.
        candidates: None, ``cut`` or ``window``.
        fallback: where a step that falls back finds all margins. ``keep``: in the store, as without candidates; this
            saves a round with a window, and no memory. ``observe``: in the forwards of the step, once more
            (``observe_again`` of ``update_balancers``); the state is then the pairs under the cut, or the counts of
            the window, except in the steps that fall back, the first one among them.
        shared: ``ema``, ``centre``, ``frozen`` of ``BiasBalancer``.

    Raises:
        ValueError: unknown ``key``, ``order``, ``candidates`` or ``fallback``; a window of fp32 keys; routing with
            ``selection="logit"`` and fixed-point keys (margins without bounds); ``observe_again`` that brings other
            tokens (on the rank where they differ); fixed-point keys or ``fallback="observe"`` in compiled code.
    """

    needs_dropless = True
    tokens: Tensor

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        *,
        key: str = "bf16",
        order: str = "q",
        candidates: str | None = None,
        fallback: str = "keep",
        **shared: Any,
    ) -> None:
        super().__init__(num_experts, top_k, **shared)
        self.bits = fixed_bits(key)
        if order not in ("q", "q_plus_1"):
            raise ValueError(f"order must be 'q' or 'q_plus_1', got {order!r}")
        if candidates not in (None, *FORMS):
            raise ValueError(f"candidates must be null, 'cut' or 'window', got {candidates!r}")
        if fallback not in ("keep", "observe"):
            raise ValueError(f"fallback must be 'keep' or 'observe', got {fallback!r}")
        if candidates == "window" and key == "fp32":
            raise ValueError("a window needs keys of 16 bits, 'bf16' or 'fixed8' to 'fixed16', got key='fp32'")
        self.key = key
        self.order = order
        self.fallback = fallback
        self.needs_bounded_scores = self.bits is not None
        self.may_observe_again = candidates is not None and fallback == "observe"
        dtype = FLOATS.get(key, torch.bfloat16)
        self.store = MarginStore(num_experts, dtype)
        self.candidates = candidates
        self.shortlist = None if candidates is None else FORMS[candidates](num_experts, dtype)
        # of this rank, since the last update
        self.add_accumulator("tokens", 1, dtype=torch.int64)
        self._tokens_before: Tensor | None = None

    @property
    def rounding(self) -> Rounding:
        """Of the margins under the bias that routes now."""
        dtype = self.store.buffer.dtype
        return Rounding(dtype) if self.bits is None else Rounding.fixed(self.bits, self.bias)

    @property
    def _is_lean(self) -> bool:
        """Whether candidates are all that is kept now."""
        return self.may_observe_again and not self._again

    def reserve(self, num_tokens: int) -> None:
        """Make room for the margins of ``num_tokens`` tokens, if they are kept in every step."""
        if not self.may_observe_again:
            self.store.reserve(num_tokens)

    def open_tally(self) -> Tally:
        """The margins, rounded to the key, or the candidates where these are all that is kept."""
        if torch.compiler.is_compiling() and (self.may_observe_again or self.bits is not None):
            raise ValueError(
                "compiled code neither observes a step again nor keeps fixed-point margins: expected fallback='keep' "
                f"and key='bf16' or 'fp32', got fallback={self.fallback!r} and key={self.key!r}"
            )
        if self._is_lean and self.shortlist is not None:
            return self.shortlist.tally(self.bias, self.rounding)
        return MarginTally(self.store) if self.bits is None else CodedTally(self.store, self.rounding.encode)

    def accumulate(self, routing: Routing) -> None:
        """Keep the margins or the candidates, unless the routing pass has done so."""
        if self.shortlist is not None:
            self.tokens += routing.load.sum() // self.top_k
        if self._is_lean and self.shortlist is not None:
            filled = self.shortlist.is_filled_by(routing.tally)
        else:
            filled = isinstance(routing.tally, MarginTally | CodedTally) and routing.tally.rows is self.store
        if not filled:
            self.open_tally().add(routing.valid_margins)

    def solve(self) -> Solve:
        """The candidates' rounds; where there are none, or not enough, one round per byte of the key."""
        self.incomplete = False
        key = None
        if self._tokens_before is not None and not torch.equal(self.tokens, self._tokens_before):
            before, now = int(self._tokens_before), int(self.tokens)
            raise ValueError(f"observe_again must route the step's tokens, expected {before} on this rank, got {now}")
        if self.shortlist is not None and not self._again and not torch.compiler.is_compiling():
            if self.fallback == "keep":
                self.shortlist.select(self.store.margins, self.bias, self.rounding)
            key = yield from self.shortlist.solve(self.tokens, self.top_k, self.order, self.rounding)
            if key is None and self.fallback == "observe":
                self.incomplete = True
                return torch.full_like(self.bias, torch.nan)
        if key is None:
            key = yield from radix_key(self.store.buffer, self.top_k, self.order, self.store.filled)
        quantile = self.rounding.decode(key)
        if self.shortlist is not None:
            self.shortlist.learn(quantile - self.bias)
        return quantile

    def reopen(self) -> None:
        """Make ready for all margins of the step."""
        tokens = self.tokens.clone()
        super().reopen()
        self._tokens_before = tokens

    def reset(self) -> None:
        """Drop margins and candidates; addresses stay, but margins that only a fallback needs make room."""
        super().reset()
        self._tokens_before = None
        self.store.reset()
        if self.shortlist is not None:
            self.shortlist.reset()
        if self.may_observe_again:
            self.store.release()

    def reset_parameters(self) -> None:
        """Zero bias, empty accumulators, nothing learnt."""
        super().reset_parameters()
        if self.shortlist is not None:
            self.shortlist.reset_parameters()

    def diagnostics(self) -> dict[str, Tensor]:
        """With candidates, of the last update: ``fallback_share`` of the experts whose quantile was not among them, and
        ``candidate_share`` of the pairs that were."""
        if self.shortlist is None:
            return {}
        return {name: getattr(self.shortlist, name) for name in ("fallback_share", "candidate_share")}
