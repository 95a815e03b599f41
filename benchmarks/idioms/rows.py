"""All rows, by their numbers: those of the two lists that users' reports were made into."""

from __future__ import annotations

from benchmarks.idioms import data_rows, model_rows, training_rows
from benchmarks.idioms.idiom import Idiom


def _place(row: type[Idiom]) -> tuple[str, int, str]:
    """Rows 1 to 16, then loaders (L) and schedulers (S)."""
    digits = "".join(c for c in row.number if c.isdigit())
    return row.number[0] if row.number[0].isalpha() else "", int(digits), row.number


ROWS: dict[str, type[Idiom]] = {
    row.number: row for row in sorted((*model_rows.ROWS, *data_rows.ROWS, *training_rows.ROWS), key=_place)
}
