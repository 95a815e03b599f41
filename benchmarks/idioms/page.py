"""The table of all rows and libraries, with its notes."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.idioms.libraries import LIBRARIES
from benchmarks.idioms.rows import ROWS
from benchmarks.idioms.verdict import Verdict

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
        found = {one.name: cells[f"{number} {one.name}"] for one in libraries if f"{number} {one.name}" in cells}
        words = [_word(found[one.name]) if one.name in found else "" for one in libraries]
        lines.append(f"| {number} | {row.title} | {row.right} | {' | '.join(words)} |")
        said = [f"{name}: {note}" for name, cell in found.items() if (note := _note(cell))]
        if said:
            notes.append(f"- **{number}** " + ". ".join(said) + ".")
    return "\n".join(["", _when(cells), "", *lines, "", *notes, "", ""])


def _when(cells: dict[str, Cell]) -> str:
    """Return the days and the versions of the cells."""
    days = sorted({cell.date for cell in cells.values()})
    named = {one.name: one.distribution for one in LIBRARIES}
    versions = sorted({f"{named[key.partition(' ')[2]]} {cell.version}" for key, cell in cells.items()})
    return f"Run on {' to '.join(dict.fromkeys((days[0], days[-1])))}: {', '.join(versions)}."


def _chosen(cell: Cell) -> tuple[str, Verdict]:
    """Return the way that was right, or else the first."""
    way, word, detail = cell.tries[-1] if cell.tries[-1][1] == "right" else cell.tries[0]
    return way, Verdict(word, detail)  # type: ignore[arg-type]  # read from JSON


def _word(cell: Cell) -> str:
    way, verdict = _chosen(cell)
    if verdict.word == "right":
        return "right\\*" if way else "right"
    return f"**{verdict.word}**" if verdict.word == "wrong" else verdict.word


def _note(cell: Cell) -> str:
    """Return with what it is right, and what the other ways have shown."""
    chosen, verdict = _chosen(cell)
    said = [f"with {chosen}" if chosen else "", verdict.text if verdict.detail else ""]
    for way, word, detail in cell.tries:
        if way != chosen:
            said.append(f"{f'with {way}' if way else 'without'} {word} ({detail})")
    return "; ".join(part for part in said if part)
