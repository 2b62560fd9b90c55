"""A decoder-only language model with mixture-of-experts layers: attention, block, model.

``B`` sequences, ``S`` positions, ``D`` width, ``V`` vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..balancers import BiasBalancer, GradientBalancer
from .checks import check_choice, check_number, check_switch, check_whole
from .moe import Experts, MoE, Router, SwiGLU


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of the model; the keys of the Hydra group ``model``.

    Raises:
        ValueError: a size that is not positive, or sizes that do not fit each other.
    """

    width: int
    num_heads: int
    num_layers: int
    num_experts: int
    top_k: int
    expert_width: int
    num_dense_layers: int = 0
    dense_width: int = 0
    shared_width: int = 0
    vocabulary: int = 256
    selection: str = "score"
    gate: str = "sigmoid"
    normalise: bool = True
    scale: float = 1.0
    z_loss: float = 0.0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("width", "num_heads", "num_layers", "num_experts", "top_k", "expert_width", "vocabulary"):
            check_whole(f"model.{name}", getattr(self, name))
        for name in ("num_dense_layers", "dense_width", "shared_width"):
            check_whole(f"model.{name}", getattr(self, name), low=0)
        check_number("model.scale", self.scale, positive=True)
        check_number("model.init_std", self.init_std, positive=True)
        check_number("model.z_loss", self.z_loss)
        check_switch("model.normalise", self.normalise)
        check_choice("model.selection", self.selection, ("score", "logit"))
        check_choice("model.gate", self.gate, ("sigmoid", "softmax"))
        if self.top_k >= self.num_experts:
            raise ValueError(
                f"model.top_k must be below model.num_experts (there is no cutoff otherwise), "
                f"got top_k={self.top_k} and num_experts={self.num_experts}"
            )
        if self.width % (2 * self.num_heads):
            raise ValueError(
                f"model.width must be a multiple of 2 * model.num_heads (rotary positions need an even head width), "
                f"got width={self.width} and num_heads={self.num_heads}"
            )
        if self.num_dense_layers > self.num_layers:
            raise ValueError(
                f"model.num_dense_layers must be at most model.num_layers, "
                f"got num_dense_layers={self.num_dense_layers} and num_layers={self.num_layers}"
            )
        if self.num_dense_layers and not self.dense_width:
            raise ValueError("model.dense_width must be positive when model.num_dense_layers is, got 0")


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """``[B, S, D]`` to ``[B, S, D]``; ``turns`` as ``rotary_turns`` gives them."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q, turns), rotate(k, turns), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def rotary_turns(length: int, width: int, device: torch.device, base: float = 10_000.0) -> Tensor:
    """Cosines and sines of the angles of rotary positions, ``[2, length, width / 2]`` fp32.

    Reference: Su et al., arXiv 2104.09864.
    """
    rates = base ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), rates)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn the pairs ``(x[i], x[i + width/2])`` of ``x [B, heads, S, head width]`` by their position's angles."""
    cos, sin = turns.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Block(nn.Module):
    """Pre-norm attention, then a dense or mixture-of-experts feed-forward layer."""

    def __init__(self, attention: Attention, feed_forward: nn.Module, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = attention
        self.feed_forward_norm = nn.RMSNorm(width)
        self.feed_forward = feed_forward

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """``[B, S, D]`` to ``[B, S, D]``; ``turns`` as ``rotary_turns`` gives them."""
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Model(nn.Module):
    """Embedding, blocks, norm, head.

    Args:
        config: sizes and options.
        make_bias, make_gradient: called once per mixture-of-experts layer as ``make(num_experts, top_k)``; None
            leaves the slot empty.

    Raises:
        ValueError: a balancer or a z-loss that no mixture-of-experts layer would use.
    """

    def __init__(
        self,
        config: ModelConfig,
        make_bias: Callable[[int, int], BiasBalancer] | None = None,
        make_gradient: Callable[[int, int], GradientBalancer] | None = None,
    ) -> None:
        super().__init__()
        if config.num_dense_layers == config.num_layers and (make_bias or make_gradient or config.z_loss):
            raise ValueError(
                f"the model has no mixture-of-experts layer (num_layers = num_dense_layers = {config.num_layers}), "
                "so a balancer or a z-loss would have no effect; use balancer=none and model.z_loss=0"
            )
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        blocks = []
        for layer in range(config.num_layers):
            if layer < config.num_dense_layers:
                feed_forward: nn.Module = SwiGLU(config.width, config.dense_width)
            else:
                feed_forward = _moe(config, layer, make_bias, make_gradient)
            blocks.append(Block(Attention(config.width, config.num_heads), feed_forward, config.width))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def init_weights(self, generator: torch.Generator) -> None:
        """Normal weights in module order, the same for every balancer; output layers are scaled by depth."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                nn.init.ones_(parameter)
                continue
            last = name.endswith(("out.weight", "w_out"))
            std = self.config.init_std / (2 * self.config.num_layers) ** 0.5 if last else self.config.init_std
            nn.init.normal_(parameter, std=std, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens [B, S]`` int64 to logits ``[B, S, V]``."""
        x = self.embedding(tokens)
        turns = rotary_turns(tokens.shape[1], self.config.width // self.config.num_heads, x.device)
        for block in self.blocks:
            x = block(x, turns)
        return self.head(self.norm(x))

    def routers(self) -> Iterator[Router]:
        """The routers in layer order."""
        return (module for module in self.modules() if isinstance(module, Router))

    def count_parameters(self) -> dict[str, int]:
        """``total`` parameters, and those ``active`` for one token (``K`` of ``E`` experts)."""
        total = sum(parameter.numel() for parameter in self.parameters())
        experts = [module for module in self.modules() if isinstance(module, Experts)]
        in_experts = sum(parameter.numel() for module in experts for parameter in module.parameters())
        idle = in_experts * (self.config.num_experts - self.config.top_k) // self.config.num_experts
        return {"total": total, "active": total - idle}


def _moe(
    config: ModelConfig,
    layer: int,
    make_bias: Callable[[int, int], BiasBalancer] | None,
    make_gradient: Callable[[int, int], GradientBalancer] | None,
) -> MoE:
    sizes = config.num_experts, config.top_k
    router = Router(
        config.width,
        *sizes,
        bias=make_bias(*sizes) if make_bias else None,
        gradient=make_gradient(*sizes) if make_gradient else None,
        selection=config.selection,
        gate=config.gate,
        normalise=config.normalise,
        scale=config.scale,
        z_loss=config.z_loss,
        name=f"router of layer {layer}",
    )
    shared = SwiGLU(config.width, config.shared_width) if config.shared_width else None
    return MoE(router, Experts(config.num_experts, config.width, config.expert_width), shared)
