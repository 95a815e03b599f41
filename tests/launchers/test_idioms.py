"""The table of docs/idioms.md: its rows are those that are run, and a verdict is that of the ranks' numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from launchers import REPOSITORY, launch

from benchmarks.idioms.libraries import LIBRARIES
from benchmarks.idioms.page import BEGIN, END, Cell, table
from benchmarks.idioms.ranks import Outcome, first_sentence
from benchmarks.idioms.rows import ROWS
from benchmarks.idioms.verdict import judge_outcome

pytestmark = pytest.mark.warm


def test_the_page_has_all_rows_and_libraries() -> None:
    text = (REPOSITORY / "docs/idioms.md").read_text().partition(BEGIN)[2].partition(END)[0]
    head, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line
    )
    assert head == ["", "", "right is", *(library.name for library in LIBRARIES)]
    assert [row[:3] for row in rows] == [[number, row.title, row.right] for number, row in ROWS.items()]
    assert {word for row in rows for word in row[3:]} <= {
        *("right", r"right\*", "**wrong**", "refused", "no such thing"),
    }


@pytest.mark.parametrize(
    ("row", "outcome", "text"),
    [
        ("1a", Outcome(((1.0, 2.0), (1.0, 2.00001))), "right"),
        ("1a", Outcome(((1.0, 2.0), (1.0, 2.25))), "wrong (ranks differ: 2, 2.25; right 2)"),
        ("1a", Outcome(((1.5, 2.0), (1.5, 2.0))), "wrong (1.5, right 1)"),
        ("1a", Outcome(((1.0, math.nan), (1.0, math.nan))), "wrong (ranks differ: nan, nan; right 2)"),
        ("1a", Outcome((), "OptionError: no"), "refused (OptionError: no)"),
        ("1a", Outcome((), "no end within 90 s", is_hung=True), "wrong (no end within 90 s)"),
        ("6a", Outcome(((1.0, 0.0), (0.0, 2.0))), "wrong (3 samples, right 2)"),
        ("6a", Outcome(((1.0, 0.0), (0.0, 2.0), (0.0, -1.0))), "right"),
        ("8", Outcome(((1.0, 0.0), (0.0, 2.1))), "wrong (1 of 2 samples changed)"),
        ("16", Outcome((), "", ended_s=2.0, is_saved=True), "right (saved, ended after 2.0 s)"),
        ("16", Outcome((), "", ended_s=0.1), "wrong (nothing saved, ended after 0.1 s)"),
        ("16", Outcome((), "", ended_s=9.0, is_saved=True), "wrong (saved, ended after 9.0 s)"),
    ],
)
def test_verdict(row: str, outcome: Outcome, text: str) -> None:
    expected = {"1a": [1.0, 2.0], "6a": [1.0, 1.0], "8": [1.0, 2.0], "16": None}[row]
    assert judge_outcome(row, outcome, expected).text == text


def test_a_way_that_is_right_is_the_word_and_the_others_are_notes() -> None:
    tries = [("", "wrong", "1, right 2"), ("`DDP(loss)`", "right", "")]
    made = table({"4 PyTorch DDP": Cell(tries, "2.15.0", "2026-11-28")})
    assert f"| 4 | {ROWS['4'].title} | as one process | right\\* |" in made
    assert "- **4** PyTorch DDP: plain, wrong (1, right 2); `DDP(loss)`, right." in made
    assert "Run on 2026-11-28: torch 2.15.0." in made


def test_an_error_is_cut_to_its_first_sentence() -> None:
    assert first_sentence("No 1.5 here. Type more.\nAnd more.") == "No 1.5 here"
    assert first_sentence("") == ""


def test_a_row_is_run_and_resumes(tmp_path: Path) -> None:
    """PyTorch's loop is wrong until it is wrapped again; ours is right."""
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}{END}after\n")
    command = [
        *("-m", "benchmarks.idioms", "--rows", "1a", "--ranks", "2", "--out", str(tmp_path / "out")),
        *("--libraries", "PyTorch DDP", "hvd_trainer, DDP", "--page", str(page)),
    ]
    said, again = (launch("python", 1, command) for _ in range(2))
    assert said.returncode == 0, said.stderr
    assert again.stdout == said.stdout
    assert page.read_text() == f"before\n{BEGIN}{said.stdout.removesuffix(chr(10))}{END}after\n"
    cells = json.loads((tmp_path / "out" / "idioms.json").read_text())
    (plain, wrapped), (ours,) = cells["1a PyTorch DDP"]["tries"], cells["1a hvd_trainer, DDP"]["tries"]
    assert plain[1] == "wrong"
    assert plain[2].startswith("ranks differ: ")
    assert wrapped == ["wrapped again", "right", ""]
    assert ours == ["", "right", ""]
