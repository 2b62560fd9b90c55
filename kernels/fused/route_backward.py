"""The gradient of the logits in one kernel: that of the gate weights and what a balancer adds to the score gradient.

``T`` tokens, ``E`` experts padded to ``EP``, ``K`` experts a token padded to ``KP``. A program writes the part of every
expert of its rows, and after a barrier the picked entries over it: two stores, no atomics, the same bits every time.

Cost on a GPU: ``T*E*itemsize`` written, and read too where every expert has a gradient (an injection, or softmax).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .numerics import INTERPRETED, PTX, bf16_bits, launch, log_sigmoid, sigmoid

# four rows of 256 experts in one warp
ENTRIES_PER_PROGRAM = 1 << 15 if INTERPRETED else 1024


@triton.jit
def _store(address, value, mask, BF16: tl.constexpr, PTX: tl.constexpr):
    if BF16:
        tl.store(address, bf16_bits(value, PTX), mask=mask)
    else:
        tl.store(address, value.to(address.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _route_backward_kernel(
    logits_ptr,
    experts_ptr,
    grad_weights_ptr,
    injection_ptr,
    valid_ptr,
    grad_ptr,
    num_tokens,
    scale,
    E: tl.constexpr,
    EP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALISE: tl.constexpr,
    BF16: tl.constexpr,
    PTX: tl.constexpr,
):
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_e = tl.arange(0, EP)[None, :]
    offs_k = tl.arange(0, KP)[None, :]
    mask_t = offs_t < num_tokens
    rows = offs_t.to(tl.int64)[:, None]
    mask_TE = mask_t[:, None] & (offs_e < E)
    mask_TK = mask_t[:, None] & (offs_k < K)
    picks = tl.load(experts_ptr + rows * K + offs_k, mask=mask_TK, other=0)
    grad_picked = tl.load(grad_weights_ptr + rows * K + offs_k, mask=mask_TK, other=0.0) * scale
    picked = tl.load(logits_ptr + rows * E + picks, mask=mask_TK, other=0.0).to(tl.float32)

    # what the gate weights give to the picked logits, or, for plain softmax scores, to the picked scores
    if NORMALISE:
        logs = tl.where(mask_TK, picked if SOFTMAX else log_sigmoid(picked), float("-inf"))
        # a row beyond the last token is empty: keep its maximum finite
        peak = tl.maximum(tl.max(logs, axis=1), -3.0e38)
        powers = tl.exp(logs - peak[:, None])
        shares = powers / tl.maximum(tl.sum(powers, axis=1), 1e-30)[:, None]
        direct = shares * (grad_picked - tl.sum(grad_picked * shares, axis=1)[:, None])
        if not SOFTMAX:
            # d log sigmoid(z) / dz = sigmoid(-z)
            direct = direct * sigmoid(-picked, PTX)
        through_scores = tl.zeros([BLOCK_T, KP], tl.float32)
    else:
        direct = tl.zeros([BLOCK_T, KP], tl.float32)
        through_scores = grad_picked
    injected = tl.zeros([BLOCK_T, EP], tl.float32)
    if injection_ptr is not None:
        injected += tl.load(injection_ptr + offs_e, mask=offs_e < E, other=0.0)
        injected_picked = tl.load(injection_ptr + picks, mask=mask_TK, other=0.0)
        if valid_ptr is not None:
            valid = tl.load(valid_ptr + offs_t, mask=mask_t, other=0).to(tl.float32)[:, None]
            injected = injected * valid
            injected_picked = injected_picked * valid
        through_scores += injected_picked

    # through the scores to the logits
    if SOFTMAX and (injection_ptr is not None or not NORMALISE):
        logits = tl.load(logits_ptr + rows * E + offs_e, mask=mask_TE, other=0.0).to(tl.float32)
        top = tl.max(tl.where(offs_e < E, logits, float("-inf")), axis=1)[:, None]
        exponentials = tl.where(offs_e < E, tl.exp(logits - top), 0.0)
        total = tl.sum(exponentials, axis=1)[:, None]
        scores = exponentials / total
        picked_scores = tl.exp(picked - top) / total
        mean = tl.sum(injected * scores, axis=1)[:, None]
        if not NORMALISE:
            mean += tl.sum(tl.where(mask_TK, grad_picked * picked_scores, 0.0), axis=1)[:, None]
        dense = scores * (injected - mean)
        direct += picked_scores * (through_scores - mean)
    elif SOFTMAX:
        dense = injected
    else:
        dense = injected
        if injection_ptr is not None:
            logits = tl.load(logits_ptr + rows * E + offs_e, mask=mask_TE, other=0.0).to(tl.float32)
            scores = sigmoid(logits, PTX)
            dense = injected * (scores * (1.0 - scores))
        picked_scores = sigmoid(picked, PTX)
        direct += through_scores * (picked_scores * (1.0 - picked_scores))

    _store(grad_ptr + rows * E + offs_e, dense, mask_TE, BF16, PTX)
    # other threads of this program wrote the entries that are written again
    tl.debug_barrier()
    _store(grad_ptr + rows * E + picks, direct, mask_TK, BF16, PTX)


def route_backward(
    logits: Tensor,
    experts: Tensor,
    grad_weights: Tensor,
    injection: Tensor | None,
    valid: Tensor | None,
    *,
    gate: str,
    normalise: bool,
    scale: float,
) -> Tensor:
    """Launch the kernel; arguments and result are those of the op ``equipoise::route_backward``."""
    num_tokens, num_experts = logits.shape
    top_k = experts.shape[1]
    grad = torch.empty(num_tokens, num_experts, dtype=logits.dtype, device=logits.device)
    padded = triton.next_power_of_2(num_experts)
    padded_k = triton.next_power_of_2(top_k)
    block_tokens = max(1, ENTRIES_PER_PROGRAM // padded)
    bf16 = logits.dtype == torch.bfloat16
    launch(
        _route_backward_kernel,
        (triton.cdiv(num_tokens, block_tokens),),
        logits,
        logits.contiguous(),
        experts.contiguous(),
        grad_weights.float().contiguous(),
        None if injection is None else injection.float().contiguous(),
        None if valid is None else valid.contiguous().view(torch.uint8),
        grad.view(torch.int16) if bf16 else grad,
        num_tokens,
        scale,
        E=num_experts,
        EP=padded,
        K=top_k,
        KP=padded_k,
        BLOCK_T=block_tokens,
        SOFTMAX=gate == "softmax",
        NORMALISE=normalise,
        BF16=bf16,
        PTX=PTX,
        num_warps=1,
    )
    return grad
