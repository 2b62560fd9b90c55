"""Quantile Balancing by the exact pooled order statistic (EQB)."""

from typing import Any

import torch
from torch import Tensor

from ..kernels import CutTally, MarginTally, Routing, Tally, WindowTally
from .base import BiasBalancer, Solve
from .candidates import FORMS, Cut
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
            saves passes and rounds. ``observe``: in the forwards of the step, once more (``observe_again`` of
            ``update_balancers``); the state is then the pairs under the cut, or the counts of the window, except in
            the steps that fall back, the first one among them.
        shared: ``ema``, ``centre``, ``frozen`` of ``BiasBalancer``.

    Raises:
        ValueError: unknown ``key``, ``order``, ``candidates`` or ``fallback``; a window of fp32 keys; routing with
            ``selection="logit"`` and fixed-point keys (margins without bounds); ``observe_again`` that brings other
            tokens; compiled code with ``candidates="cut"`` and ``fallback="observe"``.
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
        bits = fixed_bits(key)
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
        self.needs_bounded_scores = bits is not None
        self.may_observe_again = candidates is not None and fallback == "observe"
        dtype = FLOATS.get(key, torch.bfloat16)
        self.store = MarginStore(num_experts, dtype)
        self.candidates = None if candidates is None else FORMS[candidates](num_experts, dtype)
        # of this rank, since the last update
        self.add_accumulator("tokens", 1, dtype=torch.int64)
        self._tokens_before: Tensor | None = None

    @property
    def rounding(self) -> Rounding:
        """Of the margins under the bias that routes now."""
        return Rounding.of(self.key, self.bias)

    @property
    def _is_lean(self) -> bool:
        """Whether candidates are all that is kept now."""
        return self.may_observe_again and not self._again

    def reserve(self, num_tokens: int) -> None:
        """Make room for the margins of ``num_tokens`` tokens, if they are kept in every step."""
        if not self.may_observe_again:
            self.store.reserve(num_tokens)

    def open_tally(self) -> Tally | None:
        """The margins, rounded to the key, or the candidates where these are all that is kept."""
        if self._is_lean:
            return self._candidate_tally()
        # of fixed-point margins the routing pass knows nothing
        return MarginTally(self.store) if self.rounding.scale is None else None

    def _candidate_tally(self) -> CutTally | WindowTally:
        assert self.candidates is not None
        if torch.compiler.is_compiling() and isinstance(self.candidates, Cut):
            raise ValueError(
                "compiled code cannot collect the pairs under a cut: expected candidates='window' or fallback='keep'"
            )
        return self.candidates.tally(self.bias, self.rounding)

    def accumulate(self, routing: Routing) -> None:
        """Keep the margins or the candidates, unless the routing pass has done so."""
        if self.candidates is not None:
            self.tokens += routing.load.sum() // self.top_k
        if self._is_lean:
            if not isinstance(routing.tally, CutTally | WindowTally):
                self._candidate_tally().add(routing.valid_margins)
        elif self.rounding.scale is None:
            self.store.take(routing)
        else:
            MarginTally(self.store).add(self.rounding.encode(routing.valid_margins))

    def solve(self) -> Solve:
        """The candidates' rounds; where there are none, or not enough, one round per byte of the key."""
        self.incomplete = False
        key = None
        if self._tokens_before is not None and not torch.equal(self.tokens, self._tokens_before):
            before, now = int(self._tokens_before), int(self.tokens)
            raise ValueError(
                f"observe_again must route the tokens of the step, expected {before} on this rank, got {now}"
            )
        if self.candidates is not None and not self._again and not torch.compiler.is_compiling():
            if self.fallback == "keep":
                margins = self.store.margins
                # rows of NaN are tokens that do not count
                self.candidates.select(margins[~margins[:, 0].isnan()], self.bias, self.rounding)
            key = yield from self.candidates.solve(self.tokens, self.top_k, self.order, self.rounding)
            if key is None and self.fallback == "observe":
                self.incomplete = True
                return torch.full_like(self.bias, torch.nan)
        if key is None:
            key = yield from radix_key(self.store.buffer, self.top_k, self.order, self.store.filled)
        quantile = self.rounding.decode(key)
        if self.candidates is not None:
            self.candidates.learn(quantile - self.bias)
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
        if self.candidates is not None:
            self.candidates.reset()
        if self.may_observe_again:
            self.store.release()

    def reset_parameters(self) -> None:
        """Zero bias, empty accumulators, nothing learnt."""
        super().reset_parameters()
        if self.candidates is not None:
            self.candidates.reset_parameters()

    def diagnostics(self) -> dict[str, Tensor]:
        """With candidates, of the last update: ``fallback_share`` of the experts whose quantile was not among them, and
        ``candidate_share`` of the pairs that were."""
        if self.candidates is None:
            return {}
        return {name: getattr(self.candidates, name) for name in ("fallback_share", "candidate_share")}
