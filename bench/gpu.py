"""The Triton kernels on a GPU: right at full size, capturable, and how long they take.

`scripts/bench gpu` checks first, then times, prints one table and writes bench/gpu.json. Needs torch with CUDA and
Triton, nothing else. ``T`` tokens, ``E`` experts, ``K`` experts a token.

A time is the median of CUDA events around the replay of a captured graph, with the L2 cache flushed before: what the
device takes, without the time that Python needs to launch it.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..balancers.quantile import MarginStore, radix_quantile
from ..balancers.update import run_locally
from ..kernels import (
    MarginTally,
    RadixTally,
    Routing,
    UniformTally,
    WindowTally,
    radix_counts,
    route,
    select_rank,
    target_rank,
    to_key,
)
from ..kernels.backend import VARIABLE
from .timing import FOLDER, facts, quartiles

FLUSH_BYTES = 2**30
REPEATS = 30


@dataclass(frozen=True)
class Sizes:
    """One problem."""

    tokens: int = 65536
    experts: int = 256
    top_k: int = 6


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Force the kernels of one backend."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = name
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def draw(sizes: Sizes, device: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Logits ``[T, E]`` and a bias ``[E]``."""
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(sizes.tokens, sizes.experts, generator=generator, device=device)
    return logits.to(dtype), torch.randn(sizes.experts, generator=generator, device=device) * 0.05


# right


def check(sizes: Sizes, device: str) -> dict[str, int]:
    """Kernels against the reference on the same device; the numbers of rows in which two exponentials decide a near
    tie.

    Raises:
        RuntimeError: a result that no rounding explains.
    """
    logits, bias = draw(sizes, device)
    rows = {}
    variants: dict[str, dict[str, Any]] = {
        "exact": {"exact": True},
        "fast": {},
        "logit": {"selection": "logit"},
        "softmax": {"gate": "softmax"},
    }
    for name, options in variants.items():
        results = []
        for kind in ("torch", "triton"):
            uniform = UniformTally.zeros(sizes.experts, 1000, bias.min() - 1, bias.max() + 1)
            radix = RadixTally(torch.zeros(sizes.experts, 256, dtype=torch.int32, device=device))
            window = window_tally(bias)
            with backend(kind):
                routing = route(logits, bias, sizes.top_k, tally=radix, normalise=True, **options)
                if name != "logit":
                    route(logits, bias, sizes.top_k, tally=uniform, **options)
                route(logits, bias, sizes.top_k, tally=window, **options)
            results.append((routing, [uniform.counts, radix.counts, window.counts]))
        (reference, tallies), (ours, our_tallies) = results
        rows[name] = compare(ours, reference, bias, name)
        for counts, expected in zip(our_tallies, tallies, strict=True):
            require(torch.equal(counts.sum(-1), expected.sum(-1)), f"{name}: a tally lost tokens")
            # a margin on an edge may fall on its other side
            share = (counts - expected).abs().sum().item() / max(1, 2 * expected.sum().item())
            require(share <= (0 if name == "logit" else 1e-3), f"{name}: {share:.1e} of a tally differs")
    check_selection(sizes, device)
    check_backward(sizes, device)
    return rows


def compare(ours: Routing, reference: Routing, bias: Tensor, name: str) -> int:
    """Rows that picked other experts, all of them near ties; raises for any other difference."""
    differs = (ours.experts != reference.experts).any(-1)
    unbiased = reference.scores if reference.selection == "score" else reference.logits.float()
    top = (unbiased + bias).topk(min(reference.top_k + 2, reference.num_experts), dim=-1).values
    near = ((top[:, :-1] - top[:, 1:]) <= 4e-6 * top.abs().amax().clamp(min=1)).any(-1)
    require(not (differs & ~near).any(), f"{name}: other experts without a near tie")
    require(int(ours.load.sum()) == reference.experts.numel(), f"{name}: the load lost tokens")
    require(int(ours.uncounted) == 0, f"{name}: tokens were not counted")
    same = ~differs
    for label in ("weights", "cutoff"):
        error = (getattr(ours, label)[same] - getattr(reference, label)[same]).abs().max().item() if same.any() else 0.0
        require(error <= 1e-5, f"{name}: {label} differ by {error:.1e}")
    return int(differs.sum())


def window_tally(bias: Tensor) -> WindowTally:
    """An empty tally of the bf16 keys around each bias."""
    return WindowTally(
        torch.zeros(len(bias), 256, dtype=torch.int32, device=bias.device), to_key(bias.bfloat16()) - 127
    )


def check_selection(sizes: Sizes, device: str) -> None:
    """The exact quantile of the same margins by the kernels and by a sort."""
    generator = torch.Generator(device).manual_seed(1)
    margins = torch.randn(sizes.tokens, sizes.experts, generator=generator, device=device) * 0.3
    rank = int(target_rank(torch.tensor(sizes.tokens), sizes.top_k, sizes.experts))
    for dtype in (torch.bfloat16, torch.float32):
        values = margins.to(dtype)
        with backend("triton"):
            quantile = run_locally(radix_quantile(values, sizes.top_k))
        require(torch.equal(quantile, values.float().sort(0).values[rank - 1]), f"the {dtype} quantile is wrong")


def check_backward(sizes: Sizes, device: str) -> None:
    """Gradients against autograd in fp64 on the first tokens."""
    logits, bias = draw(Sizes(min(sizes.tokens, 2048), sizes.experts, sizes.top_k), device, torch.float32)
    injection = torch.linspace(-1, 1, sizes.experts, device=device)
    for gate in ("sigmoid", "softmax"):
        leaf = logits.clone().requires_grad_()
        with backend("triton"):
            routing = route(leaf, bias, sizes.top_k, gate=gate, normalise=True).steered(injection=injection)
            routing.weights.square().sum().backward()
        wide = logits.double().requires_grad_()
        scores = wide.sigmoid() if gate == "sigmoid" else wide.softmax(-1)
        weights = scores.gather(-1, routing.experts)
        weights = weights / weights.sum(-1, keepdim=True)
        (weights.square().sum() + (scores * injection).sum()).backward()
        assert leaf.grad is not None
        assert wide.grad is not None
        error = ((leaf.grad - wide.grad).norm() / wide.grad.norm()).item()
        require(error <= 1e-5, f"{gate}: the gradient is off by {error:.1e}")


def check_large(device: str) -> None:
    """More than 2**31 logits: the last tokens are routed as they are alone."""
    num_tokens = 2**31 // 256 + 4096
    logits = torch.randn(1024, 256, device=device).bfloat16().repeat(num_tokens // 1024, 1)
    with backend("triton"):
        whole, last = (route(part, None, 6, normalise=True) for part in (logits, logits[-1024:]))
    require(torch.equal(whole.experts[-1024:], last.experts), "int64 addresses: other experts")
    require(torch.equal(whole.weights[-1024:], last.weights), "int64 addresses: other weights")


def check_ops(device: str) -> None:
    """``torch.library.opcheck`` of every op on the Triton path."""
    logits = torch.randn(33, 60, device=device)
    bias, valid = torch.randn(60, device=device), torch.rand(33, device=device) > 0.3
    options = (6, "score", "sigmoid", True, 1.0, False)
    counts = torch.zeros(60, 256, dtype=torch.int32, device=device)
    kept, filled = torch.zeros(100, 60, device=device).bfloat16(), torch.zeros(1, dtype=torch.int64, device=device)
    experts = torch.randint(0, 60, (33, 6), device=device)
    ops = torch.ops.equipoise
    with backend("triton"):
        first = torch.full((60,), 32700, device=device)
        counting = (counts, None, None, None, None, None, None, 0)
        keeping = (None, None, None, None, kept, filled, None, 0)
        for tally in (counting, keeping, (counts, None, None, None, None, None, first, 0)):
            torch.library.opcheck(ops.route.default, (logits, bias, valid, *tally, *options))
        gradient = (logits, experts, torch.randn(33, 6, device=device), bias, valid, "sigmoid", True, 1.0)
        torch.library.opcheck(ops.route_backward.default, gradient)
        torch.library.opcheck(ops.radix_counts.default, (kept, None, 0, filled))
        ranks = torch.ones(60, dtype=torch.int64, device=device)
        torch.library.opcheck(ops.select_rank.default, (counts, None, ranks))


def check_graph(sizes: Sizes) -> None:
    """Routing, backward and the exact update in one captured graph: replayed on new input, equal to eager."""
    logits, bias = draw(sizes, "cuda", torch.float32)
    store = MarginStore(sizes.experts, torch.bfloat16).cuda()
    store.reserve(sizes.tokens)

    def step(leaf: Tensor) -> tuple[Tensor, ...]:
        store.reset()
        routing = route(leaf, bias, sizes.top_k, normalise=True, tally=MarginTally(store))
        (gradient,) = torch.autograd.grad(routing.weights.square().sum(), leaf)
        quantile = run_locally(radix_quantile(store.buffer, sizes.top_k, num_rows=store.filled))
        return routing.experts, routing.weights, routing.load, gradient, quantile

    with backend("triton"):
        static = logits.clone().requires_grad_()
        graph, results = capture(lambda: step(static))
        fresh = logits.flip(0).contiguous()
        with torch.no_grad():
            static.copy_(fresh)
        graph.replay()
        replayed = [result.clone() for result in results]
        for ours, expected in zip(replayed, step(fresh.requires_grad_()), strict=True):
            require(torch.equal(ours, expected), "a replayed graph gives other results")


def require(holds: bool, message: str) -> None:
    """Stop at the first wrong result."""
    if not holds:
        raise RuntimeError(message)


# fast


def capture(call: Callable[[], Any]) -> tuple[Any, Any]:
    """A CUDA graph of ``call``, after it has compiled on a stream of its own, and the results it writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def microseconds(call: Callable[[], Any], flush: Tensor) -> dict[str, float]:
    """Median and quartiles of one replay."""
    graph, _ = capture(call)
    samples = []
    for _ in range(REPEATS):
        # while this runs, what follows is already queued
        flush.zero_()
        started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        started.record()
        graph.replay()
        ended.record()
        samples.append((started, ended))
    torch.cuda.synchronize()
    return quartiles([1e3 * started.elapsed_time(ended) for started, ended in samples])


def composed(logits: Tensor, bias: Tensor, top_k: int) -> tuple[Tensor, ...]:
    """Routing from torch operations, as public routers write it."""
    scores = logits.float().sigmoid()
    values, order = (scores + bias).topk(top_k + 1, dim=-1)
    experts = order[:, :top_k]
    weights = scores.gather(-1, experts)
    load = torch.zeros_like(bias, dtype=torch.int32)
    load.scatter_add_(0, experts.flatten(), torch.ones_like(experts.flatten(), dtype=torch.int32))
    return experts, weights / weights.sum(-1, keepdim=True), values[:, top_k], load


def calls(sizes: Sizes) -> dict[str, Callable[[], Any]]:
    """What is timed on the Triton path, by name."""
    logits, bias = draw(sizes, "cuda")
    wide = logits.float()
    experts_count, top_k = sizes.experts, sizes.top_k
    uniform = UniformTally.zeros(experts_count, 1000, bias.min() - 1, bias.max() + 1)
    radix = RadixTally(torch.zeros(experts_count, 256, dtype=torch.int32, device="cuda"))
    window = window_tally(bias)
    store = MarginStore(experts_count, torch.bfloat16).cuda()
    store.reserve(sizes.tokens)
    leaf = logits.clone().requires_grad_()
    injection = torch.linspace(-1, 1, experts_count, device="cuda")
    plain = route(leaf, bias, top_k, normalise=True)
    steered = plain.steered(injection=injection)
    upstream = torch.randn_like(plain.weights)
    margins = plain.margins.bfloat16()
    counts = radix_counts(margins, None, 0)
    rank = target_rank(counts.sum(-1), top_k, experts_count)
    prefix, _ = select_rank(counts, None, rank)

    def keep() -> Routing:
        store.reset()
        return route(logits, bias, top_k, normalise=True, tally=MarginTally(store))

    def update() -> Tensor:
        keep()
        return run_locally(radix_quantile(store.buffer, top_k, num_rows=store.filled))

    return {
        "route": lambda: route(logits, bias, top_k, normalise=True),
        "route fp32": lambda: route(wide, bias, top_k, normalise=True),
        "route exact": lambda: route(logits, bias, top_k, normalise=True, exact=True),
        "route logit": lambda: route(logits, bias, top_k, normalise=True, selection="logit"),
        "route softmax": lambda: route(logits, bias, top_k, normalise=True, gate="softmax"),
        "route + uniform tally": lambda: route(logits, bias, top_k, normalise=True, tally=uniform),
        "route + radix tally": lambda: route(logits, bias, top_k, normalise=True, tally=radix),
        "route + window tally": lambda: route(logits, bias, top_k, normalise=True, tally=window),
        "route + bf16 margins": keep,
        "radix byte 0": lambda: radix_counts(margins, None, 0),
        "radix byte 1": lambda: radix_counts(margins, prefix, 1),
        "select": lambda: select_rank(counts, None, rank),
        "exact update, routing and both passes": update,
        "backward": lambda: torch.autograd.grad(plain.weights, leaf, upstream, retain_graph=True),
        "backward with injection": lambda: torch.autograd.grad(steered.weights, leaf, upstream, retain_graph=True),
    }


def measure(sizes: Sizes) -> list[dict[str, Any]]:
    """Rows ``{name, us, lower, upper, to_floor, to_torch}``; the floor is a copy of as many bytes as the logits."""
    from ..kernels.fused import route as fused

    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    logits, bias = draw(sizes, "cuda")
    half = logits[: len(logits) // 2]
    target = torch.empty_like(half)
    compiled = torch.compile(composed, dynamic=False)
    timed = {
        # reads half of the logits and writes as much: the bytes of reading all
        "floor: copy": microseconds(lambda: target.copy_(half), flush),
        "floor: sigmoid": microseconds(lambda: logits.sigmoid().amax(-1), flush),
        "torch: composed": microseconds(lambda: composed(logits, bias, sizes.top_k), flush),
        "torch: compiled": microseconds(lambda: compiled(logits, bias, sizes.top_k), flush),
    }
    with backend("triton"):
        for name, call in calls(sizes).items():
            timed[name] = microseconds(call, flush)
        chosen = fused.SCORES_PER_PROGRAM, fused.MAX_PROGRAMS
        for scores in (256, 512, 1024, 2048):
            for programs in (2112, 4224, 8448):
                fused.SCORES_PER_PROGRAM, fused.MAX_PROGRAMS = scores, programs
                call = calls(sizes)["route + bf16 margins"]
                timed[f"route + bf16 margins, {scores} scores, {programs} programs"] = microseconds(call, flush)
        fused.SCORES_PER_PROGRAM, fused.MAX_PROGRAMS = chosen
    floor, torch_path = timed["floor: copy"]["median"], timed["torch: composed"]["median"]
    return [
        {
            "name": name,
            "us": row["median"],
            "lower": row["lower"],
            "upper": row["upper"],
            "to_floor": row["median"] / floor,
            "to_torch": row["median"] / torch_path,
        }
        for name, row in timed.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """``scripts/bench gpu``."""
    parser = argparse.ArgumentParser(prog="scripts/bench gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER / "gpu.json")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("scripts/bench gpu needs a CUDA device and torch with CUDA; torch finds none here")
    sizes = Sizes()
    near_ties = check(sizes, "cuda")
    check_large("cuda")
    check_ops("cuda")
    check_graph(sizes)
    print(f"all checks passed at {sizes}; rows with other experts, all near ties: {near_ties}")
    rows = measure(sizes)
    for row in rows:
        spread = f"{row['lower']:.1f} - {row['upper']:.1f}"
        ratios = f"{row['to_floor']:6.2f} x floor {row['to_torch']:6.3f} x torch"
        print(f"{row['name']:60} {row['us']:8.1f} us ({spread}) {ratios}")
    record = {"card": torch.cuda.get_device_name(), "facts": facts(), "near_ties": near_ties, "rows": rows}
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
