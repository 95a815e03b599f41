"""Charts of matplotlib as elements of a page: SVG whose text stays text, in the colours of the page."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from hvd_trainer.measure.report import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SVG_DPI = 72
"""Dots per inch: SVG has these, whatever a figure is told."""
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


MAX_VALUES = 100
"""Points of a line whose values are shown under the mouse."""
ROOM = 0.05
"""Fraction of a chart's width that the name of a mark takes."""
EXTRA_WIDTH = 3.0
"""Points by which the first of several lines is wider: it is seen beneath an equal one."""
Points = Sequence[tuple[float, float]]


class Value(NamedTuple):
    """A place in a chart, with the text that a browser shows there under the mouse."""

    axes: Axes
    x: float
    y: float
    text: str


class Style(NamedTuple):
    """How a line is drawn."""

    colour: int
    """its number in `COLOURS`"""
    dash: str = "-"


@contextmanager
def figure_in(style: Mapping[Any, Any], size: tuple[float, float]) -> Iterator[Figure]:
    """Give a figure of so many inches in a style."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(dict(style)):
        yield Figure(size, dpi=SVG_DPI, layout="constrained")


def as_element(figure: Figure, values: Iterable[Value] = ()) -> str:
    """Return a figure as SVG without its header: an element of a page. Each value has a place of its own in it."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue().replace(INK, "currentColor").replace(GRID, "var(--line)")
    height, places = figure.bbox.height, []
    for axes, x, y, said in values:
        across, up = axes.transData.transform((x, y))  # as it was laid out for the file
        at = f'cx="{across:.1f}" cy="{height - up:.1f}" r="6"'
        places.append(f'<circle class="value" {at}><title>{escape(said)}</title></circle>')
    return text[text.index("<svg") :].replace("</svg>", "".join(places) + "</svg>")


def draw_lines(
    title: str,
    text: str,
    lines: Mapping[str, Points],
    *,
    across: str,
    up: str = "",
    styles: Mapping[str, Style] = MappingProxyType({}),
    marks: Sequence[tuple[float, str]] = (),
    from_zero: bool = False,
) -> list[Picture]:
    """Return a chart of lines by their names; nothing without points, or with more lines than colours.

    Args:
        styles: by the names of lines; without any, each has a colour of its own.
        marks: places across, with what happened there; the first of several at one place is named.
        from_zero: whether heights are compared, so that the axis upwards begins at 0.
    """
    from matplotlib.ticker import MaxNLocator

    lines = {name: points for name, points in lines.items() if points}
    styles = styles or {name: Style(number) for number, name in enumerate(lines)}
    num_colours = max((styles[name].colour for name in lines), default=-1) + 1
    if not 0 < num_colours <= len(COLOURS):
        return []
    with figure_in(STYLE, SIZE) as figure:
        axes, values = figure.subplots(), []
        for name, points in lines.items():
            (colour, dash), marker = styles[name], "." if len(points) < 60 else ""
            # The first are wider: they are seen beneath others of the same values.
            width = 1.5 + EXTRA_WIDTH * (1 - (colour + 1) / num_colours)
            look: dict[str, Any] = {
                "color": COLOURS[colour],
                "marker": marker,
                "linewidth": width,
                "label": "line",
            }
            axes.plot(*zip(*points, strict=True), dash, **look)
            for x, y in points[:: math.ceil(len(points) / MAX_VALUES)]:
                values.append(Value(axes, x, y, f"{name}, {across} {x:g}: {y:.6g}"))
        named: list[float] = []
        low, high = axes.get_xlim()
        for place, mark in marks:
            axes.axvline(place, color=INK, linestyle=":", linewidth=1)
            if all(abs(place - other) > ROOM * (high - low) for other in named):
                named.append(place)
                at = axes.get_xaxis_transform()
                axes.text(place, 1, f" {mark}", transform=at, rotation=90, va="top", fontsize=7)
        axes.set(xlabel=across, ylabel=up)
        if all(isinstance(x, int) for points in lines.values() for x, _ in points):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if from_zero:
            axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # room for the highest point
        if len(lines) > 1:
            # As labels, names that begin with `_` would be left out.
            handles, _ = axes.get_legend_handles_labels()
            figure.legend(handles, list(lines), loc="outside lower left", frameon=False)
        top = axes.get_ylim()[1]
        values += [Value(axes, place, top, f"{mark}, {across} {place:.4g}") for place, mark in marks]
        return [Picture(title, text, as_element(figure, values))]
