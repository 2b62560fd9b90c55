"""Byte-level text: documents to two token streams, streams to microbatches.

A token is a byte (256 of them), so bits per byte are loss / ln 2. Byte 0 ends a document and occurs nowhere else.

Shapes: ``B`` sequences of a microbatch, ``S`` tokens of a sequence, ``N`` validation sequences.
"""

import hashlib
import json
import math
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

# tests are three quarters of the library and, like tkinter or ensurepip, left out of slim and split installations;
# site-packages and config-* hold what was installed or built on one machine
_STDLIB_SKIPPED = (
    *("test", "tests", "idlelib", "lib2to3", "turtledemo", "turtle.py", "tkinter", "distutils", "ensurepip"),
    *("site-packages", "dist-packages", "lib-dynload", "__pycache__", "sitecustomize.py", "usercustomize.py"),
)
_STDLIB_SKIPPED_PREFIXES = ("config-", "_sysconfigdata")

# long enough that a validation block holds hundreds of sequences, short enough that most files stay whole
_BLOCK_BYTES = 64 * 1024


@dataclass(frozen=True, eq=False)
class Corpus:
    """Two read-only streams of bytes and what they were made of.

    ``train`` and ``validation`` are 1-D ``uint8``; every document in them is followed by one byte 0. ``facts`` holds
    ``files``, ``documents``, ``bytes`` (without separators), ``skipped_files``, ``skipped_rows``, ``sha256`` (over the
    names and contents of all documents in order), ``train_tokens``, ``val_tokens``, and ``python_version`` or ``path``.
    """

    train: np.ndarray
    validation: np.ndarray
    facts: dict[str, Any]


class _Document(NamedTuple):
    """``file`` is a relative posix path, ``row`` is "" or ":12"; ``content`` is None where it cannot be used."""

    file: str
    row: str
    content: bytes | None
    cut: bool = False


def stdlib_source(validation_fraction: float) -> Corpus:
    """The Python standard library's own sources, read in place: about 10 MB on every machine, nothing to download.

    A file is validation if the sha256 of its relative path says so, so neither its place in the list nor the other
    files matter. The sources differ between Python versions; ``facts`` records the version and the sha256.

    Raises:
        ValueError: ``validation_fraction`` outside (0, 1), no sources on this machine, or a split without a file.
    """
    root = Path(sysconfig.get_paths()["stdlib"])

    def skipped(part: str) -> bool:
        return part in _STDLIB_SKIPPED or part.startswith(_STDLIB_SKIPPED_PREFIXES)

    documents = (_Document(name, "", _usable(path.read_bytes())) for name, path in _files(root, skipped, ".py"))
    facts = {"python_version": platform.python_version()}
    return _corpus(documents, validation_fraction, "the Python standard library", facts)


def text_source(path: str | os.PathLike[str], validation_fraction: float, text_key: str = "text") -> Corpus:
    """A file, or a folder with all its subfolders, of text; hidden files and folders in it are passed over.

    - ``.jsonl``: one JSON object a line, the document is its ``text_key``.
    - ``.parquet``: one document a row, in the string column ``text_key``.
    - any other suffix: UTF-8 text, one document a file. A file of more than 64 KiB, or of any size if ``path`` names
      it, is cut into blocks of equal size (64 KiB or less) so that both splits get a part of it.

    The split depends on the sha256 of a document's name (the relative path, for a row ``path:number`` counted from 1)
    and on nothing else in the folder. Byte 0 separates documents, so a document that contains it cannot be used: like
    text that is not UTF-8 and rows that are null, it is skipped and counted in ``facts`` (``skipped_files``,
    ``skipped_rows``). Empty documents are left out. The whole text is held in memory.

    Raises:
        ValueError: ``validation_fraction`` outside (0, 1); ``path`` missing or without usable text; a line that is not
            a JSON object or not JSON; ``text_key`` missing or not a string; a split without a document.
    """
    root = Path(path).expanduser()
    if not str(path) or not root.exists():
        raise ValueError(f"data path {str(path)!r} does not exist: expected a file or a folder of text")
    alone = root.is_file()
    files = [(root.name, root)] if alone else list(_files(root, lambda part: part.startswith(".")))
    if not files:
        raise ValueError(f"data path {str(path)!r} holds no files: expected text, .jsonl or .parquet")
    documents = (document for name, file in files for document in _read(name, file, text_key, alone))
    return _corpus(documents, validation_fraction, f"data path {str(path)!r}", {"path": str(path)})


def _files(root: Path, skipped: Callable[[str], bool], suffix: str = "") -> list[tuple[str, Path]]:
    """Files under ``root`` as (relative posix path, path), sorted; folders that are ``skipped`` are not entered."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not skipped(name)]
        paths = (Path(folder, name) for name in names if name.endswith(suffix) and not skipped(name))
        found += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    return sorted(found)


def _read(name: str, path: Path, text_key: str, alone: bool) -> Iterator[_Document]:
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        yield from _read_jsonl(name, path, text_key)
    elif suffix == ".parquet":
        yield from _read_parquet(name, path, text_key)
    else:
        content = path.read_bytes()
        yield _Document(name, "", _usable(content), cut=alone or len(content) > _BLOCK_BYTES)


def _read_jsonl(name: str, path: Path, text_key: str) -> Iterator[_Document]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _Document(name, f":{number}", _usable(_json_text(line, f"{path}:{number}", text_key)))


def _json_text(line: bytes, place: str, text_key: str) -> str | None:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place} is not valid JSON ({error}): expected one object a line") from None
    given = sorted(row) if isinstance(row, dict) else f"a {type(row).__name__}"
    if not isinstance(row, dict) or text_key not in row:
        raise ValueError(f"{place} holds {given}: expected an object with the key {text_key!r} (text_key)")
    if not isinstance(row[text_key], str | None):
        raise ValueError(f"{place} holds a {type(row[text_key]).__name__} at {text_key!r}: expected a string")
    return row[text_key]


def _read_parquet(name: str, path: Path, text_key: str) -> Iterator[_Document]:
    try:
        with pq.ParquetFile(path) as table:
            kinds = dict(zip(table.schema_arrow.names, map(str, table.schema_arrow.types), strict=True))
            if kinds.get(text_key) not in ("string", "large_string", "string_view"):
                raise ValueError(f"{path} has the columns {kinds}: expected strings in {text_key!r} (text_key)")
            texts = (text for batch in table.iter_batches(columns=[text_key]) for text in batch.column(0).to_pylist())
            for number, text in enumerate(texts, start=1):
                yield _Document(name, f":{number}", _usable(text))
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} cannot be read as parquet: {error}") from None


def _usable(content: bytes | str | None) -> bytes | None:
    """The content as bytes, or None if it is not UTF-8 or contains the separator."""
    try:
        encoded = content.encode() if isinstance(content, str) else content
        return encoded if encoded is not None and "\0" not in encoded.decode() else None
    except UnicodeError:
        return None


def _corpus(documents: Iterable[_Document], validation_fraction: float, origin: str, facts: dict[str, Any]) -> Corpus:
    if not 0 < validation_fraction < 1:
        raise ValueError(f"validation_fraction is {validation_fraction}: expected a number between 0 and 1, exclusive")
    train, validation = bytearray(), bytearray()
    counts = Counter(documents=0, bytes=0, skipped_files=0, skipped_rows=0)
    files, digest = set(), hashlib.sha256()
    for document in documents:
        content = document.content
        if content is None:
            counts["skipped_rows" if document.row else "skipped_files"] += 1
        elif content:
            files.add(document.file)
            counts.update(documents=1, bytes=len(content))
            # the length marks where a content ends, so that no two lists of documents hash alike
            digest.update(os.fsencode(document.file + document.row) + b"\0%d\0" % len(content) + content)
            for is_validation, piece in _split(document, content, validation_fraction):
                (validation if is_validation else train).extend(piece + b"\0")
    for split, stream in (("train", train), ("validation", validation)):
        if not stream:
            raise ValueError(
                f"{origin} leaves the {split} split empty ({dict(counts)}, validation_fraction {validation_fraction}): "
                "expected UTF-8 text without byte 0 in many documents or one file, or another validation_fraction"
            )
    facts |= {"files": len(files), **counts, "train_tokens": len(train), "val_tokens": len(validation)}
    return Corpus(_tokens(train), _tokens(validation), facts | {"sha256": digest.hexdigest()})


def _tokens(stream: bytearray) -> np.ndarray:
    # an array over immutable bytes is read-only
    return np.frombuffer(bytes(stream), dtype=np.uint8)


def _split(document: _Document, content: bytes, fraction: float) -> Iterator[tuple[bool, bytes]]:
    """Runs of blocks as (is validation, bytes); a document that is not cut is one block.

    Block ``k`` is validation where ``floor(k * fraction + phase)`` steps, with a phase in [0, 1) from the name. So a
    whole document is validation with probability ``fraction``, and one that is cut always has blocks of both kinds.
    """
    size = len(content)
    num_blocks = max(math.ceil(1 / min(fraction, 1 - fraction)), math.ceil(size / _BLOCK_BYTES)) if document.cut else 1
    # 48 bits are exact in a float, and so is their distance from 1
    name = os.fsencode(document.file + document.row)
    phase = int.from_bytes(hashlib.sha256(name).digest()[:6], "big") / 2**48

    def is_validation(block: int) -> bool:
        return math.floor((block + 1) * fraction + phase) > math.floor(block * fraction + phase)

    for validation, run in groupby(range(num_blocks), key=is_validation):
        blocks = list(run)
        piece = content[size * blocks[0] // num_blocks : size * (blocks[-1] + 1) // num_blocks]
        if piece:
            yield validation, piece


class Batches:
    """Microbatches of contiguous text, in an order that depends on ``seed`` and the global position only.

    The stream is cut into chunks of ``chunk_sequences`` contiguous sequences, by default as many as a microbatch ``B``
    holds, so that microbatches differ as those of real training do. An epoch visits every chunk once, in a permutation
    of its own, however chunks are dealt out to microbatches and these to ranks: with chunks of a size of its own a step
    has the same tokens as few large microbatches or as many small ones. What is left at the end of the stream (less
    than a chunk) is not used.

    Raises:
        ValueError: a size below 1, a negative seed, a microbatch that is no whole number of chunks, or fewer tokens
            than one optimizer step takes.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        sequence_length: int,
        microbatch_sequences: int,
        microbatches: int,
        seed: int,
        chunk_sequences: int | None = None,
    ) -> None:
        chunk_sequences = microbatch_sequences if chunk_sequences is None else chunk_sequences
        _check_positive(
            sequence_length=sequence_length,
            microbatch_sequences=microbatch_sequences,
            microbatches=microbatches,
            chunk_sequences=chunk_sequences,
        )
        if microbatch_sequences % chunk_sequences:
            raise ValueError(
                f"a microbatch of {microbatch_sequences} sequences is no whole number of chunks: expected "
                f"chunk_sequences to divide it, got {chunk_sequences}"
            )
        if seed < 0:
            raise ValueError(f"seed is {seed}: expected 0 or more")
        self.tokens, self.seed = tokens, seed
        self.sequence_length, self.microbatches = sequence_length, microbatches
        self.chunk_tokens = sequence_length * chunk_sequences
        # chunks of a microbatch
        self.chunks = microbatch_sequences // chunk_sequences
        # the target of the last token is one token further
        self.num_chunks = (len(tokens) - 1) // self.chunk_tokens
        if self.num_chunks < microbatches * self.chunks:
            needed = microbatches * self.chunks * self.chunk_tokens + 1
            raise ValueError(
                f"the train split has {len(tokens)} tokens: expected at least {needed}, what one optimizer step takes "
                f"({microbatches} microbatches x {microbatch_sequences} sequences x {sequence_length} tokens + 1)"
            )
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def _chunk(self, position: int) -> int:
        """The chunk at ``position`` of all epochs."""
        epoch, place = divmod(position, self.num_chunks)
        if epoch != self._epoch:
            entropy = np.random.SeedSequence(self.seed, spawn_key=(epoch,))
            self._epoch, self._order = epoch, np.random.default_rng(entropy).permutation(self.num_chunks)
        return int(self._order[place])

    def microbatch(self, step: int, index: int) -> torch.Tensor:
        """Global microbatch ``index`` of optimizer step ``step`` (from 0): ``[B, S+1]`` int64.

        Within a chunk row ``b`` follows row ``b - 1`` in the text; inputs are ``[:, :-1]`` and targets ``[:, 1:]``.

        Raises:
            IndexError: ``step`` or ``index`` outside its range.
        """
        if step < 0:
            raise IndexError(f"step is {step}: expected 0 or more")
        if not 0 <= index < self.microbatches:
            raise IndexError(f"microbatch index is {index}: expected 0 <= index < {self.microbatches}")
        first = (step * self.microbatches + index) * self.chunks
        starts = np.array([self._chunk(first + number) for number in range(self.chunks)]) * self.chunk_tokens
        offsets = np.arange(0, self.chunk_tokens, self.sequence_length)
        return _windows(self.tokens, (starts[:, None] + offsets).reshape(-1), self.sequence_length)


def validation_sequences(tokens: np.ndarray, *, sequence_length: int, num_sequences: int) -> torch.Tensor:
    """Sequences spread evenly over the stream, each token predicted at most once: ``[N, S+1]`` int64.

    ``N`` is ``num_sequences``, or as many as the stream holds if those are fewer.

    Raises:
        ValueError: a size below 1, or a stream shorter than one sequence and its last target.
    """
    _check_positive(sequence_length=sequence_length, num_sequences=num_sequences)
    room = len(tokens) - 1 - sequence_length
    if room < 0:
        raise ValueError(
            f"the validation split has {len(tokens)} tokens: expected at least {sequence_length + 1}, "
            "one sequence and its last target"
        )
    count = min(num_sequences, room // sequence_length + 1)
    starts = np.arange(count) * room // max(count - 1, 1)
    return _windows(tokens, starts, sequence_length)


def _windows(tokens: np.ndarray, starts: np.ndarray, sequence_length: int) -> torch.Tensor:
    """``tokens[start : start + S + 1]`` for each start: ``[len(starts), S+1]`` int64."""
    return torch.from_numpy(tokens[starts[:, None] + np.arange(sequence_length + 1)].astype(np.int64))


def _check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size}: expected an integer of at least 1")
