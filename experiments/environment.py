"""Where a run was made: commit, versions, machine and command, for ``environment.json``."""

import contextlib
import os
import platform
import subprocess
import sys
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from .runs import write_json

PACKAGES = ("equipoise", "torch", "triton", "numpy", "hydra-core", "omegaconf", "pandas", "pyarrow", "wandb")


def write_environment(folder: Path, **facts: Any) -> None:
    """Write ``environment.json``: commit, versions, machine, command and start time, and the ``facts`` given."""
    environment = {
        **git_commit(Path(__file__).resolve().parents[1]),
        "versions": _versions(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "devices": _devices(),
        "command": sys.argv,
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    write_json(folder / "environment.json", environment | facts)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def git_commit(root: Path) -> dict[str, Any]:
    """Commit of the checkout at ``root`` and whether files differ from it; None where ``root`` is not a checkout."""
    # an installed copy may lie inside somebody else's repository
    if not (root / ".git").exists():
        return {"commit": None, "dirty": None}
    commit, changes = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain")
    return {"commit": commit or None, "dirty": None if changes is None else bool(changes)}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()


def _devices() -> list[str]:
    # whoever only reads run folders does not wait for torch
    import torch

    if torch.cuda.is_available():
        return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return [platform.processor() or platform.machine()]
