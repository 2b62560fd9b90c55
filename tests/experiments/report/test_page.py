"""The page of the report: what it holds, and what a browser makes of it."""

import base64
import dataclasses
import doctest
import importlib.util
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest

from equipoise.experiments.report import command as report
from equipoise.experiments.report import interactive, page, plots, tables
from equipoise.experiments.report.comparison import Row, group_rows
from equipoise.experiments.report.reading import load_runs

START = 9
CURVES = ["global_maxvio", "local_maxvio", "loss", "val_bpb"]


class Elements(HTMLParser):
    """Every start tag with its attributes, and the text of the scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def text(drawn: report.Report) -> str:
    return drawn.page.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def data(text: str) -> dict[str, Any]:
    return json.loads(data_script(text))


def data_script(text: str) -> str:
    elements = Elements(text)
    scripts = [attributes for tag, attributes in elements.tags if tag == "script"]
    return elements.scripts[[attributes.get("id") for attributes in scripts].index("data")]


@pytest.mark.parametrize("module", [page, interactive, plots], ids=lambda module: module.__name__)
def test_doctests(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def complete(drawn: report.Report, data: dict[str, Any]) -> list[tuple[Row, dict[str, Any]]]:
    """The rows that the plots show, and what the page holds of them."""
    return list(zip([row for row in drawn.rows if row.complete], data["rows"], strict=True))


def test_curves_are_those_of_the_runs(drawn: report.Report, data: dict[str, Any]) -> None:
    for row, own in complete(drawn, data):
        assert own["label"] == row.label
        for key in CURVES:
            seeds = pd.concat([run.metrics.set_index("step")[key] for run in row.complete], axis=1).dropna()
            curve = own["curves"][key]
            assert curve["step"] == seeds.index.tolist()
            assert curve["tokens"] == [4096 * step for step in curve["step"]]
            for name, values in (("mean", seeds.mean(axis=1)), ("low", seeds.min(axis=1)), ("high", seeds.max(axis=1))):
                np.testing.assert_allclose(curve[name], values, rtol=1e-4)


def test_tails_and_devices_are_those_of_the_runs(drawn: report.Report, data: dict[str, Any]) -> None:
    assert data["tail"] == {"steps": [START, 12], "tokens": [4096 * (START - 1), 4096 * 12]}
    assert data["last_token"] == 4096 * 12
    record = drawn.table.set_index("balancer").loc["eqb"]
    row, own = next((row, own) for row, own in complete(drawn, data) if row.label == "eqb")
    for key in ("global_maxvio", "val_bpb"):
        assert own["tail"][key]["mean"] == pytest.approx(record[key], rel=1e-4)
        assert own["tail"][key]["std"] == pytest.approx(record[f"{key}_std"], rel=1e-4)
        assert len(own["tail"][key]["seeds"]) == 3
    seeds = [np.mean(run.devices[4][START - 1 :]) for run in row.complete]
    np.testing.assert_allclose(own["devices"]["4"], [np.mean(seeds), min(seeds), max(seeds)], rtol=1e-4)
    assert list(own["devices"]) == ["2", "4"]


def test_loads_and_biases_are_those_of_the_run(drawn: report.Report, data: dict[str, Any]) -> None:
    for row, own in complete(drawn, data):
        frame = pd.read_parquet(row.complete[0].folder / "load.parquet")
        for layer in own["experts"]["layers"]:
            table = frame[frame["layer"] == layer["layer"]].pivot(index="expert", columns="step")
            load = table["count"] / table["count"].mean()
            assert layer["order"] == load.loc[:, START:].mean(axis=1).sort_values(ascending=False).index.tolist()
            levels = np.frombuffer(base64.b64decode(layer["load"]), np.uint8).reshape(8, 12)
            expected = np.log2(load.clip(1 / 4, 4)).to_numpy()
            np.testing.assert_allclose(levels / interactive.LOAD_LEVELS * 4 - 2, expected, atol=0.0081)
            check_bias(layer["bias"], table["bias"].to_numpy())


def check_bias(own: dict[str, Any] | None, expected: np.ndarray) -> None:
    if np.isnan(expected).all():
        assert own is None
        return
    assert own is not None
    levels = np.frombuffer(base64.b64decode(own["levels"]), "<u2").reshape(expected.shape)
    bias = own["low"] + levels / interactive.BIAS_LEVELS * (own["high"] - own["low"])
    np.testing.assert_allclose(bias, expected, atol=1e-5)


def test_a_long_run_of_many_layers_stays_small(fake_runs: ModuleType, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    loads = fake_runs.realistic_loads(1.0, rng, 250, 10, 16)
    loads[:, 6] = np.eye(16, dtype=int)[0] * 90 + 1
    fake_runs.write_run(tmp_path, "eqb", 0, steps=250, loads=loads, bias=fake_runs.realistic_bias(loads))
    found = interactive.page_data(group_rows(load_runs(tmp_path)), 200)
    experts = found["rows"][0]["experts"]
    assert (len(experts["layers"]), found["num_layers"], found["worst_layer"]) == (8, 10, 6)
    assert (experts["num_columns"], experts["width"], experts["last_step"][-1]) == (84, 3, 250)
    # a byte a load, two a bias, and a third more for base64
    assert len(json.dumps(experts)) < 8 * 16 * 84 * 3 * 4 / 3 * 1.1
    assert len(found["rows"][0]["curves"]["global_maxvio"]["step"]) == 250
    # never recorded
    assert found["rows"][0]["curves"]["loss"] is None


def test_it_is_one_file_that_asks_for_nothing(text: str) -> None:
    tags = Elements(text).tags
    places = [value for _, attributes in tags for key, value in attributes.items() if key in ("src", "href", "srcset")]
    assert places
    assert all(value is not None and value.startswith(("data:", "#")) for value in places)
    assert {attributes["href"] for tag, attributes in tags if tag == "a"} <= {
        f"#{attributes['id']}" for _, attributes in tags if "id" in attributes
    }
    policy = next(attributes["content"] for _, attributes in tags if "http-equiv" in attributes)
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    own = text.replace(page.get_plotlyjs(), "")
    assert "url(" not in own
    assert "http:" not in own
    assert "https:" not in own
    assert len(own) < 1_000_000


def test_without_javascript_there_are_table_and_pictures(drawn: report.Report, text: str) -> None:
    still = text[text.index("<noscript>") : text.index("</noscript>")]
    assert still.count("data:image/png;base64,iVBOR") == len(page.TWINS) == 6
    assert text.replace(page.get_plotlyjs(), "").count("data:image/png") == 6
    assert drawn.rule in text
    for row in drawn.rows:
        assert f'<th scope="row">{row.label}'.replace("<own>", "&lt;own&gt;") in text
    # a section is without JavaScript unless it holds a plot
    assert '<section id="table">' in text
    assert '<section id="configs">' in text


def test_curves_of_other_tokens_a_step_are_all_in_sight_and_not_shaded(fake_runs: ModuleType, tmp_path: Path) -> None:
    for ranks, tokens in ((1, 4096), (2, 8192)):
        changes = {"parallel.ranks": ranks, "report.axes": ["parallel"]}
        values = {"tokens": [tokens * step for step in range(1, 13)]}
        fake_runs.write_run(tmp_path, "eqb", 0, values=values, changes=changes, suffix=str(ranks))
    found = interactive.page_data(group_rows(load_runs(tmp_path)), START)
    assert found["tail"] == {"steps": [START, 12], "tokens": None}
    assert found["last_token"] == 12 * 8192


@pytest.mark.usefixtures("no_figures")
def test_a_page_without_a_common_tail_and_a_reference_in_another_block(fake_runs: ModuleType, tmp_path: Path) -> None:
    for ranks in (1, 2):
        changes = {"parallel.ranks": ranks, "report.axes": ["parallel"]}
        values = {"tokens": [ranks * step for step in range(1, 13)]}
        fake_runs.write_run(tmp_path, "eqb", 0, values=values, changes=changes, suffix=str(ranks))
    text = report.build_report(tmp_path).page.read_text(encoding="utf-8")
    assert "the tail window, steps 9 to 12, is not shaded" in text
    assert "eqb [ranks=2]: config, 1 key differs from eqb [ranks=1]" in text
    assert '<th scope="row">parallel.ranks</th><td class="text">1</td><td class="text">2</td>' in text


def test_a_number_of_another_type_and_null_are_differences() -> None:
    assert page.difference({"a": 1, "b": None}, {"a": 1.0}) == [("a", "1", "1.0"), ("b", "None", "absent")]
    assert page.shared([{"a": 1, "b": 0}, {"a": True, "b": 0}]) == {"b": 0}


def test_a_figure_that_the_page_does_not_draw_is_shown(drawn: report.Report) -> None:
    other = plots.Picture(drawn.folder / "summary.png", "title")
    (drawn.folder.parent / "other.png").write_bytes(other.path.read_bytes())
    shown = plots.Picture(drawn.folder.parent / "other.png", "Another figure")
    text = rendered(drawn, [other, shown])
    assert text.index('alt="title"') < text.index("</noscript>") < text.index('alt="Another figure"')


def rendered(built: report.Report, figures: list[plots.Picture]) -> str:
    return page.render(built, tables.header(built.reference), tables.cells(built.table), figures)


def test_names_cannot_leave_their_place(drawn: report.Report, text: str) -> None:
    assert "my_&lt;own&gt;|one" in text
    assert "<own>" not in text
    assert "rank 1: &lt;script&gt;" in text
    evil = "</script><script>alert(1)</script><!-- &amp;"
    rows = [dataclasses.replace(row, balancer=f"{evil}{number}") for number, row in enumerate(drawn.rows)]
    changed = rendered(dataclasses.replace(drawn, rows=rows), [])
    assert len(Elements(changed).scripts) == len(Elements(text).scripts) == 4
    assert changed.count("</script>") == 4
    labels = {row["label"] for row in json.loads(data_script(changed))["rows"]}
    assert labels == {row.label for row in rows if row.complete}


def test_the_papers_numbers_are_fenced_off(text: str) -> None:
    section = text[text.index('<section id="paper" class="other">') : text.index('<section id="configs">')]
    assert "ANOTHER MODEL AT ANOTHER SCALE" in section
    assert "EQB + norm. LEI" in section
    assert text.count("EQB + norm. LEI") == 1


def test_configs_and_what_they_change(drawn: report.Report, text: str) -> None:
    assert "eqb: config of the reference" in text
    label = "eqb_lei (eta=1e-05)"
    own = text[text.index(f"<summary>{label}: config") :]
    changes = re.findall(r'<tr><th scope="row">(.*?)</th><td class="text">(.*?)</td><td class="text">(.*?)</td>', own)
    assert ("balancer.gradient.eta", "absent", "1e-05") in changes[:5]
    assert ("balancer.name", "eqb", "eqb_lei") in changes[:5]
    options = dict(page.row_options(drawn.rows))
    assert options["eqb"] == {"balancer.bias._target_": "equipoise.balancers.ExactQB", "balancer.bias.key": "bf16"} | {
        "balancer.gradient": None
    }
    shared = text[text.index("<summary>Config</summary>") :].split("</details>")[0]
    assert "learning_rate: 0.002" in shared
    assert "seed:" not in shared
    assert "eta" not in shared
    assert "none-s0-0123abcd: s0 failed at step 4/12: rank 1: &lt;script&gt;" in text


# ---- in a browser


@pytest.fixture(scope="module")
def chromium() -> Any:
    """The module that drives the browser; loaded by path, as tests are no package."""
    spec = importlib.util.spec_from_file_location("chromium", Path(__file__).with_name("chromium.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_browser_that_never_answers_is_a_failure(
    chromium: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 10\n")
    silent.chmod(0o755)
    monkeypatch.setattr(chromium, "SECONDS", 0.1)
    with pytest.raises(AssertionError, match="did not answer in time"):
        chromium.Browser(str(silent), tmp_path)


@pytest.fixture(scope="module")
def browser(chromium: Any, drawn: report.Report, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser that shows the page, 1280 pixels wide and light."""
    executable = chromium.find()
    if executable is None:
        pytest.skip(f"none of {', '.join(chromium.NAMES)} is installed")
    with chromium.Browser(executable, tmp_path_factory.mktemp("profile")) as opened:
        opened.show(1280)
        opened.load(drawn.page.as_uri())
        yield opened
        # whatever the tests did
        assert opened.named("Runtime.exceptionThrown") == []
        said = [said for said in opened.named("Runtime.consoleAPICalled") if said["type"] in ("error", "warning")]
        assert said == []


def test_plots_are_drawn_and_no_request_leaves(browser: Any, drawn: report.Report) -> None:
    drawn_plots = browser.run("[...document.querySelectorAll('.plot')].map((p) => [p.id, p.data?.length ?? 0])")
    assert len(drawn_plots) == 12
    assert all(traces > 0 for _, traces in drawn_plots)
    # a line and a band a row
    assert dict(drawn_plots)["curve-global_maxvio"] == 2 * 4
    window = "(({ layout }) => [layout.shapes[0].x0, layout.shapes[0].x1, layout.xaxis.range[1]])"
    shown = browser.run(f"{window}(document.getElementById('curve-loss'))")
    assert shown == pytest.approx([4096 * (START - 1), 4096 * 12, 4096 * 12 * 1.01])
    # the hidden ones aside, each has an axis with numbers on it
    assert browser.run("document.querySelectorAll('.plot .xtick').length") > 30
    requests = {sent["request"]["url"] for sent in browser.named("Network.requestWillBeSent")}
    assert {url for url in requests if not url.startswith("data:")} == {drawn.page.as_uri()}
    assert browser.named("Log.entryAdded") == []


def test_without_a_common_tail_window_nothing_is_shaded(browser: Any) -> None:
    shapes = "document.getElementById('curve-loss').layout.shapes.length"
    before = browser.run("data.tail.tokens")
    try:
        browser.run("data.tail.tokens = null; drawCurve('loss')")
        assert browser.run(shapes) == 0
    finally:
        browser.run(f"data.tail.tokens = {before}; drawCurve('loss')")
    assert browser.run(shapes) == 1


def test_the_browser_itself_refuses_requests(browser: Any) -> None:
    script = """new Promise((done) => {
      document.addEventListener("securitypolicyviolation", (event) => done(event.violatedDirective), { once: true });
      fetch("https://nowhere.invalid/").catch(() => setTimeout(() => done("not refused"), 1000));
    })"""
    assert browser.run(script) == "connect-src"
    # it says so in the log, which is not an error of the page
    browser.events.clear()


def test_plotlys_button_that_sends_the_plot_away_is_gone(browser: Any) -> None:
    titles = browser.run("[...document.querySelectorAll('.modebar-btn')].map((button) => button.dataset.title)")
    assert {"Download plot as a PNG", "Reset axes"} <= set(titles)
    assert not [title for title in titles if "hare" in title or "loud" in title]


FIRST = "[...document.querySelectorAll('.sortable tbody tr')].map((row) => row.cells[0].textContent)"
SORTED = "[...document.querySelectorAll('.sortable thead th')].map((heading) => heading.getAttribute('aria-sort'))"


def test_sorting_by_click(browser: Any, drawn: report.Report) -> None:
    labels = drawn.table["balancer"].tolist()
    assert browser.run(FIRST) == labels
    known = drawn.table.dropna(subset=["global_maxvio"])
    rising = known.sort_values("global_maxvio")["balancer"].tolist()
    click = "document.querySelectorAll('.sortable thead button')[{}].click()"
    browser.run(click.format(2))
    # the row without a value is last both ways
    assert browser.run(FIRST) == [*rising, "none"]
    assert browser.run(SORTED)[2] == "ascending"
    browser.run(click.format(2))
    assert browser.run(FIRST) == [*rising[::-1], "none"]
    assert browser.run(SORTED) == ["none", "none", "descending", *["none"] * 6]
    # 0 of 3 seeds is the least
    browser.run(click.format(1))
    assert browser.run(FIRST)[0] == "none"
    browser.run(click.format(0))
    assert browser.run(FIRST) == labels


def test_sorting_by_keyboard(browser: Any, drawn: report.Report) -> None:
    browser.run("document.querySelectorAll('.sortable thead button')[1].focus()")
    browser.press("Tab", 9)
    browser.press("Enter", 13)
    assert browser.run(SORTED)[2] == "ascending"
    assert browser.run(FIRST) != drawn.table["balancer"].tolist()
    browser.run("document.querySelectorAll('.sortable thead button')[0].click()")
    assert browser.run(FIRST) == drawn.table["balancer"].tolist()


def test_the_reference_is_marked(browser: Any) -> None:
    assert browser.run("[...document.querySelectorAll('tr.reference th')].map((cell) => cell.textContent)") == ["eqb"]


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_window(browser: Any, width: int) -> None:
    try:
        browser.show(width)
        # plotly follows the window after a moment
        fits = "(plot) => Math.abs(plot._fullLayout.width - plot.clientWidth) < 1"
        browser.wait_for(f"[...document.querySelectorAll('.plot')].every({fits})")
        assert browser.run("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
        outside = """[...document.querySelectorAll('.plot text')].map((word) => word.getBoundingClientRect())
          .filter((box) => box.right > innerWidth || box.left < 0)"""
        assert browser.run(f"({outside}).length") == 0
        columns = browser.run(
            "getComputedStyle(document.querySelector('.plots')).gridTemplateColumns.split(' ').length"
        )
        assert columns == (2 if width == 1280 else 1)
    finally:
        browser.show(1280)


def test_plots_follow_the_colour_scheme(browser: Any) -> None:
    paper = """(({ layout, data }) => [getComputedStyle(document.body).backgroundColor, layout.paper_bgcolor,
      data.at(-1).line.color])(document.getElementById("curve-loss"))"""
    light = browser.run(paper)
    assert light[:2] == ["rgb(255, 255, 255)", "#ffffff"]
    try:
        browser.show(1280, scheme="dark")
        browser.wait_for("document.getElementById('curve-loss').layout.paper_bgcolor === '#16181c'")
        dark = browser.run(paper)
        assert dark[:2] == ["rgb(22, 24, 28)", "#16181c"]
        assert dark[2] != light[2]
    finally:
        browser.show(1280)
    browser.wait_for("document.getElementById('curve-loss').layout.paper_bgcolor === '#ffffff'")
    assert browser.run(paper) == light


def test_colours_are_those_of_the_figures(browser: Any, data: dict[str, Any]) -> None:
    colours = dict(
        browser.run("document.getElementById('curve-loss').data.map((trace) => [trace.name, trace.line.color])")
    )
    own = {row["label"]: row["colour"] for row in data["rows"]}
    assert own["eqb"] == plots.COLOURS["eqb"]
    assert colours["eqb"] == "rgba({},{},{},1)".format(*(int(own["eqb"][place : place + 2], 16) for place in (1, 3, 5)))


def test_a_name_hides_its_line_and_its_band(browser: Any) -> None:
    names = "document.getElementById('{}').data.map((trace) => trace.name)"
    press = "[...document.querySelectorAll('#legend button')].find((key) => key.textContent === 'eqb').click()"
    browser.run(press)
    for plot in ("curve-loss", "balance-local_maxvio", "devices-maxvio", "sweep-val_bpb"):
        assert "eqb" not in browser.run(names.format(plot))
    assert browser.run("document.querySelectorAll('#legend [aria-pressed=false]').length") == 1
    browser.run(press)
    assert browser.run(names.format("curve-loss")).count("eqb") == 2


def choose(browser: Any, **values: str) -> None:
    for name, value in values.items():
        browser.run(f"""{{ const list = document.getElementById("experts-{name}");
          list.value = [...list.options].find((option) => option.textContent.startsWith("{value}")).value;
          list.dispatchEvent(new Event("change")); }}""")


def test_experts_of_a_chosen_row_and_layer(browser: Any, drawn: report.Report) -> None:
    choose(browser, row="eqb", layer="MoE layer 1", order="by number")
    run = next(row for row in drawn.rows if row.label == "eqb").complete[0]
    frame = pd.read_parquet(run.folder / "load.parquet")
    table = frame[frame["layer"] == 1].pivot(index="expert", columns="step")
    load = np.log2((table["count"] / table["count"].mean()).clip(1 / 4, 4)).to_numpy()
    np.testing.assert_allclose(browser.run("document.getElementById('experts-load').data[0].z"), load, atol=0.0081)
    choose(browser, order="busiest")
    order = np.argsort(-table["count"].loc[:, START:].mean(axis=1).to_numpy(), kind="stable")
    np.testing.assert_allclose(
        browser.run("document.getElementById('experts-load').data[0].z"), load[order], atol=0.0081
    )
    last = browser.run("""document.getElementById('experts-bias').data.flatMap((trace) => trace.text.map((text, n) =>
      [text, trace.x[n], trace.y[n]])).filter((point) => point[1] === 12)""")
    assert {text for text, _, _ in last} == {f"expert {expert}" for expert in range(8)}
    for text, _, bias in last:
        assert bias == pytest.approx(table["bias"][12][int(text.split()[1])], abs=1e-5)


def test_a_row_without_a_bias_says_so(browser: Any) -> None:
    choose(browser, row="my_<own>|one")
    shown = "[...document.querySelectorAll('#experts .empty')].filter((p) => !p.hidden).map((p) => p.textContent)"
    assert browser.run(shown) == ["my_<own>|one has no selection bias."]
    choose(browser, row="eqb")
    assert browser.run(shown) == []


def test_names_are_text_in_the_plots(browser: Any) -> None:
    assert browser.run("document.querySelectorAll('own').length") == 0
    assert "my_&lt;own&gt;|one" in browser.run("document.getElementById('curve-loss').data.map((trace) => trace.name)")


def test_on_paper_it_is_light_and_fits(browser: Any) -> None:
    try:
        browser.show(718, scheme="dark", medium="print")
        browser.run("void dispatchEvent(new Event('beforeprint'))")
        assert browser.run("getComputedStyle(document.body).color") == "rgb(28, 31, 36)"
        assert browser.run("document.getElementById('curve-loss').layout.paper_bgcolor") == "#ffffff"
        assert browser.run("document.documentElement.scrollWidth") == 718
        assert browser.run("document.querySelector('.sortable').getBoundingClientRect().right") <= 718
    finally:
        browser.run("void dispatchEvent(new Event('afterprint'))")
        browser.show(1280)


def test_without_javascript_the_pictures_are_shown(browser: Any, drawn: report.Report) -> None:
    try:
        browser.call("Emulation.setScriptExecutionDisabled", value=True)
        browser.load(drawn.page.as_uri())
        root = browser.call("DOM.getDocument")["root"]["nodeId"]
        for selector, number in ((".picture img", 6), (".sortable tbody tr", 5), (".legend button", 0)):
            assert len(browser.call("DOM.querySelectorAll", nodeId=root, selector=selector)["nodeIds"]) == number
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
