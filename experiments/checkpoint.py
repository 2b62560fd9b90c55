"""Checkpoints through torch.distributed.checkpoint: model, optimizer state and position, tensors only.

A checkpoint is written beside its place and renamed when it is complete, so the last good one is always there. The
library takes seconds to import and a short run may never need it, so it is imported where it is used.
"""

import pickle
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .runs import checkpoint_steps

if TYPE_CHECKING:
    from torch.distributed.checkpoint import FileSystemReader

KEPT = 2
_DCP = "torch.distributed.checkpoint"
# what a checkpoint's .metadata is made of, apart from dtypes, sharded tensors included
_METADATA_CLASSES = {
    *((f"{_DCP}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata")),
    *((f"{_DCP}.metadata", name) for name in ("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING")),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    # the class's module differs between versions of Python
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}


def save_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, position: dict[str, int]) -> None:
    """Write ``folder/step-<position["step"]>``; called by every rank. The newest ``KEPT`` stay.

    Raises:
        RuntimeError: on every rank, if one of them could not write, say to a full disk; it says which and why.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    place = folder / f"step-{position['step']}"
    draft = folder / f".step-{position['step']}"
    first = dist.get_rank() == 0
    if first:
        # also one of a step at which, resumed, the run would write none
        for left in folder.glob(".step-*"):
            shutil.rmtree(left)
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    try:
        dcp.save(_state(model, optimizer, position)[0], checkpoint_id=draft)
    # no Exception, so nobody else would take it for one
    except CheckpointException as error:
        raise RuntimeError(f"the checkpoint {place} was not written ({_why(error)})") from error
    if first:
        shutil.rmtree(place, ignore_errors=True)
        draft.rename(place)
        for step in checkpoint_steps(folder)[:-KEPT]:
            shutil.rmtree(folder / f"step-{step}")
    dist.barrier()


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int] | None:
    """Load the newest checkpoint in ``folder`` in place and return its position; None if there is none.

    Raises:
        ValueError: the checkpoint cannot be read, or lacks part of the model, for example a selection bias.
    """
    steps = checkpoint_steps(folder)
    if not steps:
        return None
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import set_state_dict

    place = folder / f"step-{steps[-1]}"
    position = {"step": 0, "tokens": 0, "skipped": 0}
    state, groups = _state(model, optimizer, position)
    reader = _tensors_only_reader(place)
    try:
        stored = reader.read_metadata().state_dict_metadata
    except Exception as error:
        raise _unreadable(place, error) from error
    missing = sorted(key for key in _keys(state) if key not in stored)
    if missing:
        raise ValueError(f"the checkpoint {place} lacks {len(missing)} tensors of this model: {', '.join(missing[:5])}")
    try:
        dcp.load(state, storage_reader=reader)
    except (Exception, CheckpointException) as error:
        raise _unreadable(place, error) from error
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict={"state": state["optimizer"], "param_groups": groups},
    )
    return {name: int(state["position"][name]) for name in position}


def _tensors_only_reader(place: Path) -> "FileSystemReader":
    """A reader of the checkpoint in ``place`` that runs no code from its files.

    The library reads its data files with ``weights_only``, but ``.metadata`` with plain pickle, and what that calls
    bytes instead of a tensor with ``weights_only=False``.
    """
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

    class TensorsOnlyReader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            with (place / ".metadata").open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
            if not isinstance(metadata, Metadata):
                raise ValueError(f".metadata holds a {type(metadata).__name__}, expected the Metadata of a checkpoint")
            others = [
                key for key, kept in metadata.state_dict_metadata.items() if type(kept) is not TensorStorageMetadata
            ]
            if others:
                raise ValueError(f".metadata describes something other than a tensor: {', '.join(others[:5])}")
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            return metadata

    return TensorsOnlyReader(place)


class _MetadataUnpickler(pickle.Unpickler):
    """Builds the library's descriptions of tensors and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _METADATA_CLASSES or _is_dtype(module, name):
            return super().find_class(module, name)
        raise ValueError(f".metadata asks for {module}.{name}, which describes no tensor")


def _is_dtype(module: str, name: str) -> bool:
    return module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)


def _unreadable(place: Path, error: BaseException) -> ValueError:
    return ValueError(f"the checkpoint {place} cannot be read ({_why(error)}); remove it to go on from the one before")


def _why(error: BaseException) -> str:
    """An error in one line; of several ranks, in one each."""
    from torch.distributed.checkpoint.api import CheckpointException

    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {_why(failure)}" for rank, (failure, _) in error.failures.items())
    return f"{type(error).__name__}: {error}".splitlines()[0]


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
