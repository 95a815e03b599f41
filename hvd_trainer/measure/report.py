"""The report of a tool: what it has concluded, the evidence, and what to type, in one order everywhere.

report = Report(title="Compared", subject="train.py", verdicts=[...], tables=[...])
report.show()                       in the terminal
report.write(folder, "comparison")  comparison.json, .md and .html
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hvd_trainer.measure.formats import console, make_table, render_page, to_json

PAGE = Path(__file__).with_name("report.html.j2")
"""The template of the page: one file, without scripts and without anything from the network."""
STYLES = {"failed": "bold red", "sure": "bold", "unsure": ""}


@dataclass(frozen=True)
class Verdict:
    """A conclusion, and what it stands on."""

    text: str
    state: Literal["sure", "unsure", "failed"] = "unsure"
    """unsure: nothing is shown beyond the noise; failed: something went wrong that the reader must see first"""
    details: Sequence[str] = ()
    """further sentences"""

    def __str__(self) -> str:
        return " ".join([self.text, *self.details])


@dataclass(frozen=True)
class Table:
    """A table of cells as text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[int] = (0,)
    """the places of columns of words; the others are numbers"""

    def compact(self) -> Table:
        """Return it without the columns in which no row has anything."""
        used = [
            place for place in range(len(self.columns)) if any(row[place] not in ("-", "") for row in self.rows)
        ]
        rows = [[row[place] for place in used] for row in self.rows]
        words = [new for new, old in enumerate(used) if old in self.words]
        return Table(self.title, [self.columns[place] for place in used], rows, words)

    def markdown(self) -> str:
        """Return it as Markdown, without its title."""
        rule = [":--" if place in self.words else "--:" for place in range(len(self.columns))]
        rows = [
            [" ".join(cell.split()).replace("|", r"\|") for cell in cells]
            for cells in (self.columns, rule, *self.rows)
        ]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


@dataclass(frozen=True)
class Picture:
    """A drawing, and what it shows in words."""

    title: str
    text: str
    svg: str
    is_wide: bool = False
    """whether it has a row of the page for itself"""


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that a tool has to say. Verdicts that failed come first."""

    title: str
    """of the page"""
    subject: str
    """what was looked at, such as the job as it was typed"""
    verdicts: Sequence[Verdict] = ()
    warnings: Sequence[str] = ()
    """what makes the verdicts doubtful"""
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    """for the page"""
    notes: Sequence[str] = ()
    """what the figures hold for"""
    advice: Sequence[str] = ()
    """what to type"""
    data: Mapping[str, Any] = field(default_factory=dict)
    """everything in full, for the JSON"""

    @property
    def ordered(self) -> list[Verdict]:
        """The verdicts, those that failed first."""
        return sorted(self.verdicts, key=lambda verdict: verdict.state != "failed")

    @property
    def has_failed(self) -> bool:
        """Whether a verdict says that something went wrong."""
        return any(verdict.state == "failed" for verdict in self.verdicts)

    def show(self) -> None:
        """Print it."""
        out = console()
        for verdict in self.ordered:
            out.print(verdict.text, style=STYLES[verdict.state], markup=False)
            for text in verdict.details:
                out.print(f"  {text}", markup=False)
        for text in self.warnings:
            out.print(f"warning: {text}", style="yellow", markup=False)
        for table in self.tables:
            out.print(make_table(table.title, table.columns, table.rows, words=table.words))
        for text in self.notes:
            out.print(text, markup=False)
        for text in self.advice:
            out.print(f"Type: {text}", style="bold", markup=False)

    def write(self, folder: Path, name: str, files: Sequence[Path] = ()) -> None:
        """Write NAME.json, NAME.md and NAME.html, and print their paths and those of further files."""
        writers: Mapping[str, Callable[[], str]] = {"json": self.json, "md": self.markdown, "html": self.html}
        paths = [folder / f"{name}.{kind}" for kind in writers]
        for path, write in zip(paths, writers.values(), strict=True):
            path.write_text(write())
        print("written: " + ", ".join(map(str, [*paths, *files])), flush=True)

    def json(self) -> str:
        """Return everything as JSON."""
        head = {
            "verdicts": [
                {"text": verdict.text, "state": verdict.state, "details": list(verdict.details)}
                for verdict in self.ordered
            ],
            **{name: list(getattr(self, name)) for name in ("warnings", "advice", "notes")},
        }
        return to_json({**head, **self.data})

    def markdown(self) -> str:
        """Return all but the pictures as Markdown."""
        parts = [f"# {self.title}: `{self.subject}`"]
        parts += [f"**{verdict.text}** {' '.join(verdict.details)}".rstrip() for verdict in self.ordered]
        parts += [f"> warning: {text}" for text in self.warnings]
        parts += [f"**{table.title}**\n\n{table.markdown()}" for table in self.tables]
        parts += [*self.notes, *(f"Type: `{text}`" for text in self.advice)]
        return "\n\n".join(parts) + "\n"

    def html(self) -> str:
        """Return everything as a page."""
        return render_page(PAGE, heading=self.subject, report=self)
