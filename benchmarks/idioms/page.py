"""The table of all rows and libraries, with its notes."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from benchmarks.idioms.libraries import LIBRARIES
from benchmarks.idioms.rows import ROWS

BEGIN, END = "<!-- table -->\n", "<!-- end of the table -->\n"


@dataclass(frozen=True)
class Cell:
    """What was tried with a library for a row, until something was right.

    Attributes:
        tries: way, word and detail of each.
        version: of the library.
    """

    tries: list[tuple[str, str, str]]
    version: str
    date: str


def table(cells: dict[str, Cell]) -> str:
    """Return a Markdown table, and a note for each row with more to say than a word."""
    libraries = [one for one in LIBRARIES if any(key.endswith(f" {one.name}") for key in cells)]
    lines = [
        f"| | | right is | {' | '.join(library.name for library in libraries)} |",
        f"|---|---|---|{'---|' * len(libraries)}",
    ]
    notes: list[str] = []
    for number, row in ROWS.items():
        ran = {one.name: cells[f"{number} {one.name}"] for one in libraries if f"{number} {one.name}" in cells}
        words = [_word(ran[one.name]) if one.name in ran else "" for one in libraries]
        lines.append(f"| {number} | {row.title} | {row.right} | {' | '.join(words)} |")
        notes += _notes(number, ran)
    return "\n".join(["", *_wrapped(_when(cells)), "", *lines, "", *notes, "", ""])


def _notes(number: str, ran: dict[str, Cell]) -> list[str]:
    """Return the lines of a row's note, in which libraries with the same numbers stand together."""
    alike: dict[str, list[str]] = {}
    for name, cell in ran.items():
        if note := _note(cell):
            alike.setdefault(note, []).append(name)
    said = [f"{' and '.join(names)}: {note}" for note, names in alike.items()]
    return _wrapped(f"- **{number}** {'. '.join(said)}.") if said else []


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 130, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _when(cells: dict[str, Cell]) -> str:
    """Return the days and the versions of the cells."""
    days = sorted({cell.date for cell in cells.values()})
    named = {one.name: one.distribution for one in LIBRARIES}
    versions = sorted({f"{named[key.partition(' ')[2]]} {cell.version}" for key, cell in cells.items()})
    return f"Run on {' to '.join(dict.fromkeys((days[0], days[-1])))}: {', '.join(versions)}."


def _word(cell: Cell) -> str:
    """Return the word of the way that was right, or else of the first."""
    way, word, _ = cell.tries[-1] if cell.tries[-1][1] == "right" else cell.tries[0]
    if word == "right":
        return "right\\*" if way else "right"
    return f"**{word}**" if word == "wrong" else word


def _note(cell: Cell) -> str:
    """Return what each way has shown, unless all there is to say is the word."""
    said = [f"{way or 'plain'}, {word}" + (f" ({detail})" if detail else "") for way, word, detail in cell.tries]
    return "" if said == ["plain, right"] else "; ".join(said)
