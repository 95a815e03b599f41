"""The report that tools share: one order in the terminal, Markdown, JSON and on the page."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compared import RAN
from pages import open_page

from hvd_trainer.measure.chart import draw_lines
from hvd_trainer.measure.report import Report, Table, Verdict
from hvd_trainer.measure.stats import ratio

REPORT = Report(
    ran=RAN._replace(command="train.py --name '<b>[red]' " + "--long-option " * 20),
    verdicts=[
        Verdict("ddp is 1.20 times as fast.", "sure", ["A step takes longer."], ratio=ratio([6, 5, 7], [5, 4, 6])),
        Verdict("1 of 2 trials failed.", "failed", ["ddp x 2: out of <memory>."], badge="FAILED 1 OF 2"),
    ],
    warnings=["other programs are at work"],
    tables=[
        Table("Speed [ms]", ["", "ranks", "why"], [["a|b", "2", "[bold]x"], ["c", "4", "y" * 90]], words=(0, 2))
    ],
    notes=["Machine: cores 2."],
    advice=["python -m hvd_trainer compare --rounds 5"],
    data={"trials": [1, float("nan")]},
)
ORDER = ("1 of 2 trials", "ddp is 1.20", "A step takes", "other programs", "Speed [ms]", "Machine", "--rounds 5")
ON_THE_PAGE = ("FAILED 1 OF 2", ORDER[0], "2026-11-26", *ORDER[3:4], *ORDER[1:3], "--rounds 5", *ORDER[4:6])
"""The answer is its title; what to type stands before the tables, which are folded."""


def test_order_is_the_same_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What failed, the verdicts, what makes them doubtful, the evidence, and what to type."""
    REPORT.show()
    REPORT.write(tmp_path, "report", [tmp_path / "more.svg"])
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "written: " + ", ".join(
        str(tmp_path / name) for name in ("report.json", "report.md", "report.html", "more.svg")
    )
    page = (tmp_path / "report.html").read_text().partition("<body>")[2]
    for text, order in ((out, ORDER), ((tmp_path / "report.md").read_text(), ORDER), (page, ON_THE_PAGE)):
        places = [text.index(part) for part in order]
        assert places == sorted(places)
    assert "[bold]x" in out
    kept = json.loads((tmp_path / "report.json").read_text())
    assert [verdict["state"] for verdict in kept["verdicts"]] == ["failed", "sure"]
    assert (kept["warnings"], kept["trials"]) == (["other programs are at work"], [1, None])
    assert r"| a\|b | 2 | [bold]x |" in (tmp_path / "report.md").read_text()


def test_page_shows_what_was_typed_as_text_and_copies_it(browser: Any, tmp_path: Path) -> None:
    REPORT.write(tmp_path, "report")
    page = open_page(browser, tmp_path / "report.html", 1280, "light")
    assert "ddp x 2: out of <memory>." in page.inner_text("header.failed")
    assert "<b>[red]" in page.inner_text("header code")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name=f"Copy: {REPORT.advice[0]}").click()
    page.get_by_text("Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == REPORT.advice[0]


def test_names_of_lines_are_drawn_as_they_are() -> None:
    """Those with `_` in front were left out of the legend, and `$` ended in a ValueError."""
    lines = {"_own": [(1, 1.0), (2, 0.1)], "a$x_{$": [(1, 2.0), (2, 0.2)]}
    (drawn,) = draw_lines("loss", "", lines, across="step $x_{$", marks=[(1, "$x_{$")])
    for text in (*lines, "step $x_{$", " $x_{$"):
        assert f">{text}</text>" in drawn.svg, text


def test_interval_is_drawn_around_one() -> None:
    """Of a ratio that is twice as large the dot is twice as far from 1.0, on a logarithmic scale."""
    places = [REPORT.place(ratio) for ratio in (0, 1 / REPORT.reach, 1, REPORT.reach**0.5, REPORT.reach, 1e9)]
    assert places == pytest.approx([2, 2, 50, 74, 98, 98])
    (drawn,) = [verdict.ratio for verdict in REPORT.verdicts if verdict.ratio is not None]
    assert drawn.each == pytest.approx((6 / 5, 5 / 4, 7 / 6))
    assert drawn.high is not None
    assert REPORT.reach >= drawn.high


def test_a_terminal_cuts_no_cell_and_says_no_warning_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In 80 columns the names of the rows were gone."""
    columns = ("", "median step", *["exchange"] * 8)
    table = Table("Steps", columns, [["horovod", "44.9", *["0.0645"] * 8]])
    report = replace(REPORT, warnings=["said before", "said now"], tables=[table])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for width in (40, 80, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        report.show(["said before"])
        out = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)  # without its colours
        assert "horovod 44.9 0.0645" in " ".join(out.split())
        assert {*" ".join(columns).split()} <= {*out.split()}
        assert "said before" not in out
        assert "said now" in out
    monkeypatch.undo()
    report.show(["said before"])
    assert "said before" in capsys.readouterr().out, "a file has all of them"


def test_no_line_of_a_command_ends_at_a_hyphen(browser: Any, tmp_path: Path) -> None:
    REPORT.write(tmp_path, "report")
    words = open_page(browser, tmp_path / "report.html", 400, "light").locator("header code span")
    heights = words.evaluate_all("words => words.map(word => word.offsetHeight)")
    assert max(heights) < 2 * min(heights)
