"""Where experts lie: the load of the slowest device, and a static placement that keeps it small.

``E`` experts, ``P`` devices with ``E/P`` experts each, ``N`` loads (of steps, say); a load counts assignments per
expert. A placement ``[E]`` int64 lists the experts in the order of the devices: device ``p`` holds entries ``p * E/P``
to ``(p + 1) * E/P - 1``. Contiguous placement is ``0, 1, ... E-1``.
"""

import torch
from torch import Tensor


def slowest_share(load: Tensor, num_devices: int, placement: Tensor | None = None) -> Tensor:
    """Share of the assignments that the busiest device serves, ``load [..., E]`` to ``[...]`` fp64.

    ``1/P`` is balance, which is also what is said where no token was routed; 1 is one device that does everything.
    ``placement`` is contiguous if it is None.

    Raises:
        ValueError: ``num_devices`` does not divide the number of experts, or ``placement`` is no order of them.

    >>> load = torch.tensor([[10, 6, 4, 0], [5, 5, 5, 5]])
    >>> slowest_share(load, 2).tolist(), slowest_share(load, 2, torch.tensor([0, 3, 1, 2])).tolist()
    ([0.8, 0.5], [0.5, 0.5])
    """
    load_P = _device_loads(load.double(), num_devices, placement)
    total = load_P.sum(-1)
    return torch.where(total > 0, load_P.amax(-1) / total.clamp(min=1), 1 / num_devices)


def least_share(load: Tensor, num_devices: int) -> Tensor:
    """A lower bound of ``slowest_share`` over all placements, ``load [..., E]`` to ``[...]`` fp64.

    No device serves less than the mean, and one has the busiest expert beside at best the ``E/P - 1`` idlest.

    Raises:
        ValueError: ``num_devices`` does not divide the number of experts.

    >>> least_share(torch.tensor([[10, 6, 4, 0], [17, 1, 1, 1]]), 2).tolist()
    [0.5, 0.9]
    """
    num_local = _check(load, num_devices)
    ordered = load.double().sort(-1).values
    total = ordered.sum(-1)
    busiest = ordered[..., -1] + ordered[..., : num_local - 1].sum(-1)
    return torch.where(total > 0, busiest / total.clamp(min=1), 0).clamp(min=1 / num_devices)


def best_placement(loads: Tensor, num_devices: int) -> Tensor:
    """One placement ``[E]`` for all ``loads [N, E]`` that keeps the mean of their ``slowest_share`` small.

    Greedy (the busiest expert first, to the device where the mean grows least), then the best swap of two experts
    again and again until none helps: a local optimum, not the best of all. What is left to gain is at most the
    distance to the mean of ``least_share``. Time ``O(N * E**2)`` a sweep over the experts.

    Raises:
        ValueError: no loads, or ``num_devices`` does not divide the number of experts.

    >>> best_placement(torch.tensor([[10, 6, 4, 0]]), 2).tolist()
    [0, 3, 1, 2]
    """
    if loads.dim() != 2 or not len(loads):
        raise ValueError(f"loads must be [N, E] with at least one load, got {list(loads.shape)}")
    num_local = _check(loads, num_devices)
    if num_local == 1:
        # one expert a device: all placements are alike
        return torch.arange(loads.shape[1])
    shares = loads.double() / loads.sum(-1, keepdim=True).clamp(min=1)
    device_E = _greedy(shares, num_devices, num_local)
    device_loads = torch.zeros(len(loads), num_devices, dtype=torch.float64)
    device_loads.index_add_(1, device_E, shares)
    while _improve(shares, device_E, device_loads):
        pass
    return device_E.argsort(stable=True)


def _greedy(shares: Tensor, num_devices: int, num_local: int) -> Tensor:
    """The device of each expert, ``[E]``."""
    device_E = torch.empty(shares.shape[1], dtype=torch.int64)
    loads_NP = torch.zeros(len(shares), num_devices, dtype=torch.float64)
    room_P = torch.full((num_devices,), num_local)
    for expert in shares.sum(0).argsort(descending=True, stable=True).tolist():
        grown_NPP = loads_NP[:, None] + torch.diag_embed(shares[:, expert, None].expand(-1, num_devices))
        cost_P = grown_NPP.amax(-1).mean(0)
        # devices that cost the same: the one with the least load
        cost_P = (cost_P + 1e-9 * loads_NP.mean(0)).where(room_P > 0, torch.inf)
        device = int(cost_P.argmin())
        device_E[expert] = device
        loads_NP[:, device] += shares[:, expert]
        room_P[device] -= 1
    return device_E


def _improve(shares: Tensor, device_E: Tensor, loads_NP: Tensor) -> bool:
    """Let every expert in turn change places with the one that helps most, in place; whether any did."""
    improved = False
    for expert in range(len(device_E)):
        now = loads_NP.amax(-1).mean()
        cost_E = _cost_of_swaps(expert, shares, device_E, loads_NP)
        other = int(cost_E.argmin())
        # rounding must not go round in circles
        if cost_E[other] < now - 1e-12:
            here, there = device_E[[expert, other]]
            moved_N = shares[:, other] - shares[:, expert]
            loads_NP[:, here] += moved_N
            loads_NP[:, there] -= moved_N
            device_E[expert], device_E[other] = there, here
            improved = True
    return improved


def _cost_of_swaps(expert: int, shares: Tensor, device_E: Tensor, loads_NP: Tensor) -> Tensor:
    """The mean load of the busiest device if ``expert`` and each other expert change places, ``[E]``."""
    here = int(device_E[expert])
    # the busiest device but for these two
    others_NPP = loads_NP[:, None].repeat(1, loads_NP.shape[1], 1)
    others_NPP[:, :, here] = -torch.inf
    others_NPP.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
    rest_NE = others_NPP.amax(-1)[:, device_E]
    moved_NE = shares - shares[:, expert, None]
    here_NE, there_NE = loads_NP[:, here, None] + moved_NE, loads_NP[:, device_E] - moved_NE
    cost_E = torch.stack([rest_NE, here_NE, there_NE]).amax(0).mean(0)
    return cost_E.where(device_E != here, torch.inf)


def _device_loads(load: Tensor, num_devices: int, placement: Tensor | None) -> Tensor:
    num_local = _check(load, num_devices)
    if placement is not None:
        if placement.dim() != 1 or not torch.equal(placement.sort().values, torch.arange(load.shape[-1])):
            raise ValueError(f"placement must list each of the {load.shape[-1]} experts once, got {placement.tolist()}")
        load = load[..., placement]
    return load.unflatten(-1, (num_devices, num_local)).sum(-1)


def _check(load: Tensor, num_devices: int) -> int:
    """Experts of a device."""
    num_experts = load.shape[-1]
    if num_devices < 1 or num_experts % num_devices:
        raise ValueError(f"num_devices must divide the {num_experts} experts, got {num_devices}")
    return num_experts // num_devices
