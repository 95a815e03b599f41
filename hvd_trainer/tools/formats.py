"""How the tools write figures, and what they need to draw them."""

from __future__ import annotations

import importlib.util

from hvd_trainer.errors import OptionError

NEEDED = ("jinja2", "matplotlib", "rich", "scipy")


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
