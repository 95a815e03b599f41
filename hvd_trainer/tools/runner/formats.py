"""How the tools write figures, and what they need to draw them."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, TextIO

from hvd_trainer.errors import OptionError

if TYPE_CHECKING:
    from rich.console import Console

NEEDED = ("jinja2", "matplotlib", "rich", "scipy")


WIDE = 10_000
"""Columns for tables that go into a file."""


def number(value: float) -> str:
    """With three digits at least, and thousands apart."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def milliseconds(seconds: float) -> str:
    return number(1000 * seconds)


def percent(fraction: float) -> str:
    return f"{fraction:.1%}"


def more_or_less(fraction: float) -> str:
    return f"{fraction:+.0%}"


def check_installed() -> None:
    """Refuses to begin what could not be shown in the end.

    Raises:
        OptionError: a package is missing that makes the tables or the pictures.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise OptionError(
            f"The tables and pictures of this tool need {' and '.join(missing)}, which "
            f"{'is' if len(missing) == 1 else 'are'} not installed. Type: pip install 'hvd_trainer[tools]'"
        )


def console(out: TextIO | None = None) -> Console:
    """Where tables are printed: as wide as the terminal; into a file or a pipe, no line is broken."""
    from rich.console import Console

    file = out or sys.stdout
    wide = None if file.isatty() else WIDE
    return Console(file=file, width=wide, highlight=False, soft_wrap=wide is None)
