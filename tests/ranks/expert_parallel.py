"""A small model in every layout of eight ranks: losses, gradients, biases and one optimizer step."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from equipoise.balancers import LEI, ExactQB, GShard, SignedCount, check_replicas, update_balancers
from equipoise.experiments.build import make_optimizer
from equipoise.experiments.model import Model, ModelConfig
from equipoise.experiments.parallel import Ranks, clip_gradients, synchronising, wrap
from equipoise.experiments.parallel.dispatch import run_sharded
from equipoise.experiments.parallel.mesh import AXES, make_mesh, token_shards
from equipoise.experiments.train import language_loss

WORLD_SIZE, ACCUMULATION = 8, 2
CLIP = 0.5
CONFIG = {"optim": {"learning_rate": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"strategy": "fsdp", "dp_shard": 8, "recompute": "selective"},
    "ep8": {"strategy": "fsdp", "ep": 8, "recompute": "full"},
    "ep4": {"strategy": "fsdp", "ep": 4, "dp_shard": 2, "recompute": "selective"},
    "ep2-replicated": {"strategy": "fsdp", "ep": 2, "dp_replicate": 4},
    # experts that drop what is beyond their capacity, another pair of balancers
    "ep4-dropping": {"strategy": "fsdp", "ep": 4, "dp_shard": 2, "capacity_factor": 1.0},
    "ep2-everything": {"strategy": "fsdp", "ep": 2, "dp_shard": 2, "dp_replicate": 2},
}


def build_model(capacity_factor: float = -1.0) -> Model:
    """Two layers of 8 experts, the same weights in every process."""
    sizes = {"width": 16, "num_heads": 2, "num_layers": 2, "num_experts": 8, "top_k": 2, "expert_width": 8}
    config = ModelConfig(
        **sizes, shared_width=8, vocabulary=32, z_loss=0.1, init_std=0.2, capacity_factor=capacity_factor
    )
    dropless = capacity_factor < 0
    bias = ExactQB if dropless else partial(SignedCount, rate=0.1)
    model = Model(config, bias, partial(GShard, coefficient=0.5) if dropless else partial(LEI, eta=1e-2))
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def microbatch(step: int, index: int) -> Tensor:
    """Tokens ``[1, S+1]`` of few kinds, so that ranks have their own favourite experts."""
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.randint(4 * (index % 8), 4 * (index % 8) + 4, (1, 13), generator=generator)


def take_steps(model: Model, replica: nn.Module, indices: range, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Two optimizer steps over the microbatches ``indices`` of each; gradients are those of the second."""
    optimizer = make_optimizer(CONFIG, model)
    routers = list(model.routers())
    for router in routers:
        router.loss_scale = 1 / len(indices)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(2):
        optimizer.zero_grad()
        for index in indices:
            tokens = microbatch(step, index)
            with synchronising(replica, last=index == indices[-1]):
                loss = language_loss(replica(tokens[:, :-1]), tokens)
                (loss / len(indices)).backward()
            found["losses"].append(loss.item())
        found["gradients"] = {name: full(each.grad) for name, each in model.named_parameters()}
        found["norms"].append(clip_gradients(model.parameters(), CLIP).item())
        update_balancers(model, group)
        optimizer.step()
    found["weights"] = {name: full(each.detach()) for name, each in model.named_parameters()}
    return found | {"biases": torch.stack([router.bias.bias for router in routers])}


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def run(layout: dict[str, Any], rank: int) -> dict[str, Any]:
    """The steps of this rank, and how the model lies on it."""
    sizes = {axis: size for axis, size in layout.items() if axis in AXES}
    mesh = make_mesh("cpu", **sizes)
    ranks = Ranks(rank, WORLD_SIZE, torch.device("cpu"), mesh, token_shards(mesh))
    model = build_model(layout.get("capacity_factor", -1.0))
    model.set_recompute(layout.get("recompute", "none"))
    experts = [layer.experts for layer in model.layers()]
    replica = wrap(model, ranks, layout["strategy"], list(model.blocks), experts)
    check_replicas(model, ranks.token_shards)
    found = take_steps(model, replica, range(rank * ACCUMULATION, (rank + 1) * ACCUMULATION), ranks.token_shards)
    local = [each.to_local().numel() if isinstance(each, DTensor) else each.numel() for each in experts[0].parameters()]
    if rank:
        # they are the same everywhere, and large
        found = {name: found[name] for name in ("losses", "norms", "biases")}
    return found | {"local_expert_parameters": sum(local)}


# rows of each of four experts on a rank; all of them differ
DISPATCHES = {
    "uneven": lambda rank: torch.tensor([rank, 0, 2, 8 - rank]).repeat(2),
    "all_to_one_expert": lambda rank: torch.tensor([0, 0, 0, 0, 0, 5, 0, 0]),
    "most_ranks_have_none": lambda rank: torch.tensor([1, 2, 3, 4] * 2) * (rank == 3),
    "no_rows_at_all": lambda rank: torch.zeros(8, dtype=torch.int64),
}


def dispatch_rows(counts: Tensor, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(int(counts.sum()), 3, dtype=torch.float64, generator=generator)


def scale_rows(weights: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """Experts that multiply their rows: weights ``[E, 3]``."""
    return rows * weights.repeat_interleave(counts, dim=0)


def run_dispatch(rank: int) -> dict[str, Any]:
    """Outputs and gradients of eight experts that lie on four ranks each."""
    pairs = [dist.new_group(list(range(start, start + 4))) for start in (0, 4)]
    group, place = pairs[rank // 4], rank % 4
    found = {}
    for name, counts_of in DISPATCHES.items():
        counts = counts_of(rank)
        rows = dispatch_rows(counts, rank).requires_grad_()
        weights = expert_weights()[2 * place : 2 * place + 2].clone().requires_grad_()
        out = run_sharded(partial(scale_rows, weights), rows, counts, group)
        (out.square().sum()).backward()
        found[name] = {"out": out.detach(), "rows": rows.grad, "weights": weights.grad}
    return found


def expert_weights() -> Tensor:
    return torch.linspace(1, 3, 24, dtype=torch.float64).view(8, 3)
