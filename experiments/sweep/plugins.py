"""What the command says of a sweep that a plugin of Hydra runs: elsewhere (Slurm), or as it sees fit (a search)."""

import shutil
import sys
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class PluginJobError(HydraException, RuntimeError):
    """A job that a plugin has run failed. Hydra's own kind of error, which the command prints without a trace."""


class PluginNotes(Callback):
    """Called by Hydra in the process of the command: see ``hydra.callbacks`` in ``configs/hydra/quiet.yaml``."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Refuse or warn of what a plugin does not do."""
        if not has_plugin(config.hydra):
            return
        # Hydra makes a warning of an exception that a callback raises, but not of this one
        if config.dry_run or not config.launch:
            sys.exit(
                "equipoise: dry_run=true and launch=false know Hydra's own launcher and sweeper: leave the plugin out"
            )
        if config.hydra.launcher._target_.endswith(".SlurmLauncher") and shutil.which("srun") is None:
            sys.exit("equipoise: there is no Slurm here (no srun on the PATH): start this where jobs are submitted")
        if config.beside:
            presets = ",".join(config.beside)
            print(f"equipoise: beside is not run by a plugin: add balancer={presets} as a sweep", file=sys.stderr)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Say how to get the table, which is made of all jobs."""
        if has_plugin(config.hydra):
            print(f"the table: equipoise-report {Path(config.runs) / config.name}")


def has_plugin(settings: Any) -> bool:
    """Whether Hydra's ``settings`` name a launcher or a sweeper that is not its own."""
    targets = (str(settings[part]["_target_"]) for part in ("launcher", "sweeper"))
    return any(not target.startswith("hydra._internal.core_plugins.basic_") for target in targets)
