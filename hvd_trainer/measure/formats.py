"""Format figures, and check for the packages that draw tables and plots."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from hvd_trainer.errors import OptionError
from hvd_trainer.utils.text import install_extra

NEEDED = ("jinja2", "matplotlib", "rich", "scipy")


def number(value: float) -> str:
    """Return a number with three significant digits at least, and commas between thousands."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def milliseconds(seconds: float) -> str:
    return number(1000 * seconds)


def percent(fraction: float) -> str:
    return f"{fraction:.1%}"


def to_json(value: Any) -> str:
    """Return a report as JSON; NaN and infinities become null, and values of types that it does not have text."""

    def plain(part: Any) -> Any:
        return dict(part) if isinstance(part, Mapping) else float(part) if isinstance(part, float) else str(part)

    return msgspec.json.format(msgspec.json.encode(value, enc_hook=plain), indent=1).decode() + "\n"


def check_installed(*names: str) -> None:
    """Check for the packages that a command needs to show its results.

    Args:
        names: of the packages; all that make tables, pictures and pages if there are none.

    Raises:
        OptionError: a package is missing that makes the tables or the pictures.
    """
    missing = [name for name in names or NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise OptionError(
            f"The tables and pictures of this tool need {' and '.join(missing)}, which "
            f"{'is' if len(missing) == 1 else 'are'} not installed. Type: {install_extra('tools')}"
        )


def render_page(template: Path, **values: Any) -> str:
    """Return a page that a template makes, in which all values are text; it loads nothing from the network."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # What came from the command line or from a failed run is never a part of the page.
    loader = FileSystemLoader([template.parent, Path(__file__).parent])
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template.name).render(**values) + "\n"
