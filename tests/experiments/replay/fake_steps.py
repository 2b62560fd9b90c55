"""A result folder of ``equipoise-replay`` made of numbers that are known in advance, for the tests of its page."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

NUM_EXPERTS = 64
NOISE = 0.01
# name: mean error on a stream without skew over the noise, bytes an expert, seconds over those of eqb
ESTIMATORS = {
    "rank_averaged_qb": (0.5, 4, 0.5),
    "rank_averaged_microbatch": (0.6, 4, 0.5),
    "histogram_100": (2.0, 400, 0.8),
    "histogram_500": (0.4, 2000, 0.9),
    "histogram_4000": (0.05, 16000, 1.5),
    "signed_count": (30.0, 4, 0.2),
    "eqb": (0.1, 2048, 1.0),
    "eqb_fp32": (1e-5, 4096, 2.0),
    "eqb_cut": (0.1, 2304, 0.5),
    "eqb_window": (0.1, 1040, 0.25),
}
STREAMS = {"plain": 1.0, "rank_skew": 10.0, "drift": 1.0}


def fake_steps(
    streams: Sequence[str] = tuple(STREAMS),
    estimators: Sequence[str] = tuple(ESTIMATORS),
    ranks: Sequence[int] = (1, 2, 8, 64),
    seeds: int = 3,
    steps: int = 9,
    layers: int = 2,
) -> pd.DataFrame:
    """One row a stream, estimator, seed, partition, step and layer.

    Rank averages: the error is ``NOISE * (own + 0.01 * ranks * skew)``, of the others ``NOISE * own``; seed ``s`` adds
    ``s`` per cent, so the mean over three seeds is 1 % above. Candidates fall back in step 1 with a quarter of the
    experts, ``eqb_window`` on ``drift`` in step 5 as well, with half of them.
    """
    axes = (streams, estimators, range(seeds), ranks, range(1, steps + 1), range(layers))
    return pd.DataFrame([_row(*point) for point in itertools.product(*axes)])


def _row(stream: str, estimator: str, seed: int, ranks: int, step: int, layer: int) -> dict[str, Any]:
    own, bytes_an_expert, times = ESTIMATORS[estimator]
    depends, candidates = estimator.startswith("rank_averaged"), estimator in ("eqb_cut", "eqb_window")
    error = own + (0.01 * ranks * STREAMS[stream] if depends else 0.0)
    # the first three steps must not count
    error *= NOISE * (1 + 0.01 * seed) * (100.0 if step <= 3 else 1.0)
    late = estimator == "eqb_window" and stream == "drift" and step == 5
    return {
        "stream": stream,
        "estimator": estimator,
        "seed": seed,
        "ranks": ranks,
        "microbatches": 1,
        "step": step,
        "layer": layer,
        "error_max": 3 * error,
        "error_mean": error,
        "noise": NOISE,
        "moved": max(0.0, 0.5 - 0.1 * step) if not depends else 0.01,
        "maxvio_before": 0.2 + 10 * error,
        "maxvio_same": 0.1 + 10 * error,
        "maxvio_next": 0.2 + 10 * error,
        "spread": 0.3 * STREAMS[stream] if depends else 0.0,
        "bytes": bytes_an_expert * NUM_EXPERTS,
        "rounds": 2,
        "memory": (40_000 if candidates else 400_000) // ranks,
        "seconds": 0.004 * times * (1 + 0.1 * (step % 3)),
        "fallback_share": (0.25 if step == 1 else 0.5 if late else 0.0) if candidates else np.nan,
        "candidate_share": 0.1 if candidates else np.nan,
    }


def write_result(folder: Path, frame: pd.DataFrame, **changes: Any) -> Path:
    """The folder as the command leaves it before its page is made."""
    folder.mkdir(parents=True)
    frame.to_parquet(folder / "steps.parquet")
    config = {"name": folder.name, "mode": "online", "num_experts": NUM_EXPERTS, **changes}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "environment.json").write_text(json.dumps({"commit": "abc", "command": ["equipoise-replay"]}))
    return folder
