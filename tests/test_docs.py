"""The how-to pages: their commands run, their examples hold, their links lead somewhere, and they name what there is.

Pages are run in the order of the index in ``docs/README.md``, in one folder. What a block's fence means stands there.
"""

import contextlib
import doctest
import io
import itertools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from equipoise.experiments import launch, train
from equipoise.experiments.replay import command as replay_command
from equipoise.experiments.replay.plan import check
from equipoise.experiments.report.command import main as report
from equipoise.experiments.sweep.jobs import prepare
from equipoise.experiments.tracker import wandb_scalars

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
PAGES = [name for name in re.findall(r"^\| \[.*?\]\((.*?)\)", TEXTS["README.md"], re.MULTILINE) if name != "log.md"]
EXPERIMENTS = sorted((ROOT / "configs" / "experiment").glob("*.yaml"))
# added to a command that trains, where it says nothing else
SMALL = (
    *("optim.steps=2", "optim.warmup=1", "validation.every=1", "data.validation_sequences=2", "model.num_layers=1"),
    "parallel.ranks=1",
)
SMALL_REPLAY = ("steps=2", "tokens=256", "num_experts=8", "top_k=2", "ranks=[1,2]", "seeds=[0]", "processes=1")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the rule behind it (``compose``, ``elsewhere`` or nothing) and its text."""

    language: str
    rule: str
    text: str

    @property
    def path(self) -> str | None:
        """The file that a first line ``# path`` names."""
        named = re.match(r"# (\S+\.(?:py|yaml))\n", self.text)
        return named[1] if named else None


@dataclass(frozen=True)
class Result:
    """What a command came to."""

    command: str
    expected: int
    status: int
    output: str


def blocks(page: str) -> list[Block]:
    return [
        Block(*found) for found in re.findall(r"^```(\w+) ?(\w*)\n(.*?)^```$", TEXTS[page], re.MULTILINE | re.DOTALL)
    ]


def commands(block: Block) -> Iterator[tuple[str, int]]:
    """Each command and the exit status that it should have."""
    for line in block.text.splitlines():
        command, _, status = line.partition("  # exit status ")
        yield command, int(status or 0)


def first(word: str, number: int = 1) -> str:
    """A word of the command line; of an override that sweeps, the first values."""
    if word.startswith("-") or "=" not in word:
        return word
    override = OverridesParser.create().parse_override(word)
    if not override.is_sweep_override():
        return word
    return f"{override.get_key_element()}={','.join(itertools.islice(override.sweep_string_iterator(), number))}"


def first_job(words: Iterable[str]) -> list[str]:
    """Overrides that compose the first job of a sweep, also of one that an experiment makes."""
    words = [first(word) for word in words if word != "-m"]
    given = dict(word.partition("=")[::2] for word in words)
    preset = ROOT / "configs" / "experiment" / f"{given.get('experiment')}.yaml"
    swept = yaml.safe_load(preset.read_text())["hydra"]["sweeper"]["params"] if preset.exists() else {}
    return [*words, *(f"{key}={str(values).split(',')[0]}" for key, values in swept.items() if key not in given)]


def made_small(command: str) -> str:
    """The command as the test runs it: the scripts of this checkout; a training of few steps, jobs and layers."""
    words = shlex.split(command)
    if words[0].startswith("scripts/"):
        return f"{ROOT}/{command}"
    if "equipoise" not in words or words[words.index("equipoise") + 1] in launch.SUBCOMMANDS:
        return command
    if "dry_run=true" in words:
        return command
    words = [first(word, 2 if word.startswith("balancer=") else 1) for word in words]
    keys = {word.partition("=")[0] for word in words}
    return shlex.join([*words, *(small for small in SMALL if small.partition("=")[0] not in keys)])


class Workshop:
    """The folder in which the pages are run, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results: dict[str, list[Result]] = {}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        # where W&B looks for keys, and finds none
        keys = {"NETRC": str(folder / "netrc"), "WANDB_CONFIG_DIR": str(folder / "config")}
        self.changes = {"PATH": path, "OMP_NUM_THREADS": "1", **keys}

    def go_through(self, page: str) -> None:
        self.results[page] = []
        for block in blocks(page):
            if block.path:
                path = self.folder / block.path
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text, encoding="utf-8")
            elif block.language == "python" and ">>>" not in block.text:
                self.results[page].append(self._here(block.text, 0, partial(exec, block.text, {})))
            elif block.language == "sh" and block.rule != "elsewhere":
                self.results[page] += [self._try(block, *command) for command in commands(block)]

    def _try(self, block: Block, command: str, expected: int) -> Result:
        words = shlex.split(command)
        if words[0] == "equipoise-replay":
            return self._here(command, expected, partial(replay, words[1:], run=block.rule != "compose"))
        if words[0] == "equipoise-report":
            return self._here(command, expected, partial(report, words[1:]))
        # what comes after the command and the variables before it
        arguments = words[words.index("equipoise") + 1 :] if "equipoise" in words else []
        if block.rule == "compose":
            return self._here(command, expected, partial(compose, first_job(arguments)))
        # what trains nothing does not wait for another import of torch
        if arguments and arguments[0] not in launch.SUBCOMMANDS and ("launch=false" in arguments or expected):
            small = shlex.split(made_small(command))
            return self._here(command, expected, partial(call, small[small.index("equipoise") + 1 :]))
        return self._run(command, expected)

    def _run(self, command: str, expected: int) -> Result:
        # globs, assignments and pipes are for the shell
        arguments = ["bash", "-c", made_small(command)]
        with self._environment():
            done = subprocess.run(arguments, cwd=self.folder, capture_output=True, text=True, check=False)
        return Result(command, expected, done.returncode, done.stdout + done.stderr)

    @contextlib.contextmanager
    def _environment(self) -> Iterator[pytest.MonkeyPatch]:
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("WANDB_") or name == "RANK"]:
                patch.delenv(name)
            for name, value in self.changes.items():
                patch.setenv(name, value)
            yield patch

    def _here(self, command: str, expected: int, action: Callable[[], int | None]) -> Result:
        """Do something in this process, in the folder."""
        shown = io.StringIO()
        with self._environment() as patch, contextlib.ExitStack() as stack:
            patch.chdir(self.folder)
            patch.syspath_prepend(str(self.folder))
            for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr):
                stack.enter_context(redirect(shown))
            try:
                status = action() or 0
            except Exception as error:
                print(f"{type(error).__name__}: {error}")
                status = 1
        return Result(command, expected, status, shown.getvalue())


def call(arguments: list[str]) -> int:
    """The command ``equipoise`` in this process."""
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["equipoise", *arguments])
        try:
            return launch.main()
        finally:
            signal.signal(signal.SIGTERM, handler)


def replay(arguments: list[str], *, run: bool) -> int:
    """The command ``equipoise-replay`` in this process, on small batches; not ``run``, it is composed and checked."""
    keys = {word.partition("=")[0] for word in arguments}
    small = [word for word in SMALL_REPLAY if word.partition("=")[0] not in keys]
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["equipoise-replay", *arguments, *small])
        try:
            return replay_command.main() if run else int(not check(replay_command.compose()))
        finally:
            signal.signal(signal.SIGTERM, handler)


def compose(arguments: list[str]) -> int:
    """Compose one job and check it as the launcher does before it trains; wrong ones print why, or raise it."""
    with contextlib.redirect_stdout(io.StringIO()) as config:
        status = call(["--cfg", "job", "--resolve", *arguments, "launch=false"])
    if status == 0:
        prepare(1, yaml.safe_load(config.getvalue()), train)
    return status


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    place = Workshop(tmp_path_factory.mktemp("workshop"))
    for page in PAGES:
        place.go_through(page)
    return place


@pytest.mark.parametrize("page", PAGES)
def test_commands(page: str, workshop: Workshop) -> None:
    if page == "add-a-kernel.md":
        pytest.importorskip("triton")
    for result in workshop.results[page]:
        assert result.status == result.expected, f"{result.command}\n{result.output[-3000:]}"


def test_messages_that_the_pages_quote(workshop: Workshop) -> None:
    """A refusal is the one that the page speaks of."""
    for page, command, message in (
        ("run-a-sweep.md", "model.top_k=32", "top_k=32 and num_experts=32"),
        ("run-a-sweep.md", "tracker=online", "no W&B key"),
        ("run-a-sweep.md", "wandb sync runs", "No API key configured"),
        ("read-the-report.md", "equipoise-report runs/mine", "optim.learning_rate: "),
        ("use-your-own-data.md", "no/such/folder", "does not exist"),
        ("use-your-own-data.md", "path=corpus/topics.parquet", "expected strings in 'text' (text_key)"),
        ("use-your-own-data.md", "microbatch_sequences=3", "is no whole number of chunks"),
        ("use-your-own-data.md", "sequence_length=100000", "the train split has"),
    ):
        refused = [result for result in workshop.results[page] if command in result.command and result.expected]
        assert any(message in result.output for result in refused), (command, refused)


def test_a_dry_run_leaves_nothing(workshop: Workshop) -> None:
    assert any("name=large dry_run=true" in result.command for result in workshop.results["scale-out.md"])
    assert not (workshop.folder / "runs" / "large").exists()


def test_blocks_are_of_known_kinds() -> None:
    for page in PAGES:
        found = blocks(page)
        assert len(found) == len(re.findall("^```.+", TEXTS[page], re.MULTILINE)), page
        assert {(block.language, block.rule) for block in found} <= {
            *(("sh", rule) for rule in ("", "compose", "elsewhere")),
            *((language, "") for language in ("python", "yaml")),
        }
        assert all(block.path for block in found if block.language == "yaml")


def test_what_is_not_run_names_files_that_exist() -> None:
    text = "\n".join(block.text for page in PAGES for block in blocks(page) if block.rule == "elsewhere")
    assert text
    for name in re.findall(r"\b(?:scripts|tests|docs|bench)/[\w./-]+", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"-m (equipoise[\w.]*)", text):
        assert find_spec(name), name


@pytest.mark.parametrize("page", ["README.md", *PAGES])
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\((?!https?://)(.*?)\)", TEXTS[page]):
        name, _, anchor = target.partition("#")
        path = (DOCS / name).resolve() if name else DOCS / page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings], (
                target
            )


def test_files_that_the_pages_name_exist() -> None:
    for page in PAGES:
        for name in re.findall(
            r"`((?:balancers|bench|configs|docs|experiments|kernels|scripts|tests)/[\w./]+)`", TEXTS[page]
        ):
            assert "my_" in name or (ROOT / name).exists(), f"{page}: {name}"


def test_the_index_has_every_page() -> None:
    assert sorted(["README.md", "log.md", *PAGES]) == list(TEXTS)


def test_examples_of_the_glossary() -> None:
    space: dict[str, Any] = {}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for block in blocks("glossary.md"):
        test = doctest.DocTestParser().get_doctest(block.text, space, "glossary.md", None, 0)
        runner.run(test, clear_globs=False)
        space = test.globs
    assert runner.failures == 0
    assert runner.tries > 40


def test_the_glossary_has_every_metric(workshop: Workshop) -> None:
    (run,) = (workshop.folder / "runs" / "mine").glob("eqb-s0-*")
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    shown = {re.sub(r"/\d+$", "/P", re.sub(r"/\d+/", "/NN/", key)) for key in wandb_scalars(row, "full")}
    columns = set(pd.read_csv(run.parent / "report" / "table.csv").columns)
    intervals = {re.sub(r"^d_\w+_(low|high|n|real)$", r"d_..._\1", column) for column in columns}
    names = {*row, *shown, *intervals, *json.loads((run / "summary.json").read_text())}
    names |= {*pq.ParquetDataset(run / "load.parquet").schema.names}
    assert len(names) > 50
    assert not [name for name in sorted(names) if f"`{name}`" not in TEXTS["glossary.md"]]


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_is_named_with_its_jobs(path: Path) -> None:
    preset = yaml.safe_load(path.read_text(encoding="utf-8"))
    swept = {key: len(str(values).split(",")) for key, values in preset["hydra"]["sweeper"]["params"].items()}
    others = math.prod(number for key, number in swept.items() if not key.startswith("balancer"))
    jobs = math.prod(swept.values()) + len(preset.get("beside", [])) * others
    assert re.search(rf"^\| `{path.stem}` \|.*\| {jobs} \|$", TEXTS["run-a-sweep.md"], re.MULTILINE), jobs


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "parallel").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_layout_is_named(path: Path) -> None:
    assert f"`parallel={path.stem}`" in TEXTS["scale-out.md"]
