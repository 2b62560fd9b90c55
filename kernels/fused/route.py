"""Routing in one kernel: scores, the top K+1 of score + bias, weights, cutoff, load, and what a tally asks for.

``T`` tokens, ``E`` experts padded to a power of two ``EP``, ``K`` experts a token padded likewise (with the cutoff) to
``KP``, ``B`` bins. One warp holds ``512 / EP`` tokens: a row lies in one warp, so every reduction stays inside it.

**The fast key.** With the largest score 1 and the biases in ``[lowest, highest]``, ``s + b`` becomes a fixed-point
number of 23 bits (22 for more than 512 experts) by one multiply-add: the result lies in ``[2**23, 2**24)``, where
the spacing of fp32 is 1, so its low bits are that number. Above the reversed expert id they make a 32-bit key: all
keys differ, ties fall to the lowest id. After the largest key ``m``, the next one is ``m + max(key - m)`` in
unsigned arithmetic: keys that were taken wrap to small numbers, the others to large ones. No masking, no reduction
over ids.

The fast key sees scores to ``(1 + highest - lowest) * 2**-23``; where the K-th to (K+2)-th biased scores are closer
than that, it may pick another expert than the comparison in fp32 (``exact=True``). Of 65,536 rows of 256 random scores
one differed with sigmoid scores (in the order of its experts), up to eight with softmax scores, which are smaller
(docs/log.md). Logits have no bounds, so ``selection="logit"`` always compares in fp32.

Cost on a GPU: bytes ``T*E*itemsize`` read, ``T*(12*K + 4)`` written, ``T*E*2`` more for bf16 margins.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .numerics import INTERPRETED, PTX, bf16_bits, is_finite, launch, sigmoid, to_key
from .radix import count_highest

# 512 scores in one warp are 16 registers a lane; the interpreter pays by the program, not by the score
SCORES_PER_PROGRAM = 1 << 15 if INTERPRETED else 512
# one-warp programs that an H200 holds at once (32 on each of 132 multiprocessors); more tokens are a loop
MAX_PROGRAMS = 4224


@triton.jit(do_not_specialize=["num_tokens", "capacity"])
def _route_kernel(
    logits_ptr,
    bias_ptr,
    valid_ptr,
    experts_ptr,
    weights_ptr,
    cutoff_ptr,
    counters_ptr,
    counts_ptr,
    clamped_ptr,
    lower_ptr,
    upper_ptr,
    kept_ptr,
    filled_ptr,
    first_ptr,
    num_tokens,
    capacity,
    scale,
    E: tl.constexpr,
    EP: tl.constexpr,
    LOG_EP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    NUM_BINS: tl.constexpr,
    LEVELS: tl.constexpr,
    KEPT_BITS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    LOGIT: tl.constexpr,
    NORMALISE: tl.constexpr,
    EXACT: tl.constexpr,
    PTX: tl.constexpr,
):
    offs_e = tl.arange(0, EP)
    offs_k = tl.arange(0, KP)
    mask_e = offs_e < E
    chosen = (offs_k < K)[None, :]
    bias = tl.zeros([EP], tl.float32)
    bias_broken = False
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offs_e, mask=mask_e, other=0.0)
        bias_broken = tl.max((is_finite(bias) == 0).to(tl.int32), axis=0) > 0
        bias = tl.where(is_finite(bias), bias, 0.0)
    if not EXACT:
        VALUE_BITS: tl.constexpr = 32 - LOG_EP if LOG_EP > 9 else 23
        lowest = tl.min(tl.where(mask_e, bias, float("inf")), axis=0)
        highest = tl.max(tl.where(mask_e, bias, float("-inf")), axis=0)
        # four and one off the ends: rounding stays inside, and no key is 0 (padding) or all ones (not finite)
        slope = (2.0**VALUE_BITS - 4.0) / (1.0 + highest - lowest)
        base = (bias - lowest) * slope + (8388608.0 + 1.0)
        slope = tl.zeros([BLOCK_T, EP], tl.float32) + slope
        base = tl.zeros([BLOCK_T, EP], tl.float32) + base[None, :]
        reversed_id = (EP - 1 - offs_e).to(tl.uint32)[None, :]
    if first_ptr is not None:
        first = tl.load(first_ptr + offs_e, mask=mask_e, other=0).to(tl.int32)
    if lower_ptr is not None:
        lower = tl.load(lower_ptr)
        upper = tl.load(upper_ptr)
        # as torch divides a number by a tensor; levels are bins from the middle of the first to that of the last
        bins_per_unit = tl.div_rn(1.0, upper - lower) * (LEVELS - 1.0 if LEVELS > 0 else NUM_BINS)
    if kept_ptr is not None:
        start = tl.load(filled_ptr)

    for tile in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(0)):
        offs_t = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        mask_t = offs_t < num_tokens
        # a batch may hold more than 2**31 logits
        rows = offs_t.to(tl.int64)[:, None]
        mask_TE = mask_t[:, None] & mask_e[None, :]
        logits = tl.load(logits_ptr + rows * E + offs_e[None, :], mask=mask_TE, other=0.0).to(tl.float32)
        finite = is_finite(logits)
        if SOFTMAX:
            peak = tl.max(tl.where(mask_e[None, :], logits, float("-inf")), axis=1)
            scores = tl.where(mask_e[None, :], tl.exp(logits - peak[:, None]), 0.0)
            total = tl.sum(scores, axis=1)
            scores = scores / total[:, None]
        else:
            scores = sigmoid(logits, PTX)
        unbiased = logits if LOGIT else scores

        # the top K+1, a column of picks per rank
        picks = tl.zeros([BLOCK_T, KP], tl.int32)
        if EXACT:
            broken = (tl.max((finite == 0).to(tl.int32), axis=1) > 0) | bias_broken
            biased = tl.where(broken[:, None], -offs_e.to(tl.float32)[None, :], unbiased + bias[None, :])
            biased = tl.where(mask_e[None, :], biased, float("-inf"))
            for rank in tl.static_range(K + 1):
                largest = tl.max(biased, axis=1)
                pick = tl.min(tl.where(biased == largest[:, None], offs_e[None, :], EP), axis=1)
                picks = tl.where((offs_k == rank)[None, :], pick[:, None], picks)
                biased = tl.where(offs_e[None, :] == pick[:, None], float("-inf"), biased)
        else:
            fixed = tl.fma(scores, slope, base).to(tl.uint32, bitcast=True)
            keys = (fixed << LOG_EP) + reversed_id
            keys = tl.where(finite, keys, tl.full([BLOCK_T, EP], 0xFFFFFFFF, tl.uint32))
            if EP > E:
                keys = tl.where(mask_e[None, :], keys, tl.full([BLOCK_T, EP], 0, tl.uint32))
            key = tl.max(keys, axis=1)
            broken = (key == 0xFFFFFFFF) | bias_broken
            picked = tl.where((offs_k == 0)[None, :], key[:, None], tl.full([BLOCK_T, KP], 0, tl.uint32))
            for rank in tl.static_range(1, K + 1):
                key = key + tl.max(keys - key[:, None], axis=1)
                picked = tl.where((offs_k == rank)[None, :], key[:, None], picked)
            picks = EP - 1 - (picked & (EP - 1)).to(tl.int32)
            picks = tl.where(broken[:, None], offs_k[None, :], picks)

        # the cutoff, from the logit of the last pick
        last = tl.max(tl.where((offs_k == K)[None, :], picks, 0), axis=1)
        cutoff = tl.load(logits_ptr + offs_t.to(tl.int64) * E + last, mask=mask_t, other=0.0).to(tl.float32)
        if SOFTMAX and not LOGIT:
            cutoff = tl.exp(cutoff - peak) / total
        elif not LOGIT:
            cutoff = sigmoid(cutoff, PTX)
        if bias_ptr is not None:
            cutoff += tl.load(bias_ptr + last)
        # no number for a token without one, and none of it in any counter
        cutoff = tl.where(broken, float("nan"), cutoff)
        tl.store(cutoff_ptr + offs_t, cutoff, mask=mask_t)

        mask_picks = mask_t[:, None] & chosen
        picked = tl.load(logits_ptr + rows * E + picks, mask=mask_picks, other=0.0).to(tl.float32)
        if NORMALISE:
            picked = tl.where(chosen, picked, float("-inf"))
            best = tl.max(picked, axis=1)[:, None]
            if SOFTMAX:
                weights = tl.exp(picked - best)
            else:
                # where all scores are tiny, sigmoid(x) is exp(x): moved up to exp(-20), their ratios stay and none
                # underflows
                weights = sigmoid(picked - tl.minimum(best + 20.0, 0.0), PTX)
            weights = weights * (scale / tl.sum(weights, axis=1))[:, None]
        elif SOFTMAX:
            weights = tl.exp(picked - peak[:, None]) * (scale / total)[:, None]
        else:
            weights = sigmoid(picked, PTX) * scale
        weights = tl.where(broken[:, None], float("nan"), weights)
        tl.store(experts_ptr + rows * K + offs_k[None, :], picks.to(tl.int64), mask=mask_picks)
        tl.store(weights_ptr + rows * K + offs_k[None, :], weights, mask=mask_picks)
        counted = mask_t & (broken == 0)
        if valid_ptr is not None:
            counted = counted & (tl.load(valid_ptr + offs_t, mask=mask_t, other=0) != 0)
        tl.atomic_add(counters_ptr + picks, 1, mask=counted[:, None] & mask_picks, sem="relaxed")
        uncounted = mask_t & broken

        if first_ptr is not None:
            margins = cutoff[:, None] - unbiased
            if LEVELS > 0:
                keys = tl.floor((margins - lower) * bins_per_unit + 0.5)
                keys = tl.minimum(tl.maximum(keys, 0.0), LEVELS - 1.0).to(tl.int32)
            else:
                keys = to_key(bf16_bits(margins, PTX).to(tl.uint32) & 0xFFFF, 16).to(tl.int32)
            bins = tl.maximum(keys - first[None, :] + 1, 0)
            # most margins lie above the window: they are what is left of the tokens
            inside = counted[:, None] & mask_e[None, :] & (bins < NUM_BINS - 1)
            tl.atomic_add(counts_ptr + bins * E + offs_e[None, :], 1, mask=inside, sem="relaxed")
        elif NUM_BINS > 0:
            margins = cutoff[:, None] - unbiased
            mask_counted = counted[:, None] & mask_e[None, :]
            bins = tl.minimum(tl.maximum((margins - lower) * bins_per_unit, 0.0), NUM_BINS - 1.0).to(tl.int32)
            address = counts_ptr + bins * E + offs_e[None, :]
            tl.atomic_add(address, 1, mask=mask_counted, sem="relaxed")
            outside = mask_counted & ((margins < lower) | (margins > upper))
            num_outside = tl.sum(outside.to(tl.int32), axis=0)
            tl.atomic_add(clamped_ptr + offs_e, num_outside, mask=num_outside > 0, sem="relaxed")
        if kept_ptr is not None:
            # a token that does not count leaves NaN: no radix pass counts it
            margins = tl.where(counted[:, None], cutoff[:, None] - unbiased, float("nan"))
            position = start + rows
            room = position < capacity
            uncounted = uncounted | (counted & (start + offs_t >= capacity))
            address = kept_ptr + position * E + offs_e[None, :]
            if KEPT_BITS == 16:
                tl.store(address, bf16_bits(margins, PTX), mask=mask_TE & room)
            else:
                tl.store(address, margins, mask=mask_TE & room)
        num_uncounted = tl.sum(uncounted.to(tl.int32), axis=0)
        tl.atomic_add(counters_ptr + E, num_uncounted, mask=num_uncounted > 0, sem="relaxed")


def route(
    logits: Tensor,
    bias: Tensor | None,
    valid: Tensor | None,
    counts: Tensor | None,
    clamped: Tensor | None,
    lower: Tensor | None,
    upper: Tensor | None,
    kept: Tensor | None,
    filled: Tensor | None,
    first: Tensor | None,
    levels: int,
    *,
    top_k: int,
    selection: str,
    gate: str,
    normalise: bool,
    scale: float,
    exact: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernel; arguments and results are those of the op ``equipoise::route``."""
    num_tokens, num_experts = logits.shape
    device = logits.device
    experts = torch.empty(num_tokens, top_k, dtype=torch.int64, device=device)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=device)
    cutoff = torch.empty(num_tokens, dtype=torch.float32, device=device)
    counters = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    # lanes hold neighbouring experts: bin by bin, one memory sector serves several of them
    bins = None
    if counts is not None and (clamped is not None or first is not None):
        bins = torch.zeros(counts.shape[1], num_experts, dtype=torch.int32, device=device)
    elif counts is not None:
        # the radix pass reads margins; nobody else wants these
        kept = torch.empty(num_tokens, num_experts, dtype=torch.bfloat16, device=device)
        filled = torch.zeros(1, dtype=torch.int64, device=device)
    padded = triton.next_power_of_2(num_experts)
    # the keys of a window take registers beside the scores
    block_tokens = max(1, SCORES_PER_PROGRAM // (padded if first is None else 2 * padded))
    launch(
        _route_kernel,
        (min(triton.cdiv(num_tokens, block_tokens), MAX_PROGRAMS),),
        logits,
        logits.contiguous(),
        None if bias is None else bias.float().contiguous(),
        None if valid is None else valid.contiguous().view(torch.uint8),
        experts,
        weights,
        cutoff,
        counters,
        bins,
        clamped,
        lower,
        upper,
        kept if kept is None or kept.dtype == torch.float32 else kept.view(torch.int16),
        filled,
        None if first is None else first.contiguous(),
        num_tokens,
        0 if kept is None else kept.shape[0],
        scale,
        E=num_experts,
        EP=padded,
        LOG_EP=padded.bit_length() - 1,
        K=top_k,
        KP=triton.next_power_of_2(top_k + 1),
        BLOCK_T=block_tokens,
        NUM_BINS=0 if bins is None else len(bins),
        LEVELS=levels,
        KEPT_BITS=0 if kept is None else 8 * kept.dtype.itemsize,
        SOFTMAX=gate == "softmax",
        LOGIT=selection == "logit",
        NORMALISE=normalise,
        EXACT=exact or selection == "logit",
        PTX=PTX,
        num_warps=1,
    )
    if counts is not None and bins is not None:
        if first is not None:
            bins[-1] = counters[:-1].sum() // top_k - bins[:-1].sum(0)
        counts += bins.t()
    elif counts is not None and kept is not None:
        count_highest(kept, counts, num_tokens)
    if filled is not None:
        filled += num_tokens
    return experts, weights, cutoff, counters
