"""The folder of one run, ``<runs>/<name>/<balancer>-s<seed>-<hash>/``: its name, its state and the small files in it.

The hash is over everything that can change a result, so the same command finds its own folders again: a run with a
``summary.json`` is done, one with only a ``config.yaml`` was cut and is resumed, and no folder is ever overwritten.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

# top-level keys that cannot change a result
FREE = ("runs", "name", "tracker", "report", "checkpoint", "launch", "hydra", "dry_run", "beside")
# of these, what belongs to the command, not to the run
COMMAND = ("launch", "dry_run", "beside")
# what a row of metrics.jsonl and of load.parquet means; runs of two schemas are not put into one table
METRIC_SCHEMA = 2
HASH_DIGITS = 8
# who writes in a folder locks this file in it, which stays
LOCK = ".lock"
# a draft of another machine, of whose processes nothing is known here, is a left one after this
DRAFT_SECONDS = 86400.0
# whoever asks whether a folder is claimed holds it for less than this
CLAIM_SECONDS = 0.1

_ABSENT = "absent"


class RunState(StrEnum):
    """``NEW``: nothing there. ``CUT``: started, not finished. ``DONE``: complete, has a ``summary.json``."""

    NEW = "new"
    CUT = "cut"
    DONE = "done"


def config_hash(config: Mapping[str, Any]) -> str:
    """Hash of the part of a resolved ``config`` that can change a result, whatever the order of its keys.

    >>> config_hash({"seed": 0, "runs": "a"}) == config_hash({"seed": 0, "runs": "b"})
    True
    >>> config_hash({"seed": 0}) == config_hash({"seed": 1})
    False
    """
    relevant = {key: value for key, value in config.items() if key not in FREE}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:HASH_DIGITS]


def run_label(config: Mapping[str, Any]) -> str:
    """Short name for people: balancer and seed.

    >>> run_label({"balancer": {"name": "eqb"}, "seed": 1})
    'eqb-s1'
    """
    return f"{config['balancer']['name']}-s{config['seed']}"


def run_folder(config: Mapping[str, Any]) -> Path:
    """Where a run of this resolved ``config`` lives.

    Raises:
        ValueError: if ``name`` or ``balancer.name`` cannot name a folder, or ``seed`` is not a whole number.
    """
    for key, value in (("name", config["name"]), ("balancer.name", config["balancer"].get("name"))):
        if not isinstance(value, str) or not re.fullmatch(r"\w[\w.+-]*", value):
            raise ValueError(f"{key} names a folder: expected letters, digits and . _ + -, got {value!r}")
    seed = config["seed"]
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed: expected a whole number from 0 on, got {seed!r}")
    return Path(str(config["runs"])).expanduser() / config["name"] / f"{run_label(config)}-{config_hash(config)}"


def run_state(folder: Path) -> RunState:
    """What became of the run in ``folder``; a ``summary.json`` that cannot be read is none."""
    with contextlib.suppress(ValueError):
        read_json(folder / "summary.json")
        if (folder / "summary.json").exists():
            return RunState.DONE
    return RunState.CUT if (folder / "config.yaml").exists() else RunState.NEW


def open_run(folder: Path, config: Mapping[str, Any]) -> None:
    """Make ``folder`` ready for a start or a resume: ``config.yaml`` in it, no ``failed.json``.

    Keys that cannot change a result (``FREE``) take their new values, say another tracker for the rest of the run.

    Raises:
        ValueError: if ``folder`` holds a run of another config, or files that are not a run.
    """
    refuse_other_run(folder, config)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False))
    (folder / "failed.json").unlink(missing_ok=True)


def renew(folder: Path, config: Mapping[str, Any]) -> None:
    """Let the keys of a complete run that cannot change its result take their new values, unless others write there.

    Raises:
        ValueError: if ``folder`` holds a run of another config.
    """
    refuse_other_run(folder, config)
    stored = load_config(folder)
    changed = {key: value for key, value in config.items() if key in FREE and not same(stored.get(key), value)}
    # whoever is at work there has brought values of its own
    if changed and not is_claimed(folder):
        with claim(folder):
            write_text(folder / "config.yaml", yaml.safe_dump(stored | changed, sort_keys=False))


def refuse_other_run(folder: Path, config: Mapping[str, Any]) -> None:
    """Check that ``folder`` is empty, missing, or a run of just this ``config``.

    Raises:
        ValueError: naming the first key that differs, with both values; for a folder inside that of another run.
    """
    if (folder.parent / "config.yaml").exists():
        raise ValueError(f"{folder.parent} holds a result of its own: expected another name= for this experiment")
    if not (folder / "config.yaml").exists():
        if folder.exists() and set(folder.iterdir()) - {folder / LOCK, *_drafts(folder)}:
            raise ValueError(f"{folder} holds files but no config.yaml: not a run, so nothing is written there")
        return
    stored, given = flatten(load_config(folder)), flatten(config)
    for key in sorted(stored.keys() | given.keys()):
        old, new = stored.get(key, _ABSENT), given.get(key, _ABSENT)
        if not same(old, new) and key.split(".")[0] not in FREE:
            raise ValueError(
                f"{folder} holds the run of another config: {key} is {old!r} there and {new!r} here; "
                f"nothing was overwritten. Remove the folder or give this run another name="
            )


def same(one: Any, other: Any) -> bool:
    """Whether two settings are one to ``config_hash``.

    >>> same(float("nan"), float("nan")), same(1, 1.0)
    (True, False)
    """
    return _text(one) == _text(other)


def _text(value: Any) -> str:
    # a date, which no config of ours holds, but a file may
    return json.dumps(value, sort_keys=True, default=str)


def flatten(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one mapping with dotted keys.

    >>> flatten({"optim": {"steps": 3}, "seed": 0})
    {'optim.steps': 3, 'seed': 0}
    """
    flat: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def load_config(folder: Path) -> dict[str, Any]:
    """The resolved config of the run in ``folder``.

    Raises:
        ValueError: if there is none, or it is not a mapping in YAML.
    """
    path = folder / "config.yaml"
    if not path.is_file():
        raise ValueError(f"{folder} is not a run folder: it has no config.yaml")
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a mapping of settings, got {type(config).__name__}")
    return config


@contextlib.contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Make ``folder`` and keep a second launcher out of it; the claim ends with the process, however that ends.

    Raises:
        ValueError: if another process is at work in ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle, locked = open_lock(folder), None
    try:
        locked = _lock(handle, fcntl.LOCK_EX)
        if locked is False:
            time.sleep(CLAIM_SECONDS)
            locked = _lock(handle, fcntl.LOCK_EX)
        if locked is False:
            raise ValueError(f"{folder} is being written by another process ({claimant(folder) or 'unknown'})")
        # without locks the claim is a courtesy
        if locked:
            remove_drafts(folder)
            os.truncate(handle, 0)
            os.write(handle, f"{platform.node()} {os.getpid()}\n".encode())
        yield
    finally:
        if locked:
            os.truncate(handle, 0)
        os.close(handle)


def open_lock(folder: Path) -> int:
    """Open the lock file of ``folder`` as a file descriptor.

    A folder can be locked itself, but on a network disk (NFS) other machines are then not told; and they lock for
    writing what is open for writing.
    """
    return os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)


def is_claimed(folder: Path) -> bool | None:
    """Whether a launcher is at work in ``folder``; None where nobody can tell, say on a disk without locks."""
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except PermissionError:
        return None
    try:
        free = _lock(handle, fcntl.LOCK_SH)
    finally:
        os.close(handle)
    return None if free is None else not free


def claimant(folder: Path) -> str | None:
    """``<host>, process <id>`` of the launcher that has claimed ``folder``, or was killed as it had; None without."""
    try:
        host, number = (folder / LOCK).read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return None
    return f"{host}, process {number}"


def _lock(handle: int, kind: int) -> bool | None:
    """Lock an open file without waiting: True; False if another process has it; None if the disk has no locks."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    # a network disk without its lock service
    except OSError:
        return None
    return True


def checkpoint_step(folder: Path) -> int:
    """The step of the newest checkpoint of the run in ``folder``, from which it goes on; 0 without one."""
    return max(checkpoint_steps(folder / "checkpoints"), default=0)


def checkpoint_steps(checkpoints: Path) -> list[int]:
    """The steps whose checkpoints lie in the folder ``checkpoints``, in order."""
    found = (re.fullmatch(r"step-(\d+)", path.name) for path in checkpoints.glob("step-*"))
    return sorted(int(match[1]) for match in found if match)


def write_text(path: Path, text: str) -> None:
    """Write a file at once: whoever reads ``path`` sees all of ``text`` or what was there before."""
    draft = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def remove_drafts(folder: Path) -> None:
    """Remove what ``write_text`` had not yet put in its place when its process was killed."""
    for draft in _drafts(folder):
        # whoever writes it may just have put it in its place
        with contextlib.suppress(FileNotFoundError):
            if _is_left(draft):
                draft.unlink()


def _drafts(folder: Path) -> set[Path]:
    return {path for path in folder.glob(".*") if re.fullmatch(r"\..+\.\d+", path.name)}


def _is_left(draft: Path) -> bool:
    """Whether the process that wrote a draft is gone; of another machine, whether the draft is old."""
    number = int(draft.suffix[1:])
    if draft.name.endswith(f".{platform.node()}.{number}"):
        try:
            os.kill(number, 0)
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:
            pass
    return time.time() - draft.stat().st_mtime > DRAFT_SECONDS


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON, at once (see ``write_text``)."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; empty if there is no such file.

    Raises:
        ValueError: for anything else than a JSON object.
    """
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def write_failure(folder: Path, error: str, rank: int | None = None, log: Path | None = None) -> None:
    """Record in ``failed.json`` why the run stopped; ``log`` is stored relative to ``folder``."""
    # rank 0 may have finished before another rank failed
    (folder / "summary.json").unlink(missing_ok=True)
    relative = str(log.relative_to(folder)) if log else None
    write_json(folder / "failed.json", {"error": error, "rank": rank, "log": relative})
