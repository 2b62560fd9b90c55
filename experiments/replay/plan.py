"""What a config asks for: every estimator on every stream, seed and partition. Wrong configs are found here."""

import itertools
from dataclasses import dataclass
from typing import Any

from ...balancers import BiasBalancer
from ..build import construct
from ..checks import check_choice, check_whole
from .streams import Sizes, Stream

MODES = ("online", "frozen")


@dataclass(frozen=True)
class Row:
    """One estimator on one stream, and how the tokens of a step are spread over ranks and microbatches."""

    stream: str
    seed: int
    estimator: str
    ranks: int
    microbatches: int

    @property
    def label(self) -> str:
        """In words, say ``skewed-s0 eqb on 8x1``."""
        return f"{self.stream}-s{self.seed} {self.estimator} on {self.ranks}x{self.microbatches}"


def check(config: dict[str, Any]) -> list[Row]:
    """All rows that a resolved config asks for, stream by stream and seed by seed.

    Raises:
        ValueError: what was given and what was expected.
    """
    check_choice("mode", config["mode"], MODES)
    check_whole("steps", config["steps"])
    for name, low in (("seeds", 0), ("ranks", 1), ("microbatches", 1)):
        _check_list(name, config[name], low)
    for name in ("streams", "estimators"):
        if not config[name]:
            raise ValueError(f"{name} is empty: expected at least one")
    rows = []
    for name in config["streams"]:
        stream = open_stream(config, name, config["seeds"][0])
        _check_parts(config, name, stream.sizes)
        for estimator, section in config["estimators"].items():
            _check_bounds(name, stream.sizes, estimator, make_balancer(estimator, section, stream.sizes))
        seeds = config["seeds"] if stream.seeded else config["seeds"][:1]
        parts = itertools.product(seeds, config["estimators"], config["ranks"], config["microbatches"])
        rows += [Row(name, *part) for part in parts]
    return rows


def _check_list(name: str, values: Any, low: int) -> None:
    if not isinstance(values, list) or not values:
        raise ValueError(f"{name} must be a list with at least one number, got {values!r}")
    for value in values:
        check_whole(name, value, low=low)
    if len(set(values)) < len(values):
        raise ValueError(f"{name} must name each number once, got {values}")


def _check_parts(config: dict[str, Any], stream: str, sizes: Sizes) -> None:
    for ranks, microbatches in itertools.product(config["ranks"], config["microbatches"]):
        if sizes.num_tokens % (ranks * microbatches):
            raise ValueError(
                f"ranks * microbatches must divide the tokens of a step, got {ranks} * {microbatches} and "
                f"{sizes.num_tokens} tokens in the stream {stream!r}"
            )


def _check_bounds(stream: str, sizes: Sizes, estimator: str, balancer: BiasBalancer) -> None:
    if balancer.needs_bounded_scores and sizes.selection != "score":
        raise ValueError(
            f"estimators.{estimator} needs selection=score, got selection={sizes.selection} in the stream {stream!r}: "
            f"remove it (~estimators.{estimator}), or name the others in only"
        )


def open_stream(config: dict[str, Any], name: str, seed: int) -> Stream:
    """The stream of that name, of the sizes that the config gives.

    Raises:
        ValueError: wrong options or sizes.
    """
    sizes = Sizes(
        num_layers=config["layers"],
        num_tokens=config["tokens"],
        num_experts=config["num_experts"],
        top_k=config["top_k"],
        gate=config["gate"],
        selection=config["selection"],
    )
    return construct(f"streams.{name}", config["streams"][name], sizes, seed)


def make_balancer(name: str, section: Any, sizes: Sizes) -> BiasBalancer:
    """The estimator of that name.

    Raises:
        ValueError: wrong options, or no bias balancer.
    """
    balancer = construct(f"estimators.{name}", section, sizes.num_experts, sizes.top_k)
    if not isinstance(balancer, BiasBalancer):
        raise ValueError(f"estimators.{name}: expected a bias balancer, got {type(balancer).__name__}")
    return balancer
