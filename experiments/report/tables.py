"""The table as a reader sees it: rounded cells, and their Markdown, LaTeX and terminal forms."""

import math
import re
import textwrap
from collections.abc import Sequence
from itertools import zip_longest

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from .statistics import MIN_SEEDS

# key of the frame, heading, digits after the point
COLUMNS = (("global_maxvio", "global MaxVio", 3), ("local_maxvio", "local MaxVio", 3), ("val_bpb", "val BPB", 4))
REAL = "*"
# stands for (n=...) in the terminal, where width is short
TOO_FEW = "?"
# characters of a line of a label and of a heading in LaTeX, so that the table fits the text width
LATEX_LABEL = 20
LATEX_HEADING = 15

PAPER_TITLE = "ANOTHER MODEL AT ANOTHER SCALE"
PAPER_NOTE = (
    "The rows that the paper on EQB reports: 7.5B-A0.5B parameters, 256 experts top-6, 48 MoE layers, 100B tokens, "
    "one seed, BPB over 6 benchmarks. For orientation only: do not compare the numbers with those of the table above."
)
PAPER_HEADER = ("method", "global MaxVio", "local MaxVio", "mean BPB")
PAPER_ROWS = (
    ("rank-averaged QB", "0.92", "5.96", "0.6782"),
    ("EQB", "0.74", "5.38", "0.6570"),
    ("EQB + GShard (from the text)", "0.71", "4.71", "0.6853"),
    ("EQB + norm. GShard", "0.74", "4.30", "0.6758"),
    ("EQB + norm. LEI", "0.60", "3.52", "0.6720"),
)


def spread(mean: float, std: float, digits: int) -> str:
    """Mean and sample standard deviation; a dash where there is no mean, no ``±`` where there is one seed.

    >>> spread(0.7512, 0.0213, 3), spread(0.7512, float("nan"), 3), spread(float("nan"), float("nan"), 3)
    ('0.751 ± 0.021', '0.751', '-')
    """
    if math.isnan(mean):
        return "-"
    return f"{mean:.{digits}f}" if math.isnan(std) else f"{mean:.{digits}f} ± {std:.{digits}f}"


def difference(record: pd.Series, key: str, digits: int, *, interval: bool = True) -> str:
    """The paired difference of one row and its interval; ``*`` where it counts as real, ``(n=2)`` below the minimum."""
    mean, num_pairs = record[f"d_{key}"], int(record[f"d_{key}_n"])
    if record["is_reference"]:
        return "reference"
    if num_pairs == 0:
        return "-"
    if num_pairs < MIN_SEEDS:
        return f"{mean:+.{digits}f} (n={num_pairs})"
    bounds = f" [{record[f'd_{key}_low']:+.{digits}f}, {record[f'd_{key}_high']:+.{digits}f}]" if interval else ""
    return f"{mean:+.{digits}f}{bounds}{' ' + REAL if record[f'd_{key}_real'] else ''}"


def header(reference: str) -> list[str]:
    """Headings of ``cells``; a reference whose label holds options is too long for one, the rule names it."""
    versus = "difference" if "(" in reference else f"vs {reference}"
    return ["balancer", "seeds", *(text for _, title, _ in COLUMNS for text in (title, versus)), "tokens/s"]


def cells(table: pd.DataFrame, *, notes: bool = True) -> list[list[str]]:
    """The rows of the table as text, with intervals; with ``notes`` the seeds' cell tells what is missing and why."""
    rows = []
    for _, record in table.iterrows():
        row = [record["balancer"], (notes and record["note"]) or _seeds(record)]
        for key, _, digits in COLUMNS:
            row += [spread(record[key], record[f"{key}_std"], digits), difference(record, key, digits)]
        rows.append([*row, _rate(record["tokens_per_s"])])
    return rows


def _seeds(record: pd.Series) -> str:
    return str(record["seeds"]) if record["complete"] else f"{record['seeds']}/{record['seeds_expected']}"


def _rate(tokens_per_s: float) -> str:
    return "-" if math.isnan(tokens_per_s) else f"{tokens_per_s:,.0f}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A GitHub table, the first column to the left.

    >>> print(markdown(["a", "b"], [["x|y", "1"]]))
    | a | b |
    |:--|--:|
    | x\\|y | 1 |
    """
    lines = [head, *rows]
    text = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([text[0], "|:--|" + "--:|" * (len(head) - 1), *text[1:]])


def wrapped(label: str, width: int) -> str:
    """A label on lines of at most ``width`` characters, cut between words or else behind a sign.

    >>> wrapped("eqb_lei (gradient.eta=2e-05)", 22), wrapped("rank_averaged_qb+lei", 18)
    ('eqb_lei\\n(gradient.eta=2e-05)', 'rank_averaged_qb+\\nlei')
    """
    lines = textwrap.wrap(label, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(piece for line in lines for piece in _pieces(line, width))


def _pieces(word: str, width: int) -> list[str]:
    pieces = [""]
    for part in re.findall(r"[^_+.,=]+[_+.,=]*|[_+.,=]+", word):
        if len(pieces[-1]) + len(part) <= width:
            pieces[-1] += part
        else:
            pieces += textwrap.wrap(part, width)
    return [piece for piece in pieces if piece]


def latex(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    """A table for plain LaTeX, no package is needed; it fits the text width of an article.

    What belongs to a difference, a column headed "vs ..." or "difference", stands below the value before it.

    >>> print(latex(["a", "b", "vs c"], [["x_y", "1 ± 2", "-3 [-4, -2] *"]], "50 %"))
    \\begin{table}
    \\centering
    \\scriptsize
    \\setlength{\\tabcolsep}{3pt}
    \\begin{tabular}{@{}lr@{}}
    \\hline
    a & b \\\\
     & vs c \\\\
    \\hline
    x\\_y & 1 $\\pm$ 2 \\\\
     & $-$3 * \\\\
     & {[}$-$4, $-$2{]} \\\\
    \\hline
    \\end{tabular}
    \\caption{50 \\%}
    \\end{table}
    """
    below = {column for column, text in enumerate(head) if text.startswith("vs ") or text == "difference"}
    lines = [_latex_lines(row, below) for row in (head, *rows)]
    columns = f"@{{}}l{'r' * (len(head) - len(below) - 1)}@{{}}"
    before = [r"\begin{table}", r"\centering", r"\scriptsize", r"\setlength{\tabcolsep}{3pt}"]
    body = [rf"\begin{{tabular}}{{{columns}}}", *(line for row in lines for line in (r"\hline", *row)), r"\hline"]
    return "\n".join([*before, *body, r"\end{tabular}", rf"\caption{{{escape_latex(caption)}}}", r"\end{table}"])


def _latex_lines(row: Sequence[str], below: set[int]) -> list[str]:
    """One row as lines of LaTeX, what is ``below`` under the cell before it."""
    stacks: list[list[str]] = []
    for column, text in enumerate(row):
        if column in below:
            stacks[-1] += _difference_lines(text)
        else:
            stacks.append(wrapped(text, LATEX_LABEL).split("\n") if column == 0 else [text])
    return [" & ".join(map(escape_latex, cells)) + r" \\" for cells in zip_longest(*stacks, fillvalue="")]


def _difference_lines(text: str) -> list[str]:
    """The difference and its mark, then its interval; a heading on lines of its own."""
    if text.startswith("vs "):
        return wrapped(text, LATEX_HEADING).split("\n")
    value, bracket, rest = text.partition(" [")
    interval, _, mark = rest.partition("]")
    return [value + mark, f"[{interval}]"] if bracket else [text]


def escape_latex(text: str) -> str:
    """Text with LaTeX's special characters escaped; what has no plain form becomes ``?``.

    >>> print(escape_latex("eqb_lei -0.1 ± 5 %"))
    eqb\\_lei $-$0.1 $\\pm$ 5 \\%
    """
    special = {c: f"\\{c}" for c in "&%$#_{}"} | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": "$<$",
        ">": "$>$",
        "|": "$|$",
        "±": r"$\pm$",
        "\N{MINUS SIGN}": "$-$",
        # a bracket after a line's end would be read as an option of it
        "[": "{[}",
        "]": "{]}",
    }
    signed = re.sub(r"(?<![\w.)\]])-(?=\d)", "\N{MINUS SIGN}", text)
    return "".join(special.get(c, c if c.isascii() else "?") for c in signed)


def terminal(table: pd.DataFrame, reference: str, speed: bool = True) -> Table:
    """The compact table of the terminal: no intervals, one digit less, within 100 columns for the presets' names.

    Without the column of tokens per second (``speed``) it needs 80.
    """
    grid = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    grid.add_column("balancer", overflow="fold", min_width=16)
    titles = header(reference)[1:]
    for title in titles if speed else titles[:-1]:
        # headings on two lines leave the width to the numbers
        heading = title.replace(" MaxVio", "\nMaxVio").replace("/s", "\n/s").replace("difference", "diff.")
        grid.add_column(heading, justify="right", no_wrap=True)
    for _, record in table.iterrows():
        row = [record["balancer"], _seeds(record)]
        for key, _, digits in COLUMNS:
            row += [spread(record[key], record[f"{key}_std"], digits - 1), _short_difference(record, key, digits - 1)]
        row += [_rate(record["tokens_per_s"])] if speed else []
        grid.add_row(*(Text(cell) for cell in row))
    return grid


def _short_difference(record: pd.Series, key: str, digits: int) -> str:
    if record["is_reference"]:
        return ""
    number, _, mark = difference(record, key, digits, interval=False).partition(" ")
    return number + (TOO_FEW if mark.startswith("(n=") else mark)
