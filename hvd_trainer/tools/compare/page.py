"""The page of a comparison: one file, without scripts and without anything from the network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvd_trainer.tools.compare.plots import pictures
from hvd_trainer.tools.compare.result import Comparison

TEMPLATE = Path(__file__).with_name("page.html.j2")


def write_page(
    comparison: Comparison,
    file: Path,
    *,
    heading: str,
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]],
    conditions: Sequence[str],
    deviations: Sequence[str],
    troubles: Sequence[str],
) -> None:
    """Write the page of a comparison to a file.

    Args:
        heading: the job.
        tables: title, titles of the columns, and rows.
        conditions, deviations, troubles: sentences.
    """
    from jinja2 import Environment

    # What came from the command line or from a failed run is text, and never a part of the page.
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE.read_text())
    page = template.render(
        heading=heading,
        pairs=comparison.pairs,
        tables=tables,
        pictures=pictures(comparison),
        conditions=conditions,
        deviations=deviations,
        troubles=troubles,
    )
    file.write_text(page + "\n")
