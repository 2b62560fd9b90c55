"""The torch reference on the CPU against plain torch: exact selection, uniform histogram, route, side by side.

What is compared starts from the same tensors and must give the same values.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ..balancers.quantile import radix_quantile
from ..balancers.update import run_locally
from ..experiments.runs import write_json
from ..kernels import Routing, route, target_rank
from ..kernels.counting import uniform_counts
from .timing import FOLDER, facts, interleave, quartiles

SIZES = {"num_tokens": 65_536, "num_experts": 256, "top_k": 6, "num_bins": 1000}


@dataclass(frozen=True)
class Pair:
    """Ours, the plain torch it is compared with, and what must hold of the results ``(ours, reference)``."""

    ours: Callable[[], Any]
    reference: Callable[[], Any]
    check: Callable[[Any, Any], bool]


def make_pairs(num_tokens: int, num_experts: int, top_k: int, num_bins: int) -> dict[str, Pair]:
    """The comparisons, on Gaussian logits and a Gaussian bias of width 0.05.

    Selection is from bf16 margins, the histogram of fp32 margins in ``[-1, 1]``.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_tokens, num_experts, generator=generator)
    bias = 0.05 * torch.randn(num_experts, generator=generator)
    margins = route(logits, bias, top_k).margins
    rounded = margins.bfloat16()
    rank = int(target_rank(torch.tensor(num_tokens), top_k, num_experts))
    lower, upper = torch.tensor(-1.0), torch.tensor(1.0)
    biased = logits.sigmoid() + bias
    return {
        "selection_vs_kthvalue": Pair(
            lambda: run_locally(radix_quantile(rounded, top_k)),
            lambda: torch.kthvalue(rounded, rank, dim=0).values.float(),
            torch.equal,
        ),
        "histogram_vs_scatter_add": Pair(
            lambda: uniform_counts(margins, lower, upper, num_bins)[0],
            lambda: scatter_counts(margins, lower, upper, num_bins),
            torch.equal,
        ),
        "route_vs_topk": Pair(
            lambda: route(logits, bias, top_k),
            lambda: topk_route(logits, bias, top_k),
            lambda ours, reference: same_picks(ours, reference, biased),
        ),
    }


def scatter_counts(margins: Tensor, lower: Tensor, upper: Tensor, num_bins: int) -> Tensor:
    """``uniform_counts`` by ``scatter_add_`` with an int64 index, as torchtitan counts, ``[E, B]`` int32."""
    index = ((margins - lower) * (num_bins / (upper - lower))).floor().clamp(0, num_bins - 1).long().t()
    counts = torch.zeros(margins.shape[1], num_bins, dtype=torch.int32)
    return counts.scatter_add_(1, index, torch.ones((), dtype=torch.int32).expand(index.shape))


def topk_route(logits: Tensor, bias: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Experts ``[T, K]``, weights ``[T, K]`` and cutoff ``[T]`` by ``torch.topk``."""
    scores = logits.sigmoid()
    values, order = (scores + bias).topk(top_k + 1)
    experts = order[:, :top_k]
    return experts, scores.gather(1, experts), values[:, top_k]


def same_picks(ours: Routing, reference: tuple[Tensor, Tensor, Tensor], biased: Tensor) -> bool:
    """Whether both took the same ``biased [T, E]`` scores, to the last bits in which the two sigmoids differ."""
    experts, weights, cutoff = reference
    pairs = [(biased.gather(1, ours.experts), biased.gather(1, experts)), (ours.cutoff, cutoff)]
    if torch.equal(ours.experts, experts):
        pairs.append((ours.weights, weights))
    return all(torch.allclose(left, right, rtol=0, atol=1e-6) for left, right in pairs)


def measure(repeats: int, **sizes: int) -> dict[str, Any]:
    """Ratios (reference time / our time, the median over rounds) by comparison, with ``details``.

    Raises:
        ValueError: the two sides of a comparison give different results.
    """
    pairs = make_pairs(**sizes)
    calls: dict[str, Callable[[], object]] = {}
    for name, pair in pairs.items():
        if not pair.check(pair.ours(), pair.reference()):
            raise ValueError(f"{name}: the two sides give different results, so their times mean nothing")
        calls |= {name: pair.ours, f"{name} reference": pair.reference}
    seconds = interleave(calls, repeats)
    ratios: dict[str, float] = {}
    details: dict[str, Any] = {}
    for name in pairs:
        ours, reference = seconds[name], seconds[f"{name} reference"]
        spread = quartiles([other / own for own, other in zip(ours, reference, strict=True)])
        ratios[name] = spread["median"]
        milliseconds = {
            side: quartiles([1e3 * value for value in values])
            for side, values in {"ours_ms": ours, "reference_ms": reference}.items()
        }
        details[name] = {"ratio": spread, **milliseconds}
    return ratios | {"details": details, "sizes": sizes, "repeats": repeats, **facts()}


def main(arguments: Sequence[str] | None = None) -> None:
    """``scripts/bench cpu``."""
    parser = argparse.ArgumentParser(prog="scripts/bench cpu", description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=FOLDER / "cpu.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    result = measure(options.repeats, **SIZES)
    size = f"{SIZES['num_tokens']:,} x {SIZES['num_experts']}, top-{SIZES['top_k']}, {options.threads} threads"
    table = Table("comparison", "ours, ms", "reference, ms", "ratio", "quartiles", title=size)
    for name, row in result["details"].items():
        ratio = row["ratio"]
        table.add_row(
            name.replace("_", " "),
            f"{row['ours_ms']['median']:.1f}",
            f"{row['reference_ms']['median']:.1f}",
            f"{ratio['median']:.2f}",
            f"{ratio['lower']:.2f} - {ratio['upper']:.2f}",
        )
    console = Console()
    console.print(table)
    write_json(options.out, result)
    console.print(str(options.out), highlight=False)


if __name__ == "__main__":
    main()
