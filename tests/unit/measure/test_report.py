"""The report that tools share: one order in the terminal, Markdown, JSON and on the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pages import open_page

from hvd_trainer.measure.report import Report, Table, Verdict

REPORT = Report(
    title="Compared",
    subject="train.py --name '<b>[red]' " + "--long-option " * 20,
    verdicts=[
        Verdict("ddp is 1.20 times as fast.", "sure", ["A step takes longer."]),
        Verdict("FAILED 1 OF 2 TRIALS", "failed", ["ddp x 2: out of <memory>."]),
    ],
    warnings=["other programs are at work"],
    tables=[
        Table("Speed [ms]", ["", "ranks", "why"], [["a|b", "2", "[bold]x"], ["c", "4", "y" * 90]], words=(0, 2))
    ],
    notes=["Machine: cores 2."],
    advice=["python -m hvd_trainer compare --rounds 5"],
    data={"trials": [1, float("nan")]},
)
ORDER = ("FAILED 1 OF 2", "ddp is 1.20", "A step takes", "other programs", "Speed [ms]", "Machine", "--rounds 5")


def test_order_is_the_same_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What failed, the verdicts, what makes them doubtful, the evidence, and what to type."""
    REPORT.show()
    REPORT.write(tmp_path, "report", [tmp_path / "more.svg"])
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "written: " + ", ".join(
        str(tmp_path / name) for name in ("report.json", "report.md", "report.html", "more.svg")
    )
    for text in (out, *((tmp_path / f"report.{kind}").read_text() for kind in ("md", "html"))):
        places = [text.index(part) for part in ORDER]
        assert places == sorted(places)
    assert "[bold]x" in out
    kept = json.loads((tmp_path / "report.json").read_text())
    assert [verdict["state"] for verdict in kept["verdicts"]] == ["failed", "sure"]
    assert (kept["warnings"], kept["trials"]) == (["other programs are at work"], [1, "nan"])
    assert r"| a\|b | 2 | [bold]x |" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("width", [400, 1280])
def test_page_fits_the_window(browser: Any, tmp_path: Path, width: int) -> None:
    REPORT.write(tmp_path, "report")
    page = open_page(browser, tmp_path / "report.html", width)
    assert "ddp x 2: out of <memory>." in page.inner_text(".verdict.failed")
    assert "<b>[red]" in page.inner_text("body")
