"""Charts of matplotlib as elements of a page: SVG whose text stays text, in the colours of the page."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hvd_trainer.measure.report import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (5.0, 3.2)
"""Inches: small, so that letters can still be read where a telephone makes it narrower."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#888888")
"""Okabe and Ito's palette, whose colours people with colour blindness can tell apart."""
INK, GRID = "#010203", "#010204"
"""Stand for the page's colours, which are dark or light."""
TEXT_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "the same figures have the same names",
    "savefig.transparent": True,
    "text.parse_math": False,  # names are those of the user's, and may have $ and _
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}
STYLE: dict[Any, Any] = {
    **TEXT_STYLE,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "axes.axisbelow": True,
}


@contextmanager
def figure_in(style: Mapping[Any, Any], size: tuple[float, float]) -> Iterator[Figure]:
    """Give a figure of so many inches in a style."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(dict(style)):
        yield Figure(size, layout="constrained")


def as_element(figure: Figure) -> str:
    """Return a figure as SVG without its header: an element of a page."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue().replace(INK, "currentColor").replace(GRID, "var(--line)")
    return text[text.index("<svg") :]


def add_legend(axes: Axes, names: Iterable[str]) -> None:
    """Add a legend of what has a label, by these names: as labels, those that begin with `_` would be left out."""
    for text, name in zip(axes.legend(frameon=False).get_texts(), names, strict=True):
        text.set_text(name)


def draw_lines(
    title: str,
    text: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    across: str,
    up: str = "",
    marks: Sequence[tuple[float, str]] = (),
    log: bool = False,
) -> list[Picture]:
    """Return a chart of lines by their names; nothing without points, or with more lines than colours.

    Args:
        marks: places across, with what happened there.
        log: whether the axis upwards is logarithmic.
    """
    from matplotlib.ticker import MaxNLocator

    lines = {name: points for name, points in lines.items() if points}
    if not 0 < len(lines) <= len(COLOURS):
        return []
    with figure_in(STYLE, SIZE) as figure:
        axes = figure.subplots()
        for place, mark in marks:
            axes.axvline(place, color=INK, linestyle=":", linewidth=1)
            axes.text(
                place, 1, f" {mark}", transform=axes.get_xaxis_transform(), rotation=90, va="top", fontsize=7
            )
        for colour, points in zip(COLOURS, lines.values(), strict=False):
            axes.plot(
                *zip(*points, strict=True), color=colour, marker="." if len(points) < 60 else "", label="line"
            )
        axes.set(xlabel=across, ylabel=up)
        if all(isinstance(x, int) for points in lines.values() for x, _ in points):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if log:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:.0e}")
        if len(lines) > 1:
            add_legend(axes, lines)
        return [Picture(title, text, as_element(figure))]
