"""Ranks: joining them, their mesh, and what a model is wrapped in to be trained by all of them."""

from .join import ParallelConfig, Ranks, join_ranks
from .replica import clip_gradients, reshard, synchronising, wrap

__all__ = ["ParallelConfig", "Ranks", "clip_gradients", "join_ranks", "reshard", "synchronising", "wrap"]
