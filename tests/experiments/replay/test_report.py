"""The page of a replay and the files beside it."""

import importlib.util
import io
import re
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from equipoise.experiments.replay import report
from equipoise.experiments.replay.answers import QUESTIONS, Facts
from equipoise.experiments.replay.table import COLUMNS
from equipoise.experiments.report import plots

PICTURES = ["costs", "error_by_bytes", "error_by_step", "error_to_noise", "fallback", "maxvio_by_step"]
PICTURES += ["rank_averaging", "spread"]
STREAMS = {"plain": {"rank_skew": 0.0}, "rank_skew": {"rank_skew": 0.5}}
VOID = {"meta", "link", "img", "br"}


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fake = load(Path(__file__).with_name("fake_steps.py"))
chromium = load(Path(__file__).parents[1] / "report" / "chromium.py")
ESTIMATORS = ["rank_averaged_qb", "histogram_500", "eqb", "eqb_cut"]


class Page(HTMLParser):
    """The tags that are open at the end, the tables as rows of text, and what each cell is sorted by."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


def write_small(folder: Path, **changes: Any) -> Path:
    frame = fake.fake_steps(list(STREAMS), ESTIMATORS, [1, 8], seeds=3, steps=9, layers=1)
    frame["stream"] = frame["stream"].replace("plain", "<plain> & $x$")
    streams = {"<plain> & $x$": STREAMS["plain"], "rank_skew": STREAMS["rank_skew"]}
    return fake.write_result(folder, frame, streams=streams, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_small(tmp_path_factory.mktemp("runs") / "bench")
    with pytest.MonkeyPatch.context() as patch:
        # the numbers of pixels are not what is tested
        patch.setattr(plots, "DPI", 30)
        assert report.write_report(folder) == folder / "report" / "index.html"
    return folder


@pytest.fixture(scope="module")
def text(folder: Path) -> str:
    return (folder / "report" / "index.html").read_text(encoding="utf-8")


def test_files(folder: Path) -> None:
    pictures = {f"{name}.{kind}" for name in PICTURES for kind in ("png", "svg")}
    found = {path.name for path in (folder / "report").iterdir()}
    assert found == {*pictures, "table.csv", "table.md", "index.html"}
    table = pd.read_csv(folder / "report" / "table.csv")
    assert len(table) == 2 * len(ESTIMATORS) * 2
    assert {column.key for column in COLUMNS} <= set(table)


def test_page_is_one_file_that_asks_for_nothing(text: str) -> None:
    page = Page(text)
    assert not page.open
    policy = next(own["content"] for tag, own in page.tags if own.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert "default-src 'none'" in policy
    for tag, own in page.tags:
        for value in (own.get("src"), own.get("href") if tag == "link" else None):
            assert value is None or value.startswith("data:")
    assert not re.search(r"https?:|@import|fetch\(", text)
    # every picture once, and none of them needs a script
    assert text.count("data:image/png;base64,iVBOR") == len(PICTURES)


def test_page_answers_every_question(folder: Path, text: str) -> None:
    frame = report.read_steps(folder)
    facts = Facts(num_experts=64, skewed=["rank_skew"])
    plain = text.replace("&lt;", "<").replace("&amp;", "&").replace("&gt;", ">")
    for question in QUESTIONS:
        assert question.answer(frame, facts) in plain
        assert f'<section id="{question.key}">' in text
        assert f'href="#{question.key}"' in text
    assert "0.00606 and 0.0131 (eqb: 0.00101) with skew on rank_skew" in text
    assert "steps 4 to 9" in text
    for column in COLUMNS:
        assert f"<dt>{column.heading}</dt><dd>{column.meaning}</dd>" in plain


def test_names_are_escaped(text: str) -> None:
    assert "<plain>" not in text
    assert "&lt;plain&gt; &amp; $x$" in text


def test_tables_hold_the_means(text: str) -> None:
    ratios, candidates, summary, main, everything = Page(text).tables
    assert [row[0] for row in ratios[1:]] == [row[0] for row in summary[1:]] == ESTIMATORS
    assert ratios[1][1:] == ["0.586", "1.31"]
    assert [row[:2] for row in candidates[1:]] == [["eqb_cut", "<plain> & $x$"], ["eqb_cut", "rank_skew"]]
    assert len(main) == 1 + 2 * len(ESTIMATORS)
    assert len(everything) == 1 + 2 * 2 * len(ESTIMATORS)
    row = dict(zip(main[0], next(row for row in main if row[:2] == ["eqb", "rank_skew"]), strict=True))
    assert row["error, mean"] == "0.001010 ± 0.000010"
    assert row["bytes"] == "131,072"
    assert row["ms"] == "4.4 [4, 4.8]"
    assert row["fallback"] == "-"
    assert "ranks" not in row
    assert "ranks" in everything[0]


def test_a_failure_leaves_the_old_report_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_small(tmp_path / "bench")
    old = folder / "report" / "table.csv"
    old.parent.mkdir()
    old.write_text("old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(report, "draw_all", fail)
    with pytest.raises(OSError, match="disk full"):
        report.write_report(folder)
    assert [path.name for path in old.parent.iterdir()] == ["table.csv"]
    assert old.read_text() == "old"


@pytest.mark.parametrize("name", ["steps.parquet", "config.yaml"])
def test_what_is_missing_is_named(tmp_path: Path, name: str) -> None:
    folder = write_small(tmp_path / "bench")
    (folder / name).unlink()
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        report.write_report(folder)
    assert not (folder / "report").exists()


def test_summary_in_the_terminal(folder: Path) -> None:
    console = Console(file=io.StringIO(), width=120)
    report.print_summary(folder, console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    rows = [line.split() for line in printed.split(QUESTIONS[0].text)[0].splitlines()]
    assert next(row for row in rows if row[:1] == ["eqb"])[1:] == ["0.1", "0.21", "0", "131,072", "50,000", "4.4", "-"]
    assert max(len(line.rstrip()) for line in printed.splitlines()) <= 120
    for question in QUESTIONS:
        assert question.text in printed
    assert "warning" not in printed


def test_facts_come_from_the_config() -> None:
    streams = {"even": {"rank_skew": 0.0, "microbatch_skew": 0.0}, "domain": {"domain_share": 0.1}}
    facts = report.facts_of({"mode": "frozen", "num_experts": 64, "streams": streams})
    assert facts == Facts(frozen=True, num_experts=64, skewed=["domain"])
    captured = report.facts_of({"mode": "online", "num_experts": 64, "streams": {"run": {"folder": "runs/x"}}})
    assert captured == Facts(frozen=False, num_experts=None, skewed=[])


def test_warnings_name_what_is_missing() -> None:
    frame = fake.fake_steps(["plain"], ["eqb", "eqb_cut"], [1, 8], seeds=2, steps=3, layers=1)
    lost = (frame["estimator"] == "eqb_cut") & (frame["seed"] == 1) & (frame["ranks"] == 8)
    config = {"streams": {"plain": {}, "drift": {}}, "estimators": {"eqb": {}, "eqb_cut": {}, "mine": {}}}
    assert report.warnings(frame[~lost], config) == [
        "fewer than 3 seeds, which say little of the spread over seeds: plain (2)",
        "eqb_cut: 3 of 4 runs are there",
        "mine: 0 of 4 runs are there",
        "stream drift missing",
    ]
    assert report.warnings(fake.fake_steps(["plain"], ["eqb"], [1], steps=3), {}) == []


@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")
def test_one_run_of_one_step_has_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sketch(figure: Figure, path: Path, **_: object) -> None:
        if path.suffix == ".png":
            figure.draw_without_rendering()
        path.write_bytes(b"picture")

    monkeypatch.setattr(Figure, "savefig", sketch)
    frame = fake.fake_steps(["plain"], ["eqb"], [1], seeds=1, steps=1, layers=1).assign(error_mean=0.0, maxvio_next=0.0)
    folder = fake.write_result(tmp_path / "bench", frame, mode="frozen")
    text = report.write_report(folder).read_text(encoding="utf-8")
    assert "Cannot be told: one partition" in text
    assert "one batch a stream again and again" in text
    # its bias moved in the only step
    assert Page(text).tables[1] == [["estimator", "plain"], ["eqb", "moves"]]
    assert not (folder / "report" / "fallback.png").exists()


@pytest.mark.skipif(chromium.find() is None, reason="needs Chromium")
def test_page_in_a_browser(folder: Path, tmp_path: Path) -> None:
    executable = chromium.find()
    assert executable
    url = (folder / "report" / "index.html").as_uri()
    with chromium.Browser(executable, tmp_path / "profile") as browser:
        browser.show(390)
        browser.load(url)
        assert browser.run("document.documentElement.scrollWidth") == 390
        column = (
            "[...document.querySelectorAll('#table table')[1].tBodies[0].rows].map((row) => row.cells[2].dataset.sort)"
        )
        browser.run("document.querySelectorAll('#table table')[1].tHead.rows[0].cells[2].firstChild.click()")
        errors = [float(value) for value in browser.run(column)]
        assert errors == sorted(errors)
        assert len(set(errors)) > 2
        requests = {event["request"]["url"] for event in browser.named("Network.requestWillBeSent")}
        assert {own for own in requests if not own.startswith("data:")} == {url}
        assert not browser.named("Runtime.exceptionThrown")
        assert not browser.named("Log.entryAdded")
