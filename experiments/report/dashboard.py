"""A W&B workspace as code: the balancers of an experiment side by side. Runs are grouped by job type, the balancer.

Its runs table is the list of runs that every workspace has, with ``COLUMNS`` pinned: the library has no panel for one.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..tracker import login_problem

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

COLUMNS = ("run:jobType", "summary:val_bpb.min", "summary:global_maxvio", "summary:local_maxvio")
# W&B draws ten runs unless told
MOST_RUNS = 100


@dataclass(frozen=True)
class Curve:
    """A panel over tokens: a metric that the tracker logs, or with ``pattern`` all that the expression matches."""

    title: str
    metric: str
    log: bool = False
    pattern: bool = False


SECTIONS = {
    "Balance": (
        Curve("global MaxVio, worst layer", "global_maxvio", log=True),
        Curve("local MaxVio, worst layer", "local_maxvio", log=True),
        Curve("global MaxVio, mean over layers", "global_maxvio_mean", log=True),
        Curve("local MaxVio, mean over layers", "local_maxvio_mean", log=True),
        Curve("share of dead experts", "dead_share"),
        Curve("entropy of the load", "load_entropy"),
    ),
    "Loss": (
        Curve("validation, bits per byte", "val_bpb"),
        Curve("training loss, nats a token", "loss"),
        Curve("gradient norm", "grad_norm", log=True),
        Curve("learning rate", "learning_rate"),
    ),
    "Throughput": (Curve("tokens a second", "tokens_per_s"), Curve("skipped steps", "skipped")),
    "Bias": (Curve("norm of the bias, mean over layers", "bias_norm"),),
    "Devices": (Curve("MaxVio by number of devices, worst layer", r"device_maxvio/\d+", log=True, pattern=True),),
    "Layers (tracker.metrics=full)": (
        Curve("global MaxVio of each layer", r"layer/\d+/global_maxvio", log=True, pattern=True),
        Curve("local MaxVio of each layer", r"layer/\d+/local_maxvio", log=True, pattern=True),
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Write or push the workspace. Exit status: 0; 1 if W&B refuses it; 2 without a W&B key or ``wandb-workspaces``."""
    options = _parser().parse_args(arguments)
    try:
        workspace = make_workspace(options.project, options.entity or "", options.experiment)
    except ModuleNotFoundError as error:
        if error.name != "wandb_workspaces":
            raise
        return _complain("needs wandb-workspaces: pip install 'equipoise[dashboard]'", 2)
    if options.spec:
        return _write(workspace, options.spec)
    problem = login_problem()
    if problem:
        return _complain(f"{problem}; or write the specification with --spec FILE, which needs none", 2)
    return _push(workspace)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dashboard", description="Build a W&B workspace that compares balancers.")
    parser.add_argument("--project", default="equipoise", help="W&B project, as tracker.project (default: equipoise)")
    parser.add_argument("--entity", help="account or team (default: your default one)")
    parser.add_argument("--experiment", help="only the runs of this experiment, a name=... (default: all runs)")
    parser.add_argument("--spec", metavar="FILE", help="write the specification as JSON, - for stdout; push nothing")
    return parser


def make_workspace(project: str, entity: str = "", experiment: str | None = None) -> "Workspace":
    """The workspace, not yet in W&B.

    Raises:
        ModuleNotFoundError: without the extra ``dashboard``.
    """
    # an optional extra, and seconds to import
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces import expr

    return ws.Workspace(
        entity=entity,
        project=project,
        name=f"Equipoise: {experiment or 'all experiments'}",
        sections=[
            ws.Section(name=name, panels=[_panel(curve) for curve in curves], is_open=name in ("Balance", "Loss"))
            for name, curves in SECTIONS.items()
        ],
        settings=ws.WorkspaceSettings(x_axis="tokens", max_runs=MOST_RUNS),
        runset_settings=ws.RunsetSettings(
            filters=f"Group = {experiment!r}" if experiment else "",
            groupby=[expr.Metric("JobType")],
            pinned_columns=list(COLUMNS),
        ),
    )


def _panel(curve: Curve) -> Any:
    """One line a balancer: the mean over its runs, and from the lowest to the highest of them as a band."""
    import wandb_workspaces.reports.v2 as wr

    what = {"metric_regex": f"^{curve.metric}$"} if curve.pattern else {"y": [curve.metric]}
    return wr.LinePlot(
        title=curve.title,
        x="tokens",
        log_y=curve.log,
        groupby=wr.Metric("JobType"),
        groupby_aggfunc="mean",
        groupby_rangefunc="minmax",
        max_runs_to_show=MOST_RUNS,
        **what,
    )


def _write(workspace: "Workspace", path: str) -> int:
    text = workspace._to_model().model_dump_json(by_alias=True, exclude_none=True, indent=2) + "\n"
    if path == "-":
        print(text, end="")
        return 0
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        return _complain(f"cannot write {path}: {error.strerror}", 2)
    return 0


def _push(workspace: "Workspace") -> int:
    import wandb

    try:
        workspace.entity = workspace.entity or wandb.Api().default_entity or ""
        workspace.save()
    # refused, or no connection
    except (wandb.errors.Error, ValueError, OSError) as error:
        return _complain(f"W&B did not take the workspace: {error}", 1)
    print(workspace.url)
    return 0


def _complain(problem: str, status: int) -> int:
    print(f"dashboard: {problem}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
