"""A comparison with varied options as a heat map: chunks against batch size, a panel for each other combination.

    ranks 2, stages 1            ranks 2, stages 2
64   | 310 | 305 | 290 |         | /// | 402 | 455 |      the number is what the colour says
32   | 300 | 290 | 260 |         | /// | 380 | 401 |      /// is impossible
        1     2     4               1     2     4
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hvd_trainer.tools.compare.result import Comparison, TrialResult
from hvd_trainer.tools.compare.trials import ENTRIES, RANKS
from hvd_trainer.tools.compare.variants import NOT_APPLICABLE, Axis
from hvd_trainer.tools.runner.formats import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure

INNER = ("chunks", "batch_size")
"""The axes of a panel, if they have several values."""
OUTER = ("stages", RANKS, ENTRIES)
"""Those that make panels before all others do."""
CELL_WIDTH, CELL_HEIGHT, MIN_WIDTH = 0.78, 0.5, 2.1
"""Inches; a panel is at least as wide as its title."""
HEADING_SIZE, LETTERS_PER_INCH = 11, 10
"""Points, and how many letters of that size are sure to fit."""
MAX_ACROSS = 4
"""Panels side by side."""
DARK = 0.5
"""The lightness, from 0 to 1, below which a colour needs white figures."""
IMPOSSIBLE: dict[str, Any] = {"facecolor": "0.95", "edgecolor": "0.7", "linewidth": 0, "hatch": "////"}
BETWEEN: dict[str, Any] = {"edgecolor": "white", "linewidth": 1.5}


class Quantity(NamedTuple):
    """A figure that is drawn."""

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
    """The trials that agree on all axes but two."""

    title: str
    results: Sequence[TrialResult]


def write(comparison: Comparison, quantity: Quantity, heading: str, folder: Path) -> list[Path]:
    """Write NAME.png and NAME.svg, and return their paths; none where `draw` returns None."""
    if (figure := draw(comparison, quantity)) is None:
        return []
    files = [folder / f"{quantity.name}.{kind}" for kind in ("png", "svg")]
    with _style(heading):
        set_heading(figure, heading)
        for file in files:
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


def draw(comparison: Comparison, quantity: Quantity) -> Figure | None:
    """Return the heat map; None where no option is varied, or no trial has the figure."""
    found = (its.median(quantity.figure) for its in comparison.results)
    values = [value for value in found if value is not None]
    if not values or not any(axis.varies for axis in comparison.varied):
        return None
    from matplotlib import colormaps
    from matplotlib.colors import Normalize

    # From 0, so that twice the way along the colours is twice the figure.
    scale, colours = Normalize(0, max(values) or 1), colormaps[quantity.colours]
    with _style(quantity.name):
        return make_figure(
            comparison, Shades(quantity.figure, colours, scale, quantity.best(values)), quantity.title
        )


def _style(salt: str) -> AbstractContextManager[None]:
    from matplotlib import rc_context

    # Text stays text in the SVG: it can be searched, and read aloud.
    return rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "hatch.linewidth": 0.6, "font.size": 9})


def set_heading(figure: Figure, heading: str) -> None:
    """Write a heading over the figure, and make the figure higher for each line that it takes."""
    lines = textwrap.wrap(heading, int(figure.get_figwidth() * LETTERS_PER_INCH), break_on_hyphens=False)
    figure.suptitle("\n".join(lines), fontsize=HEADING_SIZE)
    figure.set_figheight(figure.get_figheight() + (len(lines) - 1) * HEADING_SIZE * 1.2 / 72)


def make_figure(comparison: Comparison, shades: Shades, title: str) -> Figure:
    """Return all panels, the scale of their colours, and what the hatching means."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    axes = comparison.axes
    across, up = inner_axes(axes)
    panels = list(panels_of(comparison.results, axes, across, up))
    columns = columns_for(len(panels), [axis for axis in axes if axis not in (across, up)])
    lines = -(-len(panels) // columns)
    width = max(len(across.values) * CELL_WIDTH, MIN_WIDTH) * columns + 2
    height = (len(up.values) * CELL_HEIGHT + 0.8) * lines + 0.8
    figure = Figure(figsize=(max(width, 4.5), max(height, 2.6)), layout="constrained")
    places = figure.subplots(lines, columns, squeeze=False).flatten()
    for place, panel in zip(places, panels, strict=False):
        draw_panel(place, panel, across, up, shades)
    for place in places[len(panels) :]:
        place.set_axis_off()
    for place in places[::columns]:
        place.set_ylabel(up.label)
    figure.colorbar(
        ScalarMappable(shades.scale, shades.colours), ax=list(places), label=title, format="{x:,.0f}", pad=0.02
    )
    if any(its.state == "impossible" for its in comparison.results):
        handles = [Patch(label="impossible", **IMPOSSIBLE)]
        figure.legend(handles=handles, loc="outside lower right", frameon=False)
    return figure


def inner_axes(axes: Sequence[Axis]) -> tuple[Axis, Axis]:
    """Return the two axes of every panel: chunks and batch size, or else those that have most values."""

    def rank(axis: Axis) -> tuple[bool, int, int]:
        first = INNER.index(axis.name) if axis.name in INNER else len(INNER)
        return axis.name in OUTER, first, -len(axis.values)

    nothing = Axis("", ("",))
    across, up, *_ = [*sorted((axis for axis in axes if axis.varies), key=rank), nothing, nothing]
    return across, up


def panels_of(results: Sequence[TrialResult], axes: Sequence[Axis], across: Axis, up: Axis) -> Iterator[Panel]:
    """Yield the panels in the order of the trials; a title names what has several values."""
    outer = [axis for axis in axes if axis not in (across, up)]
    grouped: dict[tuple[str, ...], list[TrialResult]] = {}
    for its in results:
        grouped.setdefault(tuple(its.trial.values[axis.name] for axis in outer), []).append(its)
    for values, of_it in grouped.items():
        named = zip(outer, values, strict=True)
        title = [f"{axis.label} {value}" for axis, value in named if axis.varies and value != NOT_APPLICABLE]
        yield Panel(", ".join(title), of_it)


def columns_for(count: int, outer: Sequence[Axis]) -> int:
    """Return how many panels stand side by side: those that differ in the last axis only, if these fill lines."""
    last = [len(axis.values) for axis in outer if axis.varies][-1:] or [1]
    return (
        last[0] if last[0] <= MAX_ACROSS and count % last[0] == 0 and count > last[0] else min(count, MAX_ACROSS)
    )


def draw_panel(place: Axes, panel: Panel, across: Axis, up: Axis, shades: Shades) -> None:
    """Draw one panel with its cells and its values on both axes."""
    for its in panel.results:
        for x in _positions(its, across):
            for y in _positions(its, up):
                _draw_cell(place, x, y, its, shades)
    place.set_title(panel.title, fontsize=9)
    place.set_xlim(-0.5, len(across.values) - 0.5)
    place.set_ylim(-0.5, len(up.values) - 0.5)
    place.set_xticks(range(len(across.values)), across.values)
    place.set_yticks(range(len(up.values)), up.values)
    place.set_xlabel(across.label)
    place.tick_params(length=0)
    place.spines[:].set_visible(False)


def _positions(its: TrialResult, axis: Axis) -> Sequence[int]:
    """Return where a trial is on an axis: everywhere, if the axis does not apply to it."""
    value = its.trial.values.get(axis.name, "")
    return range(len(axis.values)) if value == NOT_APPLICABLE else [axis.values.index(value)]


def _draw_cell(place: Axes, x: int, y: int, its: TrialResult, shades: Shades) -> None:
    from matplotlib.patches import Rectangle

    corner, value = (x - 0.5, y - 0.5), its.median(shades.figure)
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
    look = IMPOSSIBLE if its.state == "impossible" else {**IMPOSSIBLE, "hatch": None}
    place.add_patch(Rectangle(corner, 1, 1, **look))
    place.add_patch(Rectangle(corner, 1, 1, facecolor="none", **BETWEEN))
    if its.state != "impossible":
        place.text(x, y, its.state, ha="center", va="center", color="0.35", fontsize=7)
