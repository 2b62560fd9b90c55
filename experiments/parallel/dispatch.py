"""Expert parallelism: the experts lie in order on the ranks of a group, and tokens travel to them and back.

``N`` rows (copies of tokens) of this rank, ``M`` rows that this rank receives, ``E`` experts, ``P`` ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def run_sharded(
    experts: Callable[[Tensor, Tensor], Tensor], rows: Tensor, counts: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """Send rows to the ranks that hold their experts, apply these, and bring the outputs back.

    Three all-to-alls forward (counts, rows, outputs) and two backward, with uneven splits; no row is dropped. Every
    rank of the group must call it, also one without rows.

    Args:
        experts: applies the ``E/P`` experts of this rank to rows ``[M, D]`` sorted by expert, given ``[E/P]`` int64
            rows of each.
        rows: ``[N, D]``, sorted by expert.
        counts: ``[E]`` int64, rows of each expert.
        group: rank ``p`` of it holds the experts from ``p * E/P`` on.

    Returns:
        ``[N, D]``, in the order of ``rows``.
    """
    num_ranks = dist.get_world_size(group)
    sent = counts.view(num_ranks, -1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent.contiguous(), group=group)
    # the host must know the sizes; one copy for both
    sends, receives = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    arrived = exchange(rows, sends, receives, group)
    # by rank, then expert, to by expert, then rank
    order = _by_expert(received)
    outputs = experts(arrived.index_select(0, order), received.sum(0))
    return exchange(outputs.index_select(0, order.argsort()), receives, sends, group)


def exchange(rows: Tensor, sends: Sequence[int], receives: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """``rows [sum(sends), D]``, cut in order of the ranks, to what the ranks send here, ``[sum(receives), D]``.

    Differentiable: the gradients go the way back.
    """
    return _Exchange.apply(rows, sends, receives, group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sends: Sequence[int], receives: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.way_back = receives, sends, group
        return _all_to_all(rows, sends, receives, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(grad, *ctx.way_back), None, None, None


def _all_to_all(rows: Tensor, sends: Sequence[int], receives: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(receives), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), list(receives), list(sends), group=group)
    return arrived


def _by_expert(received: Tensor) -> Tensor:
    """Order ``[M]`` that sorts rows which arrive by rank and within a rank by expert, ``received [P, E/P]`` of each."""
    num_ranks, num_local = received.shape
    expert = torch.arange(num_local, device=received.device).repeat(num_ranks)
    return expert.repeat_interleave(received.flatten()).argsort(stable=True)
