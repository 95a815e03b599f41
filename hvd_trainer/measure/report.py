"""The report of a tool: what it has concluded, the evidence, and what to type, in one order everywhere.

report = Report(ran=Ran.now("compare", argv), verdicts=[Verdict("ddp is faster.", badge="1.2 TIMES")])
report.show()                       in the terminal
report.write(folder, "comparison")  comparison.json, .md and .html

The first verdict is the answer, the title of the page. The page's template draws intervals around 1.0, bars, and
lines of source; other pictures come as SVG (`chart.py`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hvd_trainer.measure.formats import render_page, to_json
from hvd_trainer.measure.machine import Ran
from hvd_trainer.measure.stats import Ratio

PAGE = Path(__file__).with_name("page.html.j2")
"""The template of the page: one file, without anything from the network."""
MIN_REACH, MAX_REACH = 1.25, 10.0
"""The largest ratio for which the drawing of intervals has room, at least and at most."""
PIPE_WIDTH = 10_000
"""Width in characters of what is printed to a file or a pipe."""
STYLES = {"failed": "bold red", "sure": "bold", "unsure": ""}


class Source(NamedTuple):
    """Lines of a file around one of them."""

    file: str
    line: int
    lines: Sequence[tuple[int, str]]
    """with their numbers"""


@dataclass(frozen=True)
class Verdict:
    """A conclusion, and what it stands on."""

    text: str
    state: Literal["sure", "unsure", "failed"] = "unsure"
    """unsure: nothing is shown beyond the noise; failed: something went wrong that the reader must see first"""
    details: Sequence[str] = ()
    """further sentences"""
    _: KW_ONLY
    badge: str = ""
    """the text in a few words"""
    ratio: Ratio | None = None
    """drawn on the page around 1.0"""
    sides: tuple[str, str] = ("slower", "faster")
    """what a ratio below 1, and one above it, means"""
    source: Source | None = None
    """the lines that it is about"""
    type: Sequence[str] = ()
    """what to type"""

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
    is_open: bool = False
    """whether the page shows it at once"""

    def compact(self) -> Table:
        """Return it without the columns in which no row has anything."""
        used = [
            place for place in range(len(self.columns)) if any(row[place] not in ("-", "") for row in self.rows)
        ]
        rows = [[row[place] for place in used] for row in self.rows]
        words = [new for new, old in enumerate(used) if old in self.words]
        return replace(self, columns=[self.columns[place] for place in used], rows=rows, words=words)

    def rich(self, width: int) -> Any:
        """Return it for a console of `rich` this wide, or wider: lines break between words only."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        cells = [*zip(self.columns, *self.rows, strict=True)]
        whole = [max(map(len, column)) for column in cells]
        least = [max(len(word) for cell in column for word in ["", *cell.split()]) for column in cells]
        space, lines = int(sum(whole) + 3 * len(cells) < width), len(cells) + 1
        # As Text, brackets of what was typed are no markup.
        made = RichTable(
            box=SIMPLE_HEAD,
            title=Text(self.title),
            title_justify="left",
            title_style="bold",
            padding=(0, space),
            width=None if space else max(sum(least) + lines, min(sum(whole) + lines, width)),
        )
        for place, name in enumerate(self.columns):
            made.add_column(
                Text(name),
                justify="left" if place in self.words else "right",
                min_width=least[place],
                no_wrap=least[place] == whole[place],
            )
        for row in self.rows:
            made.add_row(*map(Text, row))
        return made

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


class Bar(NamedTuple):
    """A bar of parts."""

    label: str
    parts: Sequence[tuple[str, float]]
    """of a name and a size"""

    @property
    def size(self) -> float:
        return sum(size for _, size in self.parts)


@dataclass(frozen=True)
class Bars:
    """Bars above each other."""

    title: str
    text: str
    bars: Sequence[Bar]
    unit: str
    marked: Sequence[str] = ()
    """names of parts that the reader shall see first"""

    @property
    def names(self) -> list[str]:
        """The names of all parts, those that are marked first."""
        return [*dict.fromkeys([*self.marked, *(name for bar in self.bars for name, _ in bar.parts)])]


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that a tool has to say. Verdicts that failed come first, and those within the noise last."""

    ran: Ran
    """when, where and by which command"""
    verdicts: Sequence[Verdict]
    """at least one"""
    warnings: Sequence[str] = ()
    """what makes the verdicts doubtful"""
    tables: Sequence[Table] = ()
    bars: Bars | None = None
    pictures: Sequence[Picture] = ()
    """for the page, behind the bars"""
    notes: Sequence[str] = ()
    """what the figures hold for"""
    advice: Sequence[str] = ()
    """what to type"""
    data: Mapping[str, Any] = field(default_factory=dict)
    """everything in full, for the JSON"""

    @property
    def ordered(self) -> list[Verdict]:
        """The verdicts, those that failed first, and those within the noise last."""
        return sorted(self.verdicts, key=lambda verdict: list(STYLES).index(verdict.state))

    @property
    def answer(self) -> Verdict:
        """The first verdict."""
        return self.ordered[0]

    @property
    def has_failed(self) -> bool:
        """Whether a verdict says that something went wrong."""
        return any(verdict.state == "failed" for verdict in self.verdicts)

    @property
    def reach(self) -> float:
        """The largest ratio for which the drawing of intervals has room."""
        ratios = [verdict.ratio for verdict in self.verdicts if verdict.ratio is not None]
        drawn = [value for ratio in ratios for value in (ratio.value, ratio.low, ratio.high, *ratio.each) if value]
        largest = max((max(value, 1 / value) for value in drawn), default=1.0)
        return min(max(largest, MIN_REACH), MAX_REACH)

    def place(self, ratio: float) -> float:
        """Return where a ratio is drawn, in per cent of the width: 1.0 in the middle, on a logarithmic scale."""
        share = math.log(max(ratio, 1 / MAX_REACH**2)) / math.log(self.reach)
        return 50 + 48 * min(max(share, -1.0), 1.0)

    def show(self, said: Sequence[str] = ()) -> None:
        """Print it.

        Args:
            said: warnings that stand above it in a terminal.
        """
        from rich.console import Console

        # As wide as the terminal; in a file or a pipe no line is broken.
        wide = None if sys.stdout.isatty() else PIPE_WIDTH
        out = Console(file=sys.stdout, width=wide, highlight=False, soft_wrap=wide is None, markup=False)
        for verdict in self.ordered:
            out.print(verdict.text, style=STYLES[verdict.state])
            for text in verdict.details:
                out.print(f"  {text}")
        for text in self.warnings if wide else [text for text in self.warnings if text not in said]:
            out.print(f"warning: {text}", style="yellow")
        for table in self.tables:
            out.print(table.rich(out.width), soft_wrap=False, crop=False)
        for text in self.notes:
            out.print(text)
        for text in self.advice:
            out.print(f"Type: {text}", style="bold")

    def write(self, folder: Path, name: str, files: Sequence[Path] = ()) -> None:
        """Write NAME.json, NAME.md and NAME.html, and print their paths and those of further files."""
        texts = {folder / f"{name}.json": self.json(), folder / f"{name}.md": self.markdown()}
        texts[folder / f"{name}.html"] = render_page(PAGE, report=self)
        for path, text in texts.items():
            path.write_text(text)
        print("written: " + ", ".join(map(str, [*texts, *files])), flush=True)

    def json(self) -> str:
        """Return everything as JSON."""
        head = {
            **self.ran._asdict(),
            "verdicts": [
                {name: getattr(verdict, name) for name in ("badge", "text", "state", "details")}
                for verdict in self.ordered
            ],
            **{name: getattr(self, name) for name in ("warnings", "advice", "notes")},
        }
        return to_json({**head, **self.data})

    def markdown(self) -> str:
        """Return all but the pictures as Markdown."""
        parts = [f"# {self.answer.badge or self.answer.text}", f"`{self.ran.command}`\n\n{self.ran}"]
        parts += [f"**{verdict.text}** {' '.join(verdict.details)}".rstrip() for verdict in self.ordered]
        parts += [f"> warning: {text}" for text in self.warnings]
        parts += [f"**{table.title}**\n\n{table.markdown()}" for table in self.tables]
        parts += [*self.notes, *(f"Type: `{text}`" for text in self.advice)]
        return "\n\n".join(parts) + "\n"
