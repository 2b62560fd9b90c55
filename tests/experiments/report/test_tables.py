"""The LaTeX form of the table."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from equipoise.experiments.report import command as report
from equipoise.experiments.report import tables

LONG = [
    [
        "rank_averaged_qb+gshard",
        "3",
        "12.345 ± 0.678",
        "reference",
        "1 ± 2",
        "reference",
        "2.5 ± 0.1",
        "reference",
        "-",
    ],
    [
        "eqb_lei (gradient.eta=2e-05) [microbatches=4]",
        "2/3",
        "0.751 ± 0.021",
        "-0.334 [-0.512, -0.157] *",
        "1.492 ± 0.076",
        "+0.321 [+0.020, +0.622] *",
        "2.6089 ± 0.0089",
        "-0.0002 (n=2)",
        "12,345",
    ],
]


def test_a_difference_stands_below_its_value() -> None:
    lines = tables.latex(tables.header("eqb"), LONG, "c").splitlines()
    assert r" &  & vs eqb & vs eqb & vs eqb &  \\" in lines
    start = next(place for place, line in enumerate(lines) if line.startswith(r"eqb\_lei"))
    assert lines[start : start + 4] == [
        r"eqb\_lei & 2/3 & 0.751 $\pm$ 0.021 & 1.492 $\pm$ 0.076 & 2.6089 $\pm$ 0.0089 & 12,345 \\",
        r"(gradient.eta=2e-05) &  & $-$0.334 * & +0.321 * & $-$0.0002 (n=2) &  \\",
        r"{[}microbatches=4{]} &  & {[}$-$0.512, $-$0.157{]} & {[}+0.020, +0.622{]} &  &  \\",
        r"\hline",
    ]


def test_latex_is_escaped(drawn: report.Report) -> None:
    text = (drawn.folder / "table.tex").read_text()
    assert r"eqb\_lei" in text
    assert r"my\_$<$own$>$$|$one" in text
    assert text.isascii()
    assert not re.search(r"(?<!\\)[_%#]", text.replace("\\\n", ""))
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {line.count("&") for line in rows} == {5}
    # a rule above every row of the table and above the headings, one below the last
    assert text.count(r"\hline") == len(drawn.table) + 2


@pytest.mark.parametrize("reference", ["eqb", "rank_averaged_qb+gshard", "eqb (key=bf16)"])
def test_latex_compiles_and_fits_the_page(tmp_path: Path, reference: str) -> None:
    if shutil.which("pdflatex") is None:
        pytest.skip("pdflatex is not installed")
    special = r"100 % of $x_1^2$ & #1 {a} [b] \~| <c>"
    table = tables.latex(tables.header(reference), [*LONG, [special, *LONG[0][1:]]], special)
    (tmp_path / "page.tex").write_text(f"\\documentclass{{article}}\n\\begin{{document}}\n{table}\n\\end{{document}}\n")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Overfull" not in done.stdout
