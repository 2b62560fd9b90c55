"""Synthetic run folders in the documented format, for the tests of the report."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

BALANCED = "equipoise.balancers."
PRESETS: dict[str, dict[str, Any]] = {
    "none": {"bias": None, "gradient": None},
    "signed_count": {"bias": {"_target_": f"{BALANCED}SignedCount", "rate": 1e-3}, "gradient": None},
    "gshard": {"bias": None, "gradient": {"_target_": f"{BALANCED}GShard", "coefficient": 1e-2}},
    "rank_averaged_qb": {"bias": {"_target_": f"{BALANCED}RankAveragedQB", "per": "microbatch"}, "gradient": None},
    "histogram_qb": {"bias": {"_target_": f"{BALANCED}HistogramQB", "num_bins": 1000}, "gradient": None},
    "eqb": {"bias": {"_target_": f"{BALANCED}ExactQB", "key": "bf16"}, "gradient": None},
    "eqb_gshard": {
        "bias": {"_target_": f"{BALANCED}ExactQB", "key": "bf16"},
        "gradient": {"_target_": f"{BALANCED}GShard", "coefficient": 1e-2},
    },
    "eqb_lei": {
        "bias": {"_target_": f"{BALANCED}ExactQB", "key": "bf16"},
        "gradient": {"_target_": f"{BALANCED}LEI", "eta": 1e-5},
    },
}


def config_of(name: str, seed: int, steps: int) -> dict[str, Any]:
    """A resolved config."""
    return {
        "name": "table",
        "runs": "runs",
        "seed": seed,
        "balancer": {"name": name, **json.loads(json.dumps(PRESETS.get(name, PRESETS["none"])))},
        "model": {"width": 96, "num_experts": 32, "top_k": 4},
        "optim": {"steps": steps, "learning_rate": 0.002},
        "parallel": {"ranks": 2},
        "tracker": {"mode": "offline"},
        "report": {"tail": 0.333},
    }


def write_run(
    folder: Path,
    name: str,
    seed: int,
    *,
    steps: int = 12,
    planned: int | None = None,
    every: int = 2,
    values: dict[str, Any] | None = None,
    changes: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    loads: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    error: str | None = None,
    suffix: str = "",
) -> Path:
    """Write one run and return its folder.

    ``values`` maps a metric to a number or to one number a step; ``changes`` maps dotted config keys to values; a run
    shorter than ``planned`` or with an ``error`` has no summary; ``loads`` and ``bias``, both ``[steps, L, E]``, go to
    the parquet file.
    """
    config = config_of(name, seed, planned or steps)
    for key, value in (changes or {}).items():
        set_key(config, key, value)
    run = folder / f"{name}-s{seed}-0123abcd{suffix}"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    machine = {
        "commit": "abc",
        "versions": {"torch": "2.13.0"},
        "devices": ["cpu"],
        "world_size": 2,
        "data": {"sha256": "5" * 64},
        **(environment or {}),
    }
    (run / "environment.json").write_text(json.dumps(machine))
    records = [record(step, every, values or {}, loads) for step in range(1, steps + 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    if loads is not None:
        write_loads(run / "load.parquet", loads, bias)
    if error is not None:
        (run / "failed.json").write_text(json.dumps({"error": error, "rank": 1, "log": "log/1"}))
    elif steps == (planned or steps):
        (run / "summary.json").write_text(json.dumps({"steps": steps, "tokens": steps * 4096}))
    return run


def set_key(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key of a nested mapping."""
    *parents, last = key.split(".")
    for parent in parents:
        config = config[parent]
    config[last] = value


def record(step: int, every: int, values: dict[str, Any], loads: np.ndarray | None) -> dict[str, Any]:
    """One row of ``metrics.jsonl``; ``val_bpb`` is measured every ``every`` steps only."""
    line = {"step": step, "tokens": 4096 * step, "global_maxvio": 1.0, "local_maxvio": 2.0, "val_bpb": 3.0}
    line |= {"tokens_per_s": 5000.0, "dead_share": 0.0, "skipped": 0, "clamped_share": 0.0}
    line |= {key: value[step - 1] if isinstance(value, list) else value for key, value in values.items()}
    if step % every:
        line["val_bpb"] = None
    if loads is not None:
        maxvio = loads[step - 1].max(-1) / loads[step - 1].mean(-1) - 1
        line["layers"] = {"global_maxvio": maxvio.tolist(), "local_maxvio": maxvio.tolist()}
        line["device_maxvio"] = device_maxvio(loads[step - 1])
    return line


def device_maxvio(load_LE: np.ndarray) -> dict[str, float]:
    """MaxVio of 2, 4, ... devices with contiguous blocks of experts, of the worst layer."""
    counts = [count for count in (2, 4, 8, 16) if count < load_LE.shape[1] and load_LE.shape[1] % count == 0]
    blocks = {count: load_LE.reshape(len(load_LE), count, -1).sum(-1) for count in counts}
    return {str(count): float((block.max(-1) / block.mean(-1) - 1).max()) for count, block in blocks.items()}


def write_loads(path: Path, loads: np.ndarray, bias: np.ndarray | None = None) -> None:
    """``load.parquet`` of ``loads [steps, L, E]``, with ``bias`` of the same shape where it is given."""
    step, layer, expert = np.indices(loads.shape).reshape(3, -1)
    frame = pd.DataFrame({"step": step + 1, "layer": layer, "expert": expert, "count": loads.reshape(-1)})
    frame = frame.astype({"step": "int32", "layer": "int16", "expert": "int16", "count": "int32"})
    if bias is not None:
        frame["bias"] = bias.reshape(-1).astype("float32")
    frame.to_parquet(path, index=False)


def realistic_bias(loads: np.ndarray) -> np.ndarray:
    """A bias ``[steps, L, E]`` that goes down where the load is high."""
    relative = loads / loads.mean(-1, keepdims=True)
    steps = np.arange(1, len(loads) + 1)[:, None, None]
    return -0.05 * np.cumsum(np.log(np.maximum(relative, 0.1)), axis=0) / np.sqrt(steps)


def realistic_loads(level: float, rng: np.random.Generator, steps: int, layers: int, experts: int) -> np.ndarray:
    """Loads ``[steps, layers, experts]`` whose spread settles at about ``level``."""
    base = rng.normal(size=(layers, experts)) * level * 0.35
    drift = np.linspace(0, 1, steps)[:, None, None]
    start = rng.normal(size=(layers, experts)) * 1.2
    noise = rng.normal(size=(steps, layers, experts)) * 0.2
    weight = np.exp(start * np.exp(-drift * 6) + base + noise)
    return np.round(16384 * weight / weight.sum(-1, keepdims=True)).astype(np.int64)


def write_realistic(folder: Path, *, seeds: int = 3, steps: int = 150, layers: int = 3, experts: int = 32) -> None:
    """Eight balancers with curves of the size that real runs have."""
    levels = {"none": (3.9, 4.2), "signed_count": (2.5, 2.7), "gshard": (0.9, 1.5), "rank_averaged_qb": (1.04, 1.69)}
    levels |= {"histogram_qb": (0.76, 1.49), "eqb": (0.75, 1.51), "eqb_gshard": (0.71, 1.42), "eqb_lei": (0.59, 0.99)}
    step = np.arange(1, steps + 1)
    for number, (name, (wide, local)) in enumerate(levels.items()):
        for seed in range(seeds):
            rng = np.random.default_rng(100 * number + seed)
            shape = 1 + 3 * np.exp(-step / 8) * (0.9 + 0.1 * rng.random())
            values = {
                "global_maxvio": (wide * shape * np.exp(rng.normal(size=steps) * 0.12 + rng.normal() * 0.04)).tolist(),
                "local_maxvio": (local * shape * np.exp(rng.normal(size=steps) * 0.06 + rng.normal() * 0.03)).tolist(),
                "loss": (1.7 + 3.5 * np.exp(-step / 30) + 0.01 * wide + rng.normal(size=steps) * 0.03).tolist(),
                "val_bpb": (2.5 + 3 * np.exp(-step / 40) + 0.01 * wide + rng.normal() * 0.01).tolist(),
                "tokens_per_s": (9000 + rng.normal(size=steps) * 200).tolist(),
            }
            loads = realistic_loads(wide, rng, steps, layers, experts)
            has_bias = PRESETS[name]["bias"] is not None
            bias = realistic_bias(loads) if has_bias else np.full(loads.shape, np.nan)
            write_run(folder, name, seed, steps=steps, every=25, values=values, loads=loads, bias=bias)


def write_three_seeds(folder: Path, name: str, offset: float) -> None:
    """Three runs of 12 steps whose tail (9 to 12 at 0.333) holds the value that the test expects."""
    for seed in range(3):
        tail = [1.0 + offset + 0.1 * seed] * 4
        values = {"global_maxvio": [50.0] * 8 + tail, "local_maxvio": 2.0, "val_bpb": [9.0] * 8 + [0.0, 2.0, 0.0, 4.0]}
        write_run(folder, name, seed, values=values)
