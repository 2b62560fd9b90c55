"""What a run records, by rank 0: ``metrics.jsonl`` and ``load.parquet`` are the record, W&B is a view of it."""

import json
import math
import os
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .environment import git_commit
from .runs import METRIC_SCHEMA, read_json, run_label, write_text

if TYPE_CHECKING:
    from torch import Tensor

# what a reader compares runs by: with tracker.metrics=brief W&B is given these and device_maxvio/<devices>
BRIEF = (
    "step",
    "tokens",
    "loss",
    "val_loss",
    "val_bpb",
    "global_maxvio",
    "global_maxvio_mean",
    "local_maxvio",
    "local_maxvio_mean",
    "dead_share",
    "load_entropy",
    "bias_norm",
    "learning_rate",
    "grad_norm",
    "skipped",
    "tokens_per_s",
)
# with tracker.metrics=full, so many layers at most have curves of their own
SHOWN_LAYERS = 24
# what W&B is given of a row at most, whatever a balancer adds
MAX_KEYS = 99
# W&B refuses a longer tag
TAG_LENGTH = 64


class Tracker:
    """Appends one row of metrics and the load of every expert per optimizer step.

    ``load.parquet`` is a folder of parts, one per ``flush``; ``pandas.read_parquet`` reads it as one table.

    Args:
        folder: the run folder.
        config: the resolved config; ``tracker.mode`` is ``offline``, ``online`` or ``none``, ``tracker.metrics`` is
            ``brief`` or ``full``: how much of a row W&B is given. The files hold all of it.
        step: go on after this step: later rows and parts are dropped.

    Attributes:
        rows: the numbers of every step; what is of single layers or devices is in the file alone.

    Raises:
        ValueError: if the steps before ``step`` are not all there, or were recorded in another metric schema.
    """

    def __init__(self, folder: Path, config: dict[str, Any], step: int) -> None:
        if step:
            _refuse_other_schema(folder)
        self.metrics = folder / "metrics.jsonl"
        self.loads = folder / "load.parquet"
        self.config = config
        self.pending: list[pa.Table] = []
        self.rows: list[dict[str, Any]] = []
        recorded = _cut_back(self.metrics, self.loads, step)
        self.file = self.metrics.open("a", encoding="utf-8")
        self.wandb = _start_wandb(folder, config)
        for row in recorded:
            self._take(row)

    def log(self, row: dict[str, Any], load_LE: "Tensor", bias_LE: "Tensor") -> None:
        """Record step ``row["step"]``: its metrics (non-finite numbers become null), load and bias ``[L, E]``."""
        clean = _finite(row)
        self.file.write(json.dumps(clean) + "\n")
        self.file.flush()
        # a dense model has no load
        if load_LE.numel():
            self.pending.append(_load_table(row["step"], load_LE.numpy(), bias_LE.numpy()))
        self._take(clean)

    def _take(self, row: dict[str, Any]) -> None:
        """Keep the numbers of a row and give it to W&B, unless its server has had that step before the run was cut."""
        # a long run of many layers would not fit into memory
        self.rows.append({name: value for name, value in row.items() if not isinstance(value, dict)})
        if self.wandb is not None and row["step"] >= self.wandb.starting_step:
            self.wandb.log(wandb_scalars(row, self.config["tracker"]["metrics"]), step=row["step"])

    def flush(self) -> None:
        """Write the loads since the last flush; the metrics are on the disk too before a checkpoint is."""
        os.fsync(self.file.fileno())
        if self.pending:
            self.loads.mkdir(exist_ok=True)
            first, last = (self.pending[index]["step"][0].as_py() for index in (0, -1))
            name = f"part-{first:08d}-{last:08d}.parquet"
            draft = self.loads / f".{name}"
            pq.write_table(pa.concat_tables(self.pending), draft)
            draft.rename(self.loads / name)
            self.pending = []

    def finish(self, summary: dict[str, Any]) -> None:
        """Close the record of a complete run."""
        self.flush()
        self.file.close()
        if self.wandb is not None:
            # of what is in the history W&B keeps a summary itself, say the lowest val_bpb
            self.wandb.summary.update({name: value for name, value in summary.items() if name not in self.rows[-1]})
            self.wandb.finish()


def wandb_scalars(row: dict[str, Any], metrics: str) -> dict[str, float]:
    """What W&B is given of a row of ``metrics.jsonl``: at most ``MAX_KEYS`` numbers, the same keys at each step.

    ``brief``: those of ``BRIEF``, then ``device_maxvio/<devices>``. ``full``: then every other number of the row, in
    its order, and ``layer/<layer>/global_maxvio`` and ``.../local_maxvio`` of up to ``SHOWN_LAYERS`` layers, of fewer
    where room is short. What is beyond ``MAX_KEYS`` is left out.

    >>> row = {"loss": 2.0, "seconds": 0.1, "val_bpb": None, "layers": {"global_maxvio": [0.5]}}
    >>> wandb_scalars(row, "brief")
    {'loss': 2.0}
    >>> wandb_scalars(row, "full")
    {'loss': 2.0, 'seconds': 0.1, 'layer/00/global_maxvio': 0.5}
    """
    # a number that is missing at this step keeps its place
    scalars = {name: value for name, value in row.items() if value is None or isinstance(value, int | float)}
    shown = {name: value for name, value in scalars.items() if name in BRIEF}
    shown |= {f"device_maxvio/{count}": value for count, value in row.get("device_maxvio", {}).items()}
    if metrics == "full":
        shown |= scalars
        shown |= _layer_scalars(row.get("layers", {}), MAX_KEYS - len(shown))
    return {name: value for name, value in list(shown.items())[:MAX_KEYS] if value is not None}


def _layer_scalars(layers: dict[str, list[float | None]], room: int) -> dict[str, float | None]:
    """The metrics of single layers, of as many layers as ``room`` keys can hold."""
    most = min(SHOWN_LAYERS, max(0, room) // max(1, len(layers)))
    return {
        f"layer/{layer:02d}/{name}": values[layer]
        for name, values in layers.items()
        for layer in _spread(len(values), most)
    }


def _spread(total: int, most: int) -> list[int]:
    """Indices of all of ``total``, or of ``most`` of them from the first to the last at even distances.

    >>> _spread(3, 32), _spread(9, 3), _spread(9, 1)
    ([0, 1, 2], [0, 4, 8], [0])
    """
    return list(range(total)) if total <= most else [round(i * (total - 1) / max(1, most - 1)) for i in range(most)]


def check_login(config: dict[str, Any]) -> None:
    """Refuse ``tracker.mode=online`` where W&B has no key. Only looks for one; no network, no prompt.

    Raises:
        ValueError: where a key could be, or what is wrong with the one that is there.
    """
    if config["tracker"]["mode"] != "online":
        return
    problem = login_problem()
    if problem:
        raise ValueError(f"tracker.mode=online: {problem}; or choose tracker=offline, which needs none")


def login_problem() -> str | None:
    """Why W&B could not log in; None if it could or nobody can tell. A key may still be refused by the server."""
    # a second to import, and not needed without it; wandb.login() would start a server and ask the network
    import wandb

    try:
        from wandb.sdk import wandb_setup
        from wandb.sdk.lib import wbauth

        host = wandb_setup.singleton().settings.base_url
        login = wbauth.authenticate_session(host=host, source="equipoise", prompt=False, update_session=False)
    except wandb.errors.AuthenticationError as error:
        return str(error)
    # they are private: where another version has others, wandb.init will say what is wrong
    except (ImportError, AttributeError, TypeError):
        return None
    return None if login else f"no W&B key for {host}: run `wandb login` or set WANDB_API_KEY"


def _refuse_other_schema(folder: Path) -> None:
    """Check that the rows that are there mean what those to come do: the run is labelled as a whole."""
    environment = read_json(folder / "environment.json")
    # folders that were written before schemas were numbered
    stored = environment.get("metric_schema", 1)
    if environment and stored != METRIC_SCHEMA:
        raise ValueError(
            f"{folder} was begun in metric schema {stored}, and this version writes {METRIC_SCHEMA}: expected to go on "
            "in the same one; finish it with the version that began it, or give this run another name="
        )


def _cut_back(metrics: Path, loads: Path, step: int) -> list[dict[str, Any]]:
    """Drop what was recorded after ``step``; a line that a crash has cut short goes with it."""
    rows: list[dict[str, Any]] = []
    if metrics.exists():
        for line in metrics.read_text(encoding="utf-8").splitlines()[:step]:
            rows.append(json.loads(line))
    if [row["step"] for row in rows] != list(range(1, step + 1)):
        raise ValueError(f"{metrics} does not hold the steps 1 to {step} that the checkpoint has behind it")
    write_text(metrics, "".join(json.dumps(row) + "\n" for row in rows))
    for part in loads.glob("*.parquet"):
        if part.name.startswith(".") or int(part.stem.split("-")[-1]) > step:
            part.unlink()
    return rows


def _load_table(step: int, load_LE: np.ndarray, bias_LE: np.ndarray) -> pa.Table:
    layers, experts = load_LE.shape
    return pa.table(
        {
            "step": np.full(load_LE.size, step, np.int32),
            "layer": np.repeat(np.arange(layers, dtype=np.int16), experts),
            "expert": np.tile(np.arange(experts, dtype=np.int16), layers),
            "count": load_LE.reshape(-1).astype(np.int32),
            # after the step's update; NaN without a bias
            "bias": bias_LE.reshape(-1).astype(np.float32),
        }
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _wandb_id(folder: Path) -> str:
    """Id of the W&B run of this folder, drawn once: a folder's name may come again in another experiment."""
    path = folder / "wandb-id"
    if not path.exists():
        write_text(path, uuid.uuid4().hex[:12])
    return path.read_text(encoding="utf-8")


def _start_wandb(folder: Path, config: dict[str, Any]) -> Any:
    """A W&B run: group = experiment, job_type = balancer, x-axis tokens; None when the tracker is off.

    An offline run that was cut cannot be continued: syncing its second part replaces the first. So the first is removed
    and the tracker logs the run anew, from the start.
    """
    tracker = config["tracker"]
    if tracker["mode"] == "none":
        return None
    # a second to import, and not needed without it
    import wandb

    run_id = _wandb_id(folder)
    for part in (folder / "wandb").glob(f"offline-run-*-{run_id}"):
        shutil.rmtree(part, ignore_errors=True)
    run = wandb.init(
        mode=tracker["mode"],
        project=tracker["project"],
        entity=tracker["entity"],
        dir=folder,
        id=run_id,
        resume="allow",
        name=run_label(config),
        group=config["name"],
        job_type=config["balancer"]["name"],
        tags=_tags(config, git_commit(Path(__file__).resolve().parents[1])),
        config=config,
        settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
    )
    run.define_metric("tokens", summary="max")
    run.define_metric("*", step_metric="tokens")
    # of everything else W&B keeps the last value
    for name in ("val_bpb", "val_loss"):
        run.define_metric(name, step_metric="tokens", summary="min")
    return run


def _tags(config: dict[str, Any], commit: dict[str, Any]) -> list[str]:
    """Estimator (its class, or none), gradient, the scales that they balance, experts, top-k, commit if it is known."""
    bias, gradient = (config["balancer"].get(slot) for slot in ("bias", "gradient"))
    tags = [section["_target_"].rpartition(".")[2] for section in (bias, gradient) if section]
    if bias:
        tags.append("global")
    else:
        tags.insert(0, "none")
    if gradient:
        # an auxiliary loss can be over the load of the whole step too
        tags.append("global" if gradient.get("scope") == "global" else "local")
    tags += [f"E={config['model']['num_experts']}", f"K={config['model']['top_k']}"]
    if commit["commit"]:
        tags.append(f"git={commit['commit'][:12]}" + "-dirty" * bool(commit["dirty"]))
    return [tag[:TAG_LENGTH] for tag in dict.fromkeys(tags)]
