"""A grid as a heat map: chunks against batch size, one panel for each number of ranks and stages.

    ranks 2, stages 1            ranks 2, stages 2
64   | 310 | 305 | 290 |         | /// | 402 | 455 |      the number is what the colour says
32   | 300 | 290 | 260 |         | /// | 380 | 401 |      /// is impossible
        1     2     4               1     2     4
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hvd_trainer.tools.grid.configurations import ABSENT, Axis, label
from hvd_trainer.tools.grid.rows import Row
from hvd_trainer.tools.runner.formats import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure

FIRST = ("chunks", "batch_size")
"""The axes of a panel, if they have several values."""
LAST = ("stages", "ranks")
"""Those that make panels before all others do."""
CELL_WIDTH, CELL_HEIGHT, LEAST_WIDTH = 0.78, 0.5, 2.1
"""Inches; a panel is at least as wide as its title."""
HEADING_SIZE, LETTERS_PER_INCH = 11, 10
"""Points, and how many letters of that size are sure to fit."""
MOST_ACROSS = 4
"""Panels side by side."""
DARK = 0.5
"""The lightness, from 0 to 1, below which a colour needs white figures."""
IMPOSSIBLE: dict[str, Any] = {"facecolor": "0.95", "edgecolor": "0.7", "linewidth": 0, "hatch": "////"}
BETWEEN: dict[str, Any] = {"edgecolor": "white", "linewidth": 1.5}


class Quantity(NamedTuple):
    """What is drawn."""

    figure: str
    title: str
    best: Callable[[Iterable[float]], float]
    """which of all values is written in bold"""
    colours: str
    """a colour map of matplotlib, even in lightness, so that it can be read in grey as well"""
    name: str
    """of the files"""


QUANTITIES = (
    Quantity("samples_per_s", "throughput, samples/s", max, "viridis", "throughput"),
    Quantity("peak_memory_mb", "peak memory, MB", min, "BuPu", "memory"),
)


class Shades(NamedTuple):
    """How a figure becomes a colour."""

    figure: str
    colours: Colormap
    scale: Normalize
    best: float


class Panel(NamedTuple):
    """The configurations that agree on all axes but two."""

    title: str
    rows: Sequence[Row]


def draw(rows: Sequence[Row], axes: Sequence[Axis], quantity: Quantity, heading: str, folder: Path) -> list[Path]:
    """Writes NAME.png and NAME.svg; nothing where no configuration has the figure.

    Returns:
        The files.
    """
    values = [row.figures[quantity.figure] for row in rows if quantity.figure in row.figures]
    if not values:
        return []
    from matplotlib import colormaps, rc_context
    from matplotlib.colors import Normalize

    # From 0, so that twice the way along the colours is twice the figure.
    scale, colours = Normalize(0, max(values) or 1), colormaps[quantity.colours]
    shades = Shades(quantity.figure, colours, scale, quantity.best(values))
    files = [folder / f"{quantity.name}.{kind}" for kind in ("png", "svg")]
    # Text stays text in the SVG: it can be searched, and read aloud.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": heading, "hatch.linewidth": 0.6, "font.size": 9}):
        figure = make_figure(rows, axes, shades, quantity.title)
        set_heading(figure, heading)
        for file in files:
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


def set_heading(figure: Figure, heading: str) -> None:
    """Writes it over the figure, in as many lines as it takes, for which the figure grows."""
    lines = textwrap.wrap(heading, int(figure.get_figwidth() * LETTERS_PER_INCH), break_on_hyphens=False)
    figure.suptitle("\n".join(lines), fontsize=HEADING_SIZE)
    figure.set_figheight(figure.get_figheight() + (len(lines) - 1) * HEADING_SIZE * 1.2 / 72)


def make_figure(rows: Sequence[Row], axes: Sequence[Axis], shades: Shades, title: str) -> Figure:
    """All panels, the scale of their colours, and what the hatching means."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    across, up = inner_axes(axes)
    panels = list(panels_of(rows, axes, across, up))
    columns = columns_for(len(panels), [axis for axis in axes if axis not in (across, up)])
    lines = -(-len(panels) // columns)
    width = max(len(across.values) * CELL_WIDTH, LEAST_WIDTH) * columns + 2
    height = (len(up.values) * CELL_HEIGHT + 0.8) * lines + 0.8
    figure = Figure(figsize=(max(width, 4.5), max(height, 2.6)), layout="constrained")
    places = figure.subplots(lines, columns, squeeze=False).flatten()
    for place, panel in zip(places, panels, strict=False):
        draw_panel(place, panel, across, up, shades)
    for place in places[len(panels) :]:
        place.set_axis_off()
    for place in places[::columns]:
        place.set_ylabel(label(up.name))
    figure.colorbar(
        ScalarMappable(shades.scale, shades.colours), ax=list(places), label=title, format="{x:,.0f}", pad=0.02
    )
    if any(row.state == "impossible" for row in rows):
        handles = [Patch(label="impossible", **IMPOSSIBLE)]
        figure.legend(handles=handles, loc="outside lower right", frameon=False)
    return figure


def inner_axes(axes: Sequence[Axis]) -> tuple[Axis, Axis]:
    """The two axes of every panel: chunks and batch size, or else those that have most values."""

    def rank(axis: Axis) -> tuple[bool, int, int]:
        first = FIRST.index(axis.name) if axis.name in FIRST else len(FIRST)
        return axis.name in LAST, first, -len(axis.values)

    nothing = Axis("", ("",))
    across, up, *_ = [*sorted((axis for axis in axes if len(axis.values) > 1), key=rank), nothing, nothing]
    return across, up


def panels_of(rows: Sequence[Row], axes: Sequence[Axis], across: Axis, up: Axis) -> Iterator[Panel]:
    """The panels in the order of the rows; a title names what has several values."""
    outer = [axis for axis in axes if axis not in (across, up)]
    grouped: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        grouped.setdefault(tuple(row.configuration.values[axis.name] for axis in outer), []).append(row)
    for values, of_it in grouped.items():
        named = zip(outer, values, strict=True)
        title = [
            f"{label(axis.name)} {value}" for axis, value in named if len(axis.values) > 1 and value != ABSENT
        ]
        yield Panel(", ".join(title), of_it)


def columns_for(count: int, outer: Sequence[Axis]) -> int:
    """How many panels stand side by side: those that differ in the last axis only, if they make whole lines."""
    last = [len(axis.values) for axis in outer if len(axis.values) > 1][-1:] or [1]
    return (
        last[0] if last[0] <= MOST_ACROSS and count % last[0] == 0 and count > last[0] else min(count, MOST_ACROSS)
    )


def draw_panel(place: Axes, panel: Panel, across: Axis, up: Axis, shades: Shades) -> None:
    """One panel with its cells and its values on both axes."""
    for row in panel.rows:
        for x in _positions(row, across):
            for y in _positions(row, up):
                _draw_cell(place, x, y, row, shades)
    place.set_title(panel.title, fontsize=9)
    place.set_xlim(-0.5, len(across.values) - 0.5)
    place.set_ylim(-0.5, len(up.values) - 0.5)
    place.set_xticks(range(len(across.values)), across.values)
    place.set_yticks(range(len(up.values)), up.values)
    place.set_xlabel(label(across.name))
    place.tick_params(length=0)
    place.spines[:].set_visible(False)


def _positions(row: Row, axis: Axis) -> Sequence[int]:
    """Where a row is on an axis: everywhere, if the axis has nothing to say to it."""
    value = row.configuration.values.get(axis.name, "")
    return range(len(axis.values)) if value == ABSENT else [axis.values.index(value)]


def _draw_cell(place: Axes, x: int, y: int, row: Row, shades: Shades) -> None:
    from matplotlib.patches import Rectangle

    corner, value = (x - 0.5, y - 0.5), row.figures.get(shades.figure)
    if value is not None:
        red, green, blue, opaque = shades.colours(shades.scale(value))
        # Rec. 601: how light the eye finds a colour.
        light = 0.299 * red + 0.587 * green + 0.114 * blue
        place.add_patch(Rectangle(corner, 1, 1, facecolor=(red, green, blue, opaque), **BETWEEN))
        place.text(
            *(x, y, number(value)),
            color="white" if light < DARK else "black",
            weight="bold" if value == shades.best else "normal",
            ha="center",
            va="center",
        )
        return
    look = IMPOSSIBLE if row.state == "impossible" else {**IMPOSSIBLE, "hatch": None}
    place.add_patch(Rectangle(corner, 1, 1, **look))
    place.add_patch(Rectangle(corner, 1, 1, facecolor="none", **BETWEEN))
    if row.state != "impossible":
        place.text(x, y, row.state, ha="center", va="center", color="0.35", fontsize=7)
