"""The price of imbalance: how long devices wait for the slowest one, from the loads of runs and measured.

`scripts/bench price runs/paper_table` prints, for each balancer, what share of a layer's work the slowest of ``P``
devices has, relative to ``1/P``: experts in order, and with the best static placement (found with hindsight, on the
loads it is judged by). Then it takes training steps of the expert-parallel model on gloo ranks under those loads, and
under a ladder from balance to collapse, and fits a line: time = a + b * the slowest device's share. Without a folder it
takes the ladder alone. On a machine with a GPU it times the slowest device's experts on one card instead.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from scipy.special import stdtrit
from scipy.stats import linregress
from torch import Tensor

from ..balancers.metrics import max_violation
from ..experiments.parallel.placement import best_placement, least_share, slowest_share
from ..experiments.report.comparison import Row
from ..experiments.runs import write_json
from ..experiments.sweep.ranks import RankError
from .price_loads import Point, ladder, points_of, read_rows, shape_of, tail_loads
from .price_plot import VIEWS, save
from .price_steps import measure_card, measure_ranks
from .timing import FOLDER, facts, quartiles

FIGURE = FOLDER.parent / "docs" / "price.png"
# of the ladder alone: layers, experts, experts a token
SHAPE = (2, 32, 4)
# experts do most of the work: 4.7 of 5.3 MFLOP a token and layer, forward and backward, and 256 rows each at balance
CPU_SIZES = {"width": 128, "expert_width": 512, "num_heads": 4, "sequences": 16, "length": 128}
CARD_SIZES = {"width": 2048, "expert_width": 1024, "num_heads": 16, "sequences": 16, "length": 2048}
LEVEL = 0.95


# from loads


def price_row(row: Row, devices: Sequence[int]) -> list[dict[str, Any]]:
    """For loads of steps, and of microbatches where they were captured: the slowest share by number of devices.

    Shares are means over layers, tail window and seeds, and multiples of ``1/P``.
    """
    loads = [tail_loads(run) for run in row.complete]
    kinds = {"step": [step for step, _ in loads], "microbatch": [local for _, local in loads if local is not None]}
    return [
        {"balancer": row.label, "loads": kind, "runs": len(found)}
        | {str(count): _relative_shares(found, count) for count in devices}
        for kind, found in kinds.items()
        if found
    ]


def _relative_shares(loads: Sequence[Tensor], num_devices: int) -> dict[str, float]:
    placed = [_placed(load_NLE, num_devices) for load_NLE in loads]
    shares = {
        "contiguous": [slowest_share(each, num_devices) for each in loads],
        "placed": [slowest_share(each, num_devices) for each in placed],
        "bound": [least_share(each, num_devices) for each in loads],
        # of the device that has most to do in all layers together
        "step_contiguous": [slowest_share(each.sum(1), num_devices) for each in loads],
        "step_placed": [slowest_share(each.sum(1), num_devices) for each in placed],
    }
    flat = {name: torch.cat([each.flatten() for each in found]) for name, found in shares.items()}
    return {name: num_devices * float(found.mean()) for name, found in flat.items()}


def _placed(load_NLE: Tensor, num_devices: int) -> Tensor:
    """The loads in the order of the best placement of each layer."""
    layers = load_NLE.unbind(1)
    return torch.stack([layer[:, best_placement(layer, num_devices)] for layer in layers], dim=1)


def price_table(prices: Sequence[dict[str, Any]], devices: Sequence[int]) -> Table:
    """The slowest share in order and with the best static placement, for each number of devices."""
    columns = (f"P = {count}" for count in devices)
    title = "slowest device's share, times P: experts in order -> best static placement"
    table = Table("balancer", "loads of", *columns, title=title)
    for row in prices:
        cells = [row[str(count)] for count in devices]
        texts = [f"{cell['contiguous']:.2f} -> {cell['placed']:.2f}" for cell in cells]
        table.add_row(row["balancer"], f"a {row['loads']}", *texts)
    return table


# measured


def measure(
    points: Sequence[Point], num_devices: int, sizes: dict[str, Any], repeats: int, card: bool
) -> dict[str, Any]:
    """Times of every point with its measures of imbalance, and the fit of each of ``VIEWS`` that can be had."""
    timed = measure_card if card else measure_ranks
    seconds = timed([point.load_LE for point in points], num_devices, sizes, repeats)
    found = [
        describe_point(point, num_devices) | {"wall_ms": _quartiles_ms(wall), "processor_ms": _quartiles_ms(processor)}
        for point, wall, processor in zip(points, seconds.wall, seconds.processor, strict=True)
    ]
    fits = {
        name: fit_line([point[view.x] for point in found], [point[view.y]["median"] for point in found])
        for name, view in VIEWS.items()
        # while a card computes, the processor does not
        if not (card and view.y == "processor_ms")
    }
    return {"points": found, "fits": fits}


def describe_point(point: Point, num_devices: int) -> dict[str, Any]:
    """A load in numbers.

    ``share`` and ``maxvio`` are means over layers, as a step waits in each of them; ``step_share`` is that of the
    device that has most to do in all of them together.
    """
    return {
        "label": point.label,
        "origin": point.origin,
        "share": float(slowest_share(point.load_LE, num_devices).mean()),
        "step_share": float(slowest_share(point.load_LE.sum(0), num_devices)),
        "maxvio": float(max_violation(point.load_LE).mean()),
    }


def _quartiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    return quartiles([1e3 * value for value in seconds])


def fit_line(x: Sequence[float], y: Sequence[float]) -> dict[str, float]:
    """Least squares ``y = intercept + slope * x`` with the 95 % interval of the slope, and R squared.

    >>> fit = fit_line([0.0, 1.0, 2.0, 3.0], [1.0, 3.0, 5.0, 7.0])
    >>> fit["intercept"], fit["slope"], fit["r2"]
    (1.0, 2.0, 1.0)
    """
    line = linregress(x, y)
    half_width = float(stdtrit(len(x) - 2, (1 + LEVEL) / 2) * line.stderr)
    slope = float(line.slope)
    interval = {"low": slope - half_width, "high": slope + half_width}
    return {"intercept": float(line.intercept), "slope": slope, **interval, "r2": float(line.rvalue) ** 2}


def slowdown(fit: dict[str, float], relative_share: float, num_devices: int) -> float:
    """Time over that of a balanced step, minus 1, by the fit over shares.

    >>> slowdown({"intercept": 1.0, "slope": 2.0}, 1.5, 2)
    0.25
    """
    balanced, time = (fit["intercept"] + fit["slope"] * share / num_devices for share in (1.0, relative_share))
    return time / balanced - 1


def slowdown_table(prices: Sequence[dict[str, Any]], measured: dict[int, dict[str, Any]]) -> Table:
    """What the fits say of the tail of each balancer."""
    fits = {
        f"P = {count}, {name.partition(' ')[0]}": (count, fit, "step_" if VIEWS[name].x == "step_share" else "")
        for count, result in measured.items()
        for name, fit in result["fits"].items()
        if VIEWS[name].x != "maxvio"
    }
    title = "a step against a balanced one, by the fits: experts in order -> best static placement"
    table = Table("balancer", "loads of", *fits, title=title)
    for row in prices:
        texts = []
        for count, fit, whole in fits.values():
            shares = (row[str(count)][f"{whole}{kind}"] for kind in ("contiguous", "placed"))
            texts.append(" -> ".join(f"{slowdown(fit, share, count):+.1%}" for share in shares))
        table.add_row(row["balancer"], f"a {row['loads']}", *texts)
    return table


def describe(count: int, result: dict[str, Any], card: bool) -> str:
    """The fits in words."""
    lines = [
        f"P = {count}, {name}: {fit['intercept']:.1f} ms {fit['slope']:+.4g} ms * x "
        f"(95 %: {fit['low']:.4g} to {fit['high']:.4g}), R2 = {fit['r2']:.3f}"
        for name, fit in result["fits"].items()
    ]
    if not card and count > cores():
        lines.append(
            f"  {count} ranks on {cores()} cores: while one waits another one computes, so the clock hides part of a "
            "straggler's delay; the processor time of the busiest rank does not"
        )
    return "\n".join(lines)


# the command


def main(arguments: Sequence[str] | None = None) -> None:
    """``scripts/bench price``."""
    parser = argparse.ArgumentParser(prog="scripts/bench price", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="the folder of an experiment; none: the ladder alone")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of devices that are measured")
    parser.add_argument("--points", type=int, default=3, help="loads of each balancer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=FOLDER / "price.json")
    parser.add_argument("--figure", type=Path, default=FIGURE)
    options = parser.parse_args(arguments)
    try:
        run(options, Console())
    except ValueError as error:
        parser.error(str(error))
    except RankError as error:
        sys.exit(f"rank {error.rank} failed: {error}")


def run(options: argparse.Namespace, console: Console) -> None:
    """Print the tables, then write the result and the figure.

    Raises:
        ValueError: a folder that cannot be read, or numbers of ranks that do not fit.
        RankError: a rank failed.
    """
    for name in ("points", "repeats"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(options, name)}")
    card = torch.cuda.is_available()
    rows = read_rows(options.folder) if options.folder else []
    shape = shape_of(rows[0].complete[0]) if rows else SHAPE
    devices = devices_of(shape[1], options.ranks)
    prices = [price for row in rows for price in price_row(row, devices)]
    if prices:
        console.print(price_table(prices, devices))
    points = [point for row in rows for point in points_of(row, options.points)] + ladder(*shape)
    sizes = (CARD_SIZES if card else CPU_SIZES) | {"top_k": shape[2]}
    measured = {}
    for count in options.ranks:
        console.print(f"P = {count}: {len(points)} loads, {1 + options.repeats} rounds ...", highlight=False)
        measured[count] = measure(points, count, sizes, options.repeats, card)
        console.print(describe(count, measured[count], card), highlight=False, soft_wrap=True)
    if prices:
        console.print(slowdown_table(prices, measured))
    details = {"shape": shape, "sizes": sizes, "repeats": options.repeats, "cores": cores(), "card": card, **facts()}
    by_count = {str(count): result for count, result in measured.items()}
    write_json(options.out, {"prices": prices, "measured": by_count, "details": details})
    save(measured, rows, "experts of the slowest device on one card" if card else "training step", options.figure)
    console.print(f"{options.out}\n{options.figure}", highlight=False, soft_wrap=True)


def devices_of(num_experts: int, ranks: Sequence[int]) -> list[int]:
    """The numbers of devices of the table: powers of two that divide the experts, and the ``ranks``.

    Raises:
        ValueError: ranks that do not divide the experts, or the sequences of a step.

    >>> devices_of(32, [2, 4])
    [2, 4, 8, 16, 32]
    """
    sequences = CPU_SIZES["sequences"]
    for count in ranks:
        if count < 2 or num_experts % count or sequences % count:
            raise ValueError(
                f"--ranks must be at least 2 and divide {num_experts} experts and {sequences} sequences, got {count}"
            )
    powers = (2**power for power in range(1, num_experts.bit_length()))
    return sorted({*(power for power in powers if num_experts % power == 0), *ranks})


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    main()
