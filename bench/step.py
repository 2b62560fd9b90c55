"""What a balancer adds to a training step: every preset against ``none``, interleaved in one process.

All models start from the same weights, see the same batch and keep weights (learning rate 0) and a zero bias, so that
routing, and with it the work of the experts, is the same: what differs is the balancer. One process takes all
microbatches of a step (``--ranks 2``: half of them, as one of two ranks). A step of a preset is taken together with
one of ``none``, piece by piece: each of its microbatches, then its end. So what disturbs the machine for longer than
a few milliseconds disturbs both alike, and code that only this preset runs is about as warm as in a run, where one
microbatch follows the other. With one thread the clock is processor time, which other processes on the machine
disturb less; it is the time of the step on an idle machine.
"""

import argparse
import random
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ..balancers import update_balancers
from ..experiments import build
from ..experiments.runs import write_json
from ..experiments.train import language_loss
from .timing import FOLDER, facts, quartiles

# then models are built anew: where a model lies in memory makes it a percent or two slower or faster
ROUNDS_OF_A_MODEL = 5


def presets() -> list[str]:
    """All of ``configs/balancer/``, ``none`` first."""
    names = {path.name[:-5] for path in files("equipoise.configs.balancer").iterdir() if path.name.endswith(".yaml")}
    return ["none", *sorted(names - {"none"})]


def load(preset: str, *overrides: str) -> dict[str, Any]:
    """The default config with this preset, resolved."""
    with initialize_config_module("equipoise.configs", version_base="1.3"):
        config = compose("config", overrides=[f"balancer={preset}", *overrides])
    resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


class Step:
    """One training step of one preset, in pieces, again and again from the same state."""

    def __init__(self, config: dict[str, Any], microbatches: Sequence[Tensor]) -> None:
        self.microbatches = microbatches
        self.clip = config["optim"]["clip"]
        self.model = build.make_model(config)
        self.model.init_weights(torch.Generator().manual_seed(config["seed"]))
        self.optimizer = build.make_optimizer(config, self.model)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.biases = []
        for router in self.model.routers():
            router.loss_scale = 1 / len(microbatches)
            if router.bias is not None:
                router.bias.reserve(sum(tokens[:, 1:].numel() for tokens in microbatches))
                self.biases.append(router.bias.bias)

    def run(self, piece: int) -> float:
        """Seconds of a piece: of one microbatch, or, after the last of them, of the end of the step."""
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        started = clock()
        if piece < len(self.microbatches):
            self._accumulate(self.microbatches[piece])
            return clock() - started
        self._finish()
        seconds = clock() - started
        for bias in self.biases:
            bias.zero_()
        return seconds

    def _accumulate(self, tokens: Tensor) -> None:
        loss = language_loss(self.model(tokens[:, :-1]), tokens)
        (loss / len(self.microbatches)).backward()

    def _observe_again(self) -> None:
        for tokens in self.microbatches:
            self.model(tokens[:, :-1])

    def _finish(self) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        assert torch.isfinite(norm)
        update_balancers(self.model, observe_again=self._observe_again)
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(names: Sequence[str], rounds: int, ranks: int, overrides: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Ratios to ``none`` and milliseconds of a step, by preset; ``none`` against a second model of it is the noise.

    Args:
        names: the presets beside ``none``.
        rounds: how many steps of each are timed, each against a step of ``none`` of its own.
        ranks: over how many ranks the microbatches of a step would be spread; one of them runs.
    """
    configs = {name: load(name, *overrides) for name in ("none", *names)}
    config = configs["none"]
    _, batches, _ = build.make_data(config)
    microbatches = [batches.microbatch(0, index) for index in range(config["data"]["microbatches"] // ranks)]
    generator = random.Random(0)
    ratios: dict[str, list[float]] = {name: [] for name in configs}
    milliseconds: dict[str, list[float]] = {name: [] for name in configs}
    for turn in range(rounds):
        fresh = turn % ROUNDS_OF_A_MODEL == 0
        if fresh:
            base = Step(config, microbatches)
            steps = {name: Step(configs[name], microbatches) for name in configs}
        for name in generator.sample(list(configs), len(configs)):
            # the first step fills caches
            for _ in range(1 + fresh):
                taken, reference = pair(steps[name], base, generator)
            ratios[name].append(taken / reference)
            milliseconds[name].append(1e3 * taken)
    return {name: {"ratio": quartiles(ratios[name]), "ms": quartiles(milliseconds[name])} for name in configs}


def pair(step: Step, base: Step, generator: random.Random) -> tuple[float, float]:
    """Seconds of a step of both, taken in turn, piece by piece; which of the two is first is drawn for each."""
    seconds = {step: 0.0, base: 0.0}
    for piece in range(len(step.microbatches) + 1):
        for each in generator.sample([step, base], 2):
            seconds[each] += each.run(piece)
    return seconds[step], seconds[base]


def main(arguments: Sequence[str] | None = None) -> None:
    """``scripts/bench step``."""
    parser = argparse.ArgumentParser(prog="scripts/bench step", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=1, help="ranks that share the microbatches of a step")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch, one as in a rank of the default run")
    parser.add_argument("--presets", nargs="*", default=presets()[1:])
    parser.add_argument("--out", type=Path, default=FOLDER / "step.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    result = measure(options.presets, options.rounds, options.ranks)
    table = Table("preset", "ratio to none", "quartiles", "ms", title="one training step; none: against itself")
    for name, row in result.items():
        ratio = row["ratio"]
        table.add_row(
            name, f"{ratio['median']:.3f}", f"{ratio['lower']:.3f} - {ratio['upper']:.3f}", f"{row['ms']['median']:.1f}"
        )
    console = Console()
    console.print(table)
    ratios = {name: row["ratio"]["median"] for name, row in result.items()}
    ratios["none"] = 1.0
    details = {"steps": result, "rounds": options.rounds, "ranks": options.ranks, **facts()}
    write_json(options.out, ratios | {"details": details})
    console.print(f"{options.out}")


if __name__ == "__main__":
    main()
