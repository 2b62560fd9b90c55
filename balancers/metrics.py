"""Measures of balance. ``E`` experts, ``T`` tokens, ``K`` experts a token; a load counts assignments per expert.

All take a load ``[..., E]`` of any integer dtype, give fp64 ``[...]`` and say "balanced" where no token was routed.
"""

import torch
from torch import Tensor

from ..kernels import Routing


def residual(load: Tensor) -> Tensor:
    """Relative load error ``rho = c / mean(c) - 1``, ``[..., E]`` fp64; sums to 0 over the experts.

    Computed from integers, so that the same proportions give the same bits whatever the number of tokens.

    >>> residual(torch.tensor([10, 6, 4, 0])).tolist()
    [1.0, 0.2, -0.2, -1.0]
    """
    counts = load.double()
    total = counts.sum(-1, keepdim=True)
    # without a token this is 0 / 1
    return (counts * counts.shape[-1]).sub_(total).div_(total.clamp_(min=1))


def max_violation(load: Tensor) -> Tensor:
    """MaxVio: ``max(c) / mean(c) - 1``.

    Reference: Wang et al., Auxiliary-Loss-Free Load Balancing, arXiv 2408.15664.

    >>> max_violation(torch.tensor([[10, 6, 4, 0], [6, 6, 6, 2]])).tolist()
    [1.0, 0.2]
    """
    return residual(load).amax(-1)


def dead_share(load: Tensor) -> Tensor:
    """Share of experts without a single token.

    >>> dead_share(torch.tensor([10, 6, 4, 0])).item()
    0.25
    """
    routed = load.sum(-1) > 0
    return torch.where(routed, (load == 0).double().mean(-1), 0.0)


def load_cv(load: Tensor) -> Tensor:
    """Coefficient of variation: population standard deviation over mean.

    >>> round(load_cv(torch.tensor([10, 6, 4, 0])).item(), 4)
    0.7211
    """
    return residual(load).square().mean(-1).sqrt()


def load_entropy(load: Tensor) -> Tensor:
    """Entropy of the load's shares divided by ``log E``: 1 is balanced, 0 is one expert for all.

    >>> load_entropy(torch.tensor([[5, 5], [10, 0]])).tolist()
    [1.0, 0.0]
    """
    counts = load.double()
    shares = counts / counts.sum(-1, keepdim=True)
    entropy = torch.special.entr(shares).sum(-1) / torch.tensor(load.shape[-1]).double().log()
    return torch.where(counts.sum(-1) > 0, entropy, 1.0)


def device_max_violation(load: Tensor, num_devices: int) -> Tensor:
    """MaxVio of the load per device when the experts lie in order on ``num_devices`` devices: what a straggler costs.

    Raises:
        ValueError: ``num_devices`` does not divide the number of experts.

    >>> device_max_violation(torch.tensor([10, 6, 4, 0]), 2).item()
    0.6...
    """
    num_experts = load.shape[-1]
    if num_devices < 1 or num_experts % num_devices:
        raise ValueError(f"num_devices must divide the {num_experts} experts, got {num_devices}")
    return max_violation(load.unflatten(-1, (num_devices, -1)).sum(-1))


def intervention_rate(routing: Routing) -> Tensor:
    """Share of the valid tokens' choices that the bias changed: ``mean_t (1 - |topK(s) & topK(s + b)| / K)``, 0-dim
    fp64.

    Random routing gives ``1 - K/E``. A choice counts as unchanged if its unbiased score reaches the K-th largest.
    """
    scores = routing.scores.detach() if routing.selection == "score" else routing.logits.detach().float()
    kth = scores.topk(routing.top_k, dim=-1).values[:, -1:]
    kept = (scores.gather(-1, routing.experts) >= kth).double().mean(-1)
    if routing.valid is not None:
        kept = kept[routing.valid]
    return (1 - kept).sum() / max(kept.numel(), 1)
