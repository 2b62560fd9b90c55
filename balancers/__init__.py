"""Load balancers: bias estimators for the global scale, gradient balancers for the local scale."""

from .base import BiasBalancer, GradientBalancer
from .exact_qb import ExactQB
from .gshard import GShard
from .histogram_qb import HistogramQB
from .lei import LEI
from .metrics import max_violation
from .rank_averaged_qb import RankAveragedQB
from .signed_count import SignedCount
from .update import check_replicas, reset_balancers, simulate_ranks, update_balancers

__all__ = [
    "LEI",
    "BiasBalancer",
    "ExactQB",
    "GShard",
    "GradientBalancer",
    "HistogramQB",
    "RankAveragedQB",
    "SignedCount",
    "check_replicas",
    "max_violation",
    "reset_balancers",
    "simulate_ranks",
    "update_balancers",
]
