"""Checkpoints through torch.distributed.checkpoint: model, optimizer state and position, tensors only.

A checkpoint is written beside its place and renamed when it is complete, so the last good one is always there. The
library takes seconds to import and a short run may never need it, so it is imported where it is used.
"""

import re
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

KEPT = 2


def save_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, position: dict[str, int]) -> None:
    """Write ``folder/step-<position["step"]>``; called by every rank. The newest ``KEPT`` stay."""
    import torch.distributed.checkpoint as dcp

    place = folder / f"step-{position['step']}"
    draft = folder / f".step-{position['step']}"
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(draft, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dcp.save(_state(model, optimizer, position)[0], checkpoint_id=draft)
    if first:
        shutil.rmtree(place, ignore_errors=True)
        draft.rename(place)
        for step in _steps(folder)[:-KEPT]:
            shutil.rmtree(folder / f"step-{step}")
    dist.barrier()


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int] | None:
    """Load the newest checkpoint in ``folder`` in place and return its position; None if there is none.

    Raises:
        ValueError: the checkpoint cannot be read, or lacks part of the model, for example a selection bias.
    """
    steps = _steps(folder)
    if not steps:
        return None
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    place = folder / f"step-{steps[-1]}"
    position = {"step": 0, "tokens": 0, "skipped": 0}
    state, groups = _state(model, optimizer, position)
    try:
        stored = dcp.FileSystemReader(place).read_metadata().state_dict_metadata
    except Exception as error:
        raise _unreadable(place, error) from error
    missing = sorted(key for key in _keys(state) if key not in stored)
    if missing:
        raise ValueError(f"the checkpoint {place} lacks {len(missing)} tensors of this model: {', '.join(missing[:5])}")
    try:
        dcp.load(state, checkpoint_id=place)
    except Exception as error:
        raise _unreadable(place, error) from error
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict={"state": state["optimizer"], "param_groups": groups},
    )
    return {name: int(state["position"][name]) for name in position}


def _unreadable(place: Path, error: Exception) -> ValueError:
    why = f"{type(error).__name__}: {error}".splitlines()[0]
    return ValueError(f"the checkpoint {place} cannot be read ({why}); remove it to go on from the one before")


def _state(
    model: nn.Module, optimizer: torch.optim.Optimizer, position: dict[str, int]
) -> tuple[dict[str, dict], list[dict]]:
    """Everything as tensors by name, and the optimizer's groups, which follow from the config and are not saved."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    tensors: dict[str, Tensor] = {name: torch.tensor(value) for name, value in position.items()}
    state = {"model": model_state, "optimizer": optimizer_state["state"], "position": tensors}
    return state, optimizer_state["param_groups"]  # type: ignore[return-value]


def _keys(state: dict, prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, value in state.items():
        keys += _keys(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}"]
    return keys


def _steps(folder: Path) -> list[int]:
    found = (re.fullmatch(r"step-(\d+)", path.name) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in found if match)
