"""A decoder-only language model with mixture-of-experts layers: attention, block, model.

``B`` sequences, ``S`` positions, ``D`` width, ``V`` vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

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
    capacity_factor: float = -1.0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("width", "num_heads", "num_layers", "num_experts", "top_k", "expert_width", "vocabulary"):
            check_whole(f"model.{name}", getattr(self, name))
        for name in ("num_dense_layers", "dense_width", "shared_width"):
            check_whole(f"model.{name}", getattr(self, name), low=0)
        check_number("model.scale", self.scale, positive=True)
        check_number("model.init_std", self.init_std, positive=True)
        check_number("model.z_loss", self.z_loss)
        if not isinstance(self.capacity_factor, int | float) or isinstance(self.capacity_factor, bool):
            raise ValueError(f"model.capacity_factor (negative: off) must be a number, got {self.capacity_factor!r}")
        if not self.capacity_factor < 0:
            check_number("model.capacity_factor (negative: off)", self.capacity_factor, positive=True)
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


# what `selective` keeps: the products, which cost most to compute again
SAVED = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)


class Block(nn.Module):
    """Pre-norm attention, then a dense or mixture-of-experts feed-forward layer.

    Attributes:
        recompute: activation checkpointing: ``none``; ``full``: the backward computes the whole block again;
            ``selective``: all but the products.
    """

    def __init__(self, attention: Attention, feed_forward: SwiGLU | MoE, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = attention
        self.feed_forward_norm = nn.RMSNorm(width)
        self.feed_forward = feed_forward
        self.recompute = "none"

    def forward(self, x: Tensor, turns: Tensor, valid: Tensor | None = None, forced: Tensor | None = None) -> Tensor:
        """``[B, S, D]`` to ``[B, S, D]``; ``turns`` as ``rotary_turns`` gives them, the rest as ``MoE`` takes it."""
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self._forward(x, turns, valid, forced)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if self.recompute == "selective":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
        return checkpoint(self._forward, x, turns, valid, forced, **options)

    def _forward(self, x: Tensor, turns: Tensor, valid: Tensor | None, forced: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        normed = self.feed_forward_norm(x)
        if isinstance(self.feed_forward, MoE):
            return x + self.feed_forward(normed, valid, forced)
        return x + self.feed_forward(normed)


def _keep_products(_context: Any, operation: Any, *_args: Any, **_options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


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
        # drawn by init_weights; to draw it on the meta device too, where configs are checked, imports the compiler
        self.embedding = nn.Embedding.from_pretrained(torch.empty(config.vocabulary, config.width), freeze=False)
        blocks = []
        for layer in range(config.num_layers):
            if layer < config.num_dense_layers:
                feed_forward: SwiGLU | MoE = SwiGLU(config.width, config.dense_width)
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

    def forward(self, tokens: Tensor, valid: Tensor | None = None, forced: Tensor | None = None) -> Tensor:
        """``tokens [B, S]`` int64 to logits ``[B, S, V]``.

        Args:
            tokens: padding comes after the real tokens of its sequence, which then do not attend to it.
            valid: ``[B, S]`` bool, True for a real token and False for padding, which is not counted.
            forced: ``[L, B*S, K]`` int64, for each mixture-of-experts layer the experts to take instead of the
                router's choice; the balancers are frozen then, and say so.

        Raises:
            ValueError: ``forced`` for another number of layers, or experts that ``kernels.replay`` refuses.
        """
        x = self.embedding(tokens)
        turns = rotary_turns(tokens.shape[1], self.config.width // self.config.num_heads, x.device)
        choices = self._choices(forced)
        for block in self.blocks:
            x = block(x, turns, valid, next(choices) if isinstance(block.feed_forward, MoE) else None)
        return self.head(self.norm(x))

    def _choices(self, forced: Tensor | None) -> Iterator[Tensor | None]:
        """What is forced on each mixture-of-experts layer."""
        num_layers = self.config.num_layers - self.config.num_dense_layers
        if forced is None:
            return iter([None] * num_layers)
        if len(forced) != num_layers:
            raise ValueError(f"forced must have one row for each of the {num_layers} layers, got {len(forced)}")
        return iter(forced)

    def set_recompute(self, how: str) -> None:
        """Activation checkpointing in all blocks: see ``Block.recompute``."""
        if how == "selective":
            # an FSDP unit inside marks its work for the profiler, in a recomputation at other places (torch 2.13)
            SAC_IGNORED_OPS.add(torch.ops.profiler._record_function_enter_new.default)
            SAC_IGNORED_OPS.add(torch.ops.profiler._record_function_exit._RecordFunction)
        for block in self.modules():
            if isinstance(block, Block):
                block.recompute = how

    def layers(self) -> Iterator[MoE]:
        """The mixture-of-experts layers in their order."""
        return (module for module in self.modules() if isinstance(module, MoE))

    def routers(self) -> Iterator[Router]:
        """Their routers."""
        return (layer.router for layer in self.layers())

    def count_parameters(self) -> dict[str, int]:
        """``total`` parameters, and those ``active`` for one token (``K`` of ``E`` experts)."""
        total = sum(parameter.numel() for parameter in self.parameters())
        in_experts = sum(parameter.numel() for layer in self.layers() for parameter in layer.experts.parameters())
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
    experts = Experts(config.num_experts, config.width, config.expert_width)
    return MoE(router, experts, shared, config.capacity_factor)
