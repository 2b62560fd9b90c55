import json
import platform
from pathlib import Path

import hydra
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue

from equipoise.experiments.data import Batches, Corpus, stdlib_source, text_source, validation_sequences


def write_files(folder: Path, count: int = 40, first: int = 0) -> dict[str, bytes]:
    """``count`` small files, half of them in a subfolder: relative path to content."""
    contents = {}
    for number in range(first, first + count):
        name = f"sub/{number}.md" if number % 2 else f"{number}.txt"
        contents[name] = f"document {number} ü\n".encode()
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(contents[name])
    return contents


def documents(stream: np.ndarray) -> list[bytes]:
    assert stream[-1] == 0
    return stream.tobytes()[:-1].split(b"\0")


def text_of(corpus: Corpus) -> set[bytes]:
    return set(documents(corpus.train) + documents(corpus.validation))


def batches(tokens: np.ndarray, **changes: int) -> Batches:
    sizes = {"sequence_length": 4, "microbatch_sequences": 2, "microbatches": 3, "seed": 0}
    return Batches(tokens, **(sizes | changes))


@pytest.fixture(scope="module")
def stdlib() -> Corpus:
    return stdlib_source(0.05)


def test_stdlib_has_both_splits_and_round_trips(stdlib: Corpus) -> None:
    facts = stdlib.facts
    train, validation = documents(stdlib.train), documents(stdlib.validation)
    assert facts["bytes"] > 5_000_000
    assert 0.01 < facts["val_tokens"] / facts["train_tokens"] < 0.15
    assert (len(stdlib.train), len(stdlib.validation)) == (facts["train_tokens"], facts["val_tokens"])
    assert len(train) + len(validation) == facts["documents"] == facts["files"] > 300
    assert sum(map(len, train + validation)) == facts["bytes"]
    assert facts["python_version"] == platform.python_version()
    assert Path(json.__file__).read_bytes() in train + validation
    assert not set(train) & set(validation)


def test_stdlib_is_the_same_at_every_reading(stdlib: Corpus) -> None:
    again = stdlib_source(0.05)
    assert again.facts == stdlib.facts
    assert np.array_equal(again.train, stdlib.train)
    assert not again.train.flags.writeable


def test_stdlib_leaves_out_what_is_not_always_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [f"{folder}{number}.py" for number in range(5) for folder in ("", "json/", "testing/")]
    left_out = ["test/a.py", "ctypes/test/b.py", "site-packages/c.py", "idlelib/d.py", "turtle.py", "e.txt"]
    for name in [*kept, *left_out, "config-3.11-linux/f.py", "_sysconfigdata__linux.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    assert text_of(stdlib_source(0.5)) == {name.encode() for name in kept}


def test_stdlib_that_is_missing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match="Python standard library leaves the train split empty"):
        stdlib_source(0.05)


def test_folder_of_text(tmp_path: Path) -> None:
    contents = write_files(tmp_path)
    (tmp_path / ".hidden.txt").write_text("hidden")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config.txt").write_text("hidden")
    (tmp_path / "empty.txt").write_text("")
    corpus = text_source(tmp_path, 0.3)
    train, validation = documents(corpus.train), documents(corpus.validation)
    assert sorted(train + validation) == sorted(contents.values())
    # in the order of the relative paths
    order = [contents[name] for name in sorted(contents)]
    assert train == [content for content in order if content in train]
    assert corpus.facts["files"] == corpus.facts["documents"] == 40
    assert corpus.facts["bytes"] == sum(map(len, contents.values()))
    assert corpus.facts["skipped_files"] == corpus.facts["skipped_rows"] == 0
    assert corpus.facts["path"] == str(tmp_path)


def test_split_does_not_depend_on_other_files(tmp_path: Path) -> None:
    write_files(tmp_path)
    before = text_source(tmp_path, 0.3)
    write_files(tmp_path, first=100)
    after = text_source(tmp_path, 0.3)
    assert set(documents(before.train)) < set(documents(after.train))
    assert set(documents(before.validation)) < set(documents(after.validation))


def test_split_does_not_depend_on_content_or_place_of_the_folder(tmp_path: Path) -> None:
    names = write_files(tmp_path / "a")
    for name in names:
        (tmp_path / "b" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "b" / name).write_text(f"{name} again")
    first, second = text_source(tmp_path / "a", 0.3), text_source(tmp_path / "b", 0.3)
    validation = [name for name in sorted(names) if names[name] in documents(first.validation)]
    assert documents(second.validation) == [f"{name} again".encode() for name in validation]


def test_a_larger_fraction_keeps_the_validation_documents(tmp_path: Path) -> None:
    write_files(tmp_path, count=100)
    small, large = (set(documents(text_source(tmp_path, fraction).validation)) for fraction in (0.1, 0.5))
    assert small < large
    assert 30 < len(large) < 70


@pytest.mark.parametrize("change", ["content", "name", "boundary"])
def test_sha256_changes_with(change: str, tmp_path: Path) -> None:
    write_files(tmp_path)
    before = text_source(tmp_path, 0.3).facts["sha256"]
    assert text_source(tmp_path, 0.5).facts["sha256"] == before
    if change == "content":
        (tmp_path / "0.txt").write_text("document 0 u\n")
    elif change == "name":
        (tmp_path / "0.txt").rename(tmp_path / "0.text")
    else:
        text = (tmp_path / "10.txt").read_text()
        (tmp_path / "0.txt").write_text((tmp_path / "0.txt").read_text() + text[:3])
        (tmp_path / "10.txt").write_text(text[3:])
    assert text_source(tmp_path, 0.3).facts["sha256"] != before


@pytest.mark.parametrize("size", [1_000, 100_000, 3_000_000])
@pytest.mark.parametrize("fraction", [0.01, 0.05, 1 / 3, 0.5, 0.9])
def test_single_file_has_both_splits(size: int, fraction: float, tmp_path: Path) -> None:
    text = np.random.default_rng(0).integers(97, 123, size).astype(np.uint8).tobytes()
    for name in ("book.txt", "other", "third.md"):
        (tmp_path / name).write_bytes(text)
        corpus = text_source(tmp_path / name, fraction)
        pieces = documents(corpus.train) + documents(corpus.validation)
        assert b"".join(sorted(pieces, key=text.index)) == text
        # whole blocks: off by at most one of them
        block = size / max(1 / min(fraction, 1 - fraction), size / 65536)
        assert abs(sum(map(len, documents(corpus.validation))) - size * fraction) < block + 2
        assert corpus.facts["documents"] == 1


def test_large_files_of_a_folder_are_cut_and_small_ones_are_whole(tmp_path: Path) -> None:
    small = write_files(tmp_path)
    large = np.random.default_rng(0).integers(97, 123, 200_000).astype(np.uint8).tobytes()
    (tmp_path / "large.txt").write_bytes(large)
    corpus = text_source(tmp_path, 0.1)
    pieces = text_of(corpus) - set(small.values())
    assert len(text_of(corpus) & set(small.values())) == len(small)
    assert b"".join(sorted(pieces, key=large.index)) == large
    assert any(piece in large for piece in documents(corpus.validation))
    assert any(piece in large for piece in documents(corpus.train))


def write_rows(path: Path, texts: list[str | None], key: str = "text") -> None:
    if path.suffix == ".jsonl":
        path.write_text("\n\n".join(json.dumps({key: text, "id": 1}) for text in texts) + "\n")
    else:
        pq.write_table(pa.table({key: pa.array(texts, pa.string()), "id": range(len(texts))}), path, row_group_size=7)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "ROWS.JSONL"])
@pytest.mark.parametrize("folder", [False, True])
def test_rows_are_documents(name: str, folder: bool, tmp_path: Path) -> None:
    texts = [f"row {number} ü\n" for number in range(40)]
    if name.isupper():
        write_rows(tmp_path / name.lower(), texts)
        (tmp_path / name.lower()).rename(tmp_path / name)
    else:
        write_rows(tmp_path / name, texts)
    corpus = text_source(tmp_path if folder else tmp_path / name, 0.3)
    train, validation = documents(corpus.train), documents(corpus.validation)
    assert sorted(train + validation) == sorted(text.encode() for text in texts)
    assert train == [text.encode() for text in texts if text.encode() in train]
    assert (corpus.facts["files"], corpus.facts["documents"]) == (1, 40)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_rows_keep_their_split_when_more_follow(name: str, tmp_path: Path) -> None:
    texts = [f"row {number}" for number in range(60)]
    write_rows(tmp_path / name, texts[:40], key="body")
    before = text_source(tmp_path / name, 0.3, text_key="body")
    write_rows(tmp_path / name, texts, key="body")
    after = text_source(tmp_path / name, 0.3, text_key="body")
    assert set(documents(before.validation)) <= set(documents(after.validation))
    assert set(documents(before.train)) <= set(documents(after.train))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_rows_that_cannot_be_used_are_counted(name: str, tmp_path: Path) -> None:
    write_rows(tmp_path / name, [f"row {number}" for number in range(40)] + [None, "", "zero \0 inside"])
    if name == "rows.jsonl":
        with (tmp_path / name).open("a") as lines:
            lines.write('{"text": "half a pair \\ud800"}\n')
    corpus = text_source(tmp_path / name, 0.3)
    assert corpus.facts["skipped_rows"] == (3 if name == "rows.jsonl" else 2)
    assert corpus.facts["documents"] == 40


def test_files_that_are_not_text_are_counted(tmp_path: Path) -> None:
    contents = write_files(tmp_path)
    (tmp_path / "latin.txt").write_bytes("ü".encode("latin-1"))
    (tmp_path / "zero.bin").write_bytes(b"text\0text")
    corpus = text_source(tmp_path, 0.3)
    assert corpus.facts["skipped_files"] == 2
    assert text_of(corpus) == set(contents.values())


def test_folder_mixes_kinds(tmp_path: Path) -> None:
    contents = write_files(tmp_path, count=20)
    write_rows(tmp_path / "a.jsonl", [f"line {number}" for number in range(20)])
    write_rows(tmp_path / "sub" / "b.parquet", [f"row {number}" for number in range(20)])
    corpus = text_source(tmp_path, 0.3)
    assert (corpus.facts["files"], corpus.facts["documents"]) == (22, 60)
    assert set(contents.values()) | {b"line 0", b"row 19"} < text_of(corpus)


def test_missing_and_empty_paths_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data path '.*nowhere' does not exist: expected a file or a folder"):
        text_source(tmp_path / "nowhere", 0.3)
    with pytest.raises(ValueError, match="data path '' does not exist"):
        text_source("", 0.3)
    with pytest.raises(ValueError, match="holds no files: expected text"):
        text_source(tmp_path, 0.3)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"train split empty .*'documents': 0.*expected UTF-8 text"):
        text_source(tmp_path, 0.3)
    (tmp_path / "zero.bin").write_bytes(b"\0")
    with pytest.raises(ValueError, match=r"train split empty .*'skipped_files': 1.*expected UTF-8 text"):
        text_source(tmp_path, 0.3)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', r"rows\.jsonl:2 is not valid JSON"),
        (b'{"text": "\xff"}', r"rows\.jsonl:2 is not valid JSON"),
        ('["text"]', r"rows\.jsonl:2 holds a list: expected an object with the key 'text'"),
        ('{"body": "a"}', r"rows\.jsonl:2 holds \['body'\]: expected an object with the key 'text'"),
        ('{"text": 3}', r"rows\.jsonl:2 holds a int at 'text': expected a string"),
    ],
)
def test_bad_json_lines_are_errors(line: str | bytes, message: str, tmp_path: Path) -> None:
    line = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=message):
        text_source(tmp_path, 0.3)


def test_bad_parquet_files_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_rows(path, ["a"], key="body")
    with pytest.raises(ValueError, match=r"parquet has the columns .*'body': 'string'.*expected strings in 'text'"):
        text_source(path, 0.3)
    with pytest.raises(ValueError, match=r"'id': 'int64'.*expected strings in 'id'"):
        text_source(path, 0.3, text_key="id")
    path.write_bytes(b"not parquet")
    with pytest.raises(ValueError, match=r"rows.parquet cannot be read as parquet"):
        text_source(path, 0.3)


def test_a_split_without_documents_is_an_error(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", ["a"])
    messages = []
    for fraction in (1e-6, 1 - 1e-6):
        with pytest.raises(ValueError, match=r"split empty .*'documents': 1.*expected .* many documents") as error:
            text_source(tmp_path, fraction)
        messages.append(str(error.value))
    assert "leaves the validation split empty" in messages[0]
    assert "leaves the train split empty" in messages[1]


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 5, float("nan")])
def test_fraction_out_of_range_is_an_error(fraction: float, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("text" * 100)
    with pytest.raises(ValueError, match=f"validation_fraction is {fraction}: expected a number between 0 and 1"):
        text_source(tmp_path / "book.txt", fraction)
    with pytest.raises(ValueError, match=f"validation_fraction is {fraction}"):
        stdlib_source(fraction)


def test_microbatch_is_contiguous_text_with_shifted_targets() -> None:
    tokens = np.arange(97, dtype=np.uint8)
    data = batches(tokens)
    starts = set()
    for step in range(data.num_chunks // 3):
        for index in range(3):
            batch = data.microbatch(step, index)
            start = int(batch[0, 0])
            assert batch.dtype == torch.int64
            assert batch.tolist() == [list(range(start, start + 5)), list(range(start + 4, start + 9))]
            starts.add(start)
    assert starts == set(range(0, 96, 8))


def test_last_chunk_needs_the_target_of_its_last_token() -> None:
    assert batches(np.zeros(97, np.uint8)).num_chunks == 12
    assert batches(np.zeros(96, np.uint8)).num_chunks == 11


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 6), st.integers(0, 400), st.integers(0, 2**40))
def test_every_epoch_visits_every_chunk_once(length: int, rows: int, microbatches: int, extra: int, seed: int) -> None:
    tokens = np.arange(length * rows * microbatches + 1 + extra)
    sizes = {"sequence_length": length, "microbatch_sequences": rows, "microbatches": microbatches, "seed": seed}
    data = Batches(tokens, **sizes)
    starts = []
    for position in range(2 * data.num_chunks):
        batch = data.microbatch(*divmod(position, microbatches))
        assert batch.shape == (rows, length + 1)
        assert torch.equal(batch[:, 1:], batch[:, :-1] + 1)
        assert torch.equal(batch[:, :-1].flatten(), torch.arange(length * rows) + batch[0, 0])
        starts.append(int(batch[0, 0]))
    chunks = list(range(0, data.num_chunks * length * rows, length * rows))
    assert sorted(starts[: data.num_chunks]) == sorted(starts[data.num_chunks :]) == chunks


def test_a_step_has_the_same_tokens_however_many_microbatches_it_has() -> None:
    tokens = np.arange(50 * 8 + 1)
    whole = batches(tokens, microbatches=1, microbatch_sequences=8, chunk_sequences=2)
    for parts in (2, 4):
        split = batches(tokens, microbatches=parts, microbatch_sequences=8 // parts, chunk_sequences=2)
        # a step is 4 of 50 chunks: step 12 reaches into the second epoch
        for step in range(25):
            joined = torch.cat([split.microbatch(step, index) for index in range(parts)])
            assert torch.equal(joined, whole.microbatch(step, 0))
    # without chunks of their own they are other tokens
    other = batches(tokens, microbatches=4, microbatch_sequences=2)
    coarse = batches(tokens, microbatches=1, microbatch_sequences=8)
    assert torch.equal(other.microbatch(0, 0), whole.microbatch(0, 0)[:2])
    assert not torch.equal(coarse.microbatch(0, 0), whole.microbatch(0, 0))


def test_a_microbatch_is_a_whole_number_of_chunks() -> None:
    with pytest.raises(ValueError, match=r"microbatch of 8 sequences is no whole number of chunks: .* got 3"):
        batches(np.arange(401), microbatches=1, microbatch_sequences=8, chunk_sequences=3)


def test_order_depends_on_seed_and_position_only() -> None:
    tokens = np.arange(50 * 8 + 1)
    data = batches(tokens)
    positions = [(step, index) for step in range(60) for index in range(3)]
    forward = [data.microbatch(*position) for position in positions]
    # another object, asked backwards, as if another rank had come there
    other = batches(tokens)
    backward = [other.microbatch(*position) for position in reversed(positions)]
    assert all(torch.equal(a, b) for a, b in zip(forward, reversed(backward), strict=True))
    # the same stream of chunks when a step has another number of microbatches
    single = batches(tokens, microbatches=1)
    assert all(torch.equal(batch, single.microbatch(place, 0)) for place, batch in enumerate(forward))


def test_order_differs_between_seeds_and_epochs() -> None:
    tokens = np.arange(50 * 8 + 1)

    def order(seed: int, epoch: int) -> list[int]:
        data = batches(tokens, seed=seed, microbatches=50)
        return [int(data.microbatch(epoch, index)[0, 0]) for index in range(50)]

    orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert all(a != b for place, a in enumerate(orders) for b in orders[:place])
    assert order(0, 0) != sorted(order(0, 0))


def test_too_few_tokens_for_a_step_is_an_error() -> None:
    assert batches(np.zeros(25, np.uint8)).num_chunks == 3
    with pytest.raises(ValueError, match="train split has 24 tokens: expected at least 25, what one optimizer step"):
        batches(np.zeros(24, np.uint8))
    with pytest.raises(ValueError, match="train split has 0 tokens"):
        batches(np.zeros(0, np.uint8))


@pytest.mark.parametrize(("step", "index"), [(-1, 0), (0, -1), (0, 3)])
def test_positions_out_of_range_are_errors(step: int, index: int) -> None:
    data = batches(np.zeros(100, np.uint8))
    assert data.microbatch(4, 2).shape == (2, 5)
    with pytest.raises(IndexError, match=f"is {step if index == 0 else index}: expected 0"):
        data.microbatch(step, index)


@pytest.mark.parametrize("name", ["sequence_length", "microbatch_sequences", "microbatches"])
@pytest.mark.parametrize("size", [0, -1, 1.5])
def test_sizes_below_one_are_errors(name: str, size: int) -> None:
    with pytest.raises(ValueError, match=f"{name} is {size}: expected an integer of at least 1"):
        batches(np.zeros(100, np.uint8), **{name: size})


def test_negative_seed_is_an_error() -> None:
    with pytest.raises(ValueError, match="seed is -1: expected 0 or more"):
        batches(np.zeros(100, np.uint8), seed=-1)


@pytest.mark.parametrize(("num_tokens", "asked", "given_count"), [(101, 5, 5), (101, 99, 25), (5, 3, 1), (9, 2, 2)])
def test_validation_sequences_are_spread_and_do_not_overlap(num_tokens: int, asked: int, given_count: int) -> None:
    rows = validation_sequences(np.arange(num_tokens), sequence_length=4, num_sequences=asked)
    assert rows.shape == (given_count, 5)
    assert rows.dtype == torch.int64
    starts = rows[:, 0]
    assert torch.equal(rows, starts[:, None] + torch.arange(5))
    gaps = starts.diff()
    assert starts[0] == 0
    assert (gaps >= 4).all()
    if given_count > 1:
        assert rows[-1, -1] == num_tokens - 1
        assert gaps.max() - gaps.min() <= 1


def test_validation_sequences_reject_bad_sizes() -> None:
    with pytest.raises(ValueError, match="validation split has 4 tokens: expected at least 5"):
        validation_sequences(np.zeros(4, np.uint8), sequence_length=4, num_sequences=1)
    with pytest.raises(ValueError, match="num_sequences is 0"):
        validation_sequences(np.zeros(9, np.uint8), sequence_length=4, num_sequences=0)
    with pytest.raises(ValueError, match="sequence_length is 0"):
        validation_sequences(np.zeros(9, np.uint8), sequence_length=0, num_sequences=1)


def compose(name: str, *overrides: str) -> DictConfig:
    with hydra.initialize_config_module("equipoise.configs", version_base="1.3"):
        return hydra.compose(config_name=f"data/{name}", overrides=list(overrides))


def test_stdlib_config_gives_the_default_data(stdlib: Corpus) -> None:
    config = compose("stdlib").data
    corpus = hydra.utils.instantiate(config.source)
    assert corpus.facts == stdlib.facts
    sizes = {name: config[name] for name in ("sequence_length", "microbatch_sequences", "microbatches")}
    assert Batches(corpus.train, **sizes, seed=0).microbatch(0, 0).shape == (2, 129)
    rows = validation_sequences(
        corpus.validation, sequence_length=config.sequence_length, num_sequences=config.validation_sequences
    )
    assert rows.shape == (128, 129)


def test_text_config_differs_only_in_its_source(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("some text " * 100)
    config = compose("text", f"data.path={tmp_path}/book.txt", "data.validation_fraction=0.2").data
    corpus = hydra.utils.instantiate(config.source)
    assert corpus.facts["path"] == f"{tmp_path}/book.txt"
    assert 150 <= corpus.facts["val_tokens"] <= 260
    inherited = compose("stdlib").data
    assert set(config) - set(inherited) == {"path"}
    assert [key for key in inherited if config[key] != inherited[key]] == ["source", "validation_fraction"]


def test_text_config_needs_a_path() -> None:
    with pytest.raises(MissingMandatoryValue, match="path"):
        OmegaConf.to_container(compose("text").data, throw_on_missing=True)
