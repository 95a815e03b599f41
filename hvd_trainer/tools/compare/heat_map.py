"""A comparison with varied options as a heat map: chunks against batch size, a panel for each other combination.

    ranks 2, stages 1            ranks 2, stages 2
64   | 310 | 305 | 290 |         | /// | 402 | 455 |      the number is what the colour says
32   | 300 | 290 | 260 |         | /// | 380 | 401 |      /// is impossible
        1     2     4               1     2     4
"""

from __future__ import annotations

import io
import itertools
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hvd_trainer.tools.compare.result import Comparison, TrialResult
from hvd_trainer.tools.compare.trials import ENTRIES, RANKS
from hvd_trainer.tools.compare.variants import NOT_APPLICABLE, Axis
from hvd_trainer.tools.runner.formats import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
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
STYLE = {"hatch.linewidth": 0.6, "font.size": 9}


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


def svg(comparison: Comparison, quantity: Quantity) -> str:
    """Return the heat map as an element of a page; empty where `draw` returns None."""
    with drawing_style(quantity.name, STYLE):
        figure = draw(comparison, quantity)
        return "" if figure is None else as_element(figure)


def write(comparison: Comparison, quantity: Quantity, heading: str, folder: Path) -> list[Path]:
    """Write NAME.png and NAME.svg, and return their paths; none where `draw` returns None."""
    files = [folder / f"{quantity.name}.{kind}" for kind in ("png", "svg")]
    with drawing_style(heading, STYLE):
        if (figure := draw(comparison, quantity)) is None:
            return []
        set_heading(figure, heading)
        for file in files:
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


def drawing_style(salt: str, style: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Return a context in which figures must be drawn and saved, too.

    Args:
        salt: from which names in the SVG are made, so that the same figures have the same ones.
        style: settings of matplotlib.
    """
    from matplotlib import rc_context

    # Text stays text in the SVG: it can be searched, and read aloud.
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": salt, **style}
    return rc_context(settings)


def as_element(figure: Figure) -> str:
    """Return a figure as SVG without its header: an element of a page."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def set_heading(figure: Figure, heading: str) -> None:
    """Write a heading over the figure, and make the figure higher for each line that it takes."""
    lines = textwrap.wrap(heading, int(figure.get_figwidth() * LETTERS_PER_INCH), break_on_hyphens=False)
    figure.suptitle("\n".join(lines), fontsize=HEADING_SIZE)
    figure.set_figheight(figure.get_figheight() + (len(lines) - 1) * HEADING_SIZE * 1.2 / 72)


def draw(comparison: Comparison, quantity: Quantity) -> Figure | None:
    """Return all panels, the scale of their colours, and what the hatching means.

    None where no option is varied, or no trial has the figure.
    """
    found = (its.median(quantity.figure) for its in comparison.results)
    values = [value for value in found if value is not None]
    if not values or not any(axis.varies for axis in comparison.varied):
        return None
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.patches import Patch

    axes = comparison.axes
    across, up = inner_axes(axes)
    panels = panels_of(comparison.results, axes, across, up)
    columns = columns_for(len(panels), [axis for axis in axes if axis not in (across, up)])
    figure, places = _lay_out(len(panels), columns, across, up)
    # From 0, so that twice the way along the colours is twice the figure.
    shades = ScalarMappable(Normalize(0, max(values) or 1), quantity.colours)
    for place, (title, results) in zip(places, panels.items(), strict=False):
        place.set_title(title, fontsize=9)
        for its in results:
            for x, y in itertools.product(_positions(its, across), _positions(its, up)):
                _draw_cell(place, x, y, its, its.median(quantity.figure), shades, quantity.best(values))
    figure.colorbar(shades, ax=places, label=quantity.title, format="{x:,.0f}", pad=0.02)
    if any(its.state == "impossible" for its in comparison.results):
        handles = [Patch(label="impossible", **IMPOSSIBLE)]
        figure.legend(handles=handles, loc="outside lower right", frameon=False)
    return figure


def _lay_out(count: int, columns: int, across: Axis, up: Axis) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` empty panels and their axes; places that are left over are blank."""
    from matplotlib.figure import Figure

    lines = -(-count // columns)
    width = max(len(across.values) * CELL_WIDTH, MIN_WIDTH) * columns + 2
    height = (len(up.values) * CELL_HEIGHT + 0.8) * lines + 0.8
    figure = Figure(figsize=(max(width, 4.5), max(height, 2.6)), layout="constrained")
    places = list(figure.subplots(lines, columns, squeeze=False).flatten())
    for place in places[:count]:
        place.set_xlim(-0.5, len(across.values) - 0.5)
        place.set_ylim(-0.5, len(up.values) - 0.5)
        place.set_xticks(range(len(across.values)), across.values)
        place.set_yticks(range(len(up.values)), up.values)
        place.set_xlabel(across.label)
        place.tick_params(length=0)
        place.spines[:].set_visible(False)
    for place in places[count:]:
        place.set_axis_off()
    for place in places[::columns]:
        place.set_ylabel(up.label)
    return figure, places


def inner_axes(axes: Sequence[Axis]) -> tuple[Axis, Axis]:
    """Return the two axes of every panel: chunks and batch size, or else those that have most values."""

    def rank(axis: Axis) -> tuple[bool, int, int]:
        first = INNER.index(axis.name) if axis.name in INNER else len(INNER)
        return axis.name in OUTER, first, -len(axis.values)

    nothing = Axis("", ("",))
    across, up, *_ = [*sorted((axis for axis in axes if axis.varies), key=rank), nothing, nothing]
    return across, up


def panels_of(
    results: Sequence[TrialResult], axes: Sequence[Axis], across: Axis, up: Axis
) -> dict[str, list[TrialResult]]:
    """Return the trials of each panel in their order, by its title: the values on all other axes."""
    outer = [axis for axis in axes if axis not in (across, up) and axis.varies]
    panels: dict[str, list[TrialResult]] = {}
    for its in results:
        values = ((axis.label, its.trial.values[axis.name]) for axis in outer)
        title = ", ".join(f"{label} {value}" for label, value in values if value != NOT_APPLICABLE)
        panels.setdefault(title, []).append(its)
    return panels


def columns_for(count: int, outer: Sequence[Axis]) -> int:
    """Return how many panels stand side by side: those that differ in the last axis only, if these fill lines."""
    last = [len(axis.values) for axis in outer if axis.varies][-1:] or [1]
    return (
        last[0] if last[0] <= MAX_ACROSS and count % last[0] == 0 and count > last[0] else min(count, MAX_ACROSS)
    )


def _positions(its: TrialResult, axis: Axis) -> Sequence[int]:
    """Return where a trial is on an axis: everywhere, if the axis does not apply to it."""
    value = its.trial.values.get(axis.name, "")
    return range(len(axis.values)) if value == NOT_APPLICABLE else [axis.values.index(value)]


def _draw_cell(
    place: Axes, x: int, y: int, its: TrialResult, value: float | None, shades: ScalarMappable, best: float
) -> None:
    from matplotlib.patches import Rectangle

    look, text, font = IMPOSSIBLE, "", dict[str, Any]()
    if value is not None:
        red, green, blue, _ = colour = shades.to_rgba(np.asarray(value))
        # Rec. 601: how light the eye finds a colour.
        light = 0.299 * red + 0.587 * green + 0.114 * blue
        look, text = {"facecolor": colour}, number(value)
        font = {"color": "white" if light < DARK else "black", "weight": "bold" if value == best else "normal"}
    elif its.state != "impossible":
        look, text, font = {**IMPOSSIBLE, "hatch": None}, its.state, {"color": "0.35", "fontsize": 7}
    place.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, **look))
    place.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor="none", **BETWEEN))
    place.text(x, y, text, ha="center", va="center", **font)
