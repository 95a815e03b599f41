"""A comparison with varied options as a heat map: chunks against batch size, a panel for each other combination.

    ranks 2, stages 1            ranks 2, stages 2
64   | 310 | 305 | 290 |         | /// | 402 | 455 |      the number is what the colour says
32   | 300 | 290 | 260 |         | /// | 380 | 401 |      /// has failed
        1     2     4               1     2     4
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hvd_trainer.measure.formats import number
from hvd_trainer.tools.compare.result import Comparison, TrialResult
from hvd_trainer.tools.compare.trials import ENTRIES, RANKS
from hvd_trainer.tools.compare.variants import Axis

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
EMPTY: dict[str, Any] = {"facecolor": "0.95", "edgecolor": "0.7", "linewidth": 0}
FAILED: dict[str, Any] = {**EMPTY, "hatch": "////"}
TEXT_STYLE: dict[Any, Any] = {"svg.fonttype": "none"}
"""Text stays text in the SVG: it can be searched, and read aloud."""
STYLE: dict[Any, Any] = {"hatch.linewidth": 0.6, "font.size": 9}


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


def write(comparison: Comparison, quantity: Quantity, heading: str, folder: Path) -> tuple[list[Path], str]:
    """Write NAME.png and NAME.svg; return their paths, and the heat map without heading as an element of a page.

    Nothing is written where `draw` returns None.
    """
    from matplotlib import rc_context

    files = [folder / f"{quantity.name}.{kind}" for kind in ("png", "svg")]
    # The same figures have the same names in the SVG.
    with rc_context({**TEXT_STYLE, **STYLE, "svg.hashsalt": quantity.name}):
        if (figure := draw(comparison, quantity)) is None:
            return [], ""
        element = as_element(figure)
        set_heading(figure, heading)
        for file in files:
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files, element


def as_element(figure: Figure) -> str:
    """Return a figure as SVG without its header: an element of a page."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()[out.getvalue().index("<svg") :]


def set_heading(figure: Figure, heading: str) -> None:
    """Write a heading over the figure, and make the figure higher for each line that it takes."""
    lines = textwrap.wrap(heading, int(figure.get_figwidth() * LETTERS_PER_INCH), break_on_hyphens=False)
    figure.suptitle("\n".join(lines), fontsize=HEADING_SIZE)
    figure.set_figheight(figure.get_figheight() + (len(lines) - 1) * HEADING_SIZE * 1.2 / 72)


def draw(comparison: Comparison, quantity: Quantity) -> Figure | None:
    """Return all panels, the scale of their colours, and what the hatching means.

    None where no option is varied, or no trial has the figure.
    """
    values = [value for its in comparison.results if (value := its.median(quantity.figure)) is not None]
    if not values or not any(axis.varies for axis in comparison.varied):
        return None
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    across, up = inner_axes(comparison.axes)
    panels = panels_of(comparison.results, comparison.axes, across, up)
    last = [len(axis.values) for axis in comparison.axes if axis not in (across, up) and axis.varies][-1:] or [1]
    # Side by side stand those that differ in the last axis only, if these fill lines.
    fills = last[0] <= MAX_ACROSS and len(panels) % last[0] == 0 and len(panels) > last[0]
    columns = last[0] if fills else min(len(panels), MAX_ACROSS)
    lines = -(-len(panels) // columns)
    width = max(len(across.values) * CELL_WIDTH, MIN_WIDTH) * columns + 2
    height = (len(up.values) * CELL_HEIGHT + 0.8) * lines + 0.8
    figure = Figure(figsize=(max(width, 4.5), max(height, 2.6)), layout="constrained")
    places = figure.subplots(lines, columns, squeeze=False).flatten()
    # From 0, so that twice the way along the colours is twice the figure.
    shades = ScalarMappable(Normalize(0, max(values) or 1), quantity.colours)
    for place, (title, results) in zip(places, panels.items(), strict=False):
        _set_up(place, title, across, up)
        for its in results:
            x, y = _position(its, across), _position(its, up)
            _draw_cell(place, x, y, its, its.median(quantity.figure), shades, quantity.best(values))
    for place in places[len(panels) :]:
        place.set_axis_off()
    for place in places[::columns]:
        place.set_ylabel(up.label)
    figure.colorbar(shades, ax=places, label=quantity.title, format="{x:,.0f}", pad=0.02)
    if any(its.state == "failed" for its in comparison.results):
        handles = [Patch(label="failed", **FAILED)]
        figure.legend(handles=handles, loc="outside lower right", frameon=False)
    return figure


def _set_up(place: Axes, title: str, across: Axis, up: Axis) -> None:
    """Give an empty panel its title, and a cell for each pair of values."""
    place.set_title(title, fontsize=9)
    place.set(xlim=(-0.5, len(across.values) - 0.5), ylim=(-0.5, len(up.values) - 0.5), xlabel=across.label)
    place.set_xticks(range(len(across.values)), across.values)
    place.set_yticks(range(len(up.values)), up.values)
    place.tick_params(length=0)
    place.spines[:].set_visible(False)


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
        title = ", ".join(f"{label} {value}" for label, value in values)
        panels.setdefault(title, []).append(its)
    return panels


def _position(result: TrialResult, axis: Axis) -> int:
    """Return where a trial is on an axis."""
    return axis.values.index(result.trial.values.get(axis.name, ""))


def _draw_cell(
    place: Axes, x: int, y: int, its: TrialResult, value: float | None, shades: ScalarMappable, best: float
) -> None:
    from matplotlib.patches import Rectangle

    look, text, font = FAILED, "", dict[str, Any]()
    if value is not None:
        red, green, blue, _ = colour = shades.to_rgba(np.asarray(value))
        # Rec. 601: how light the eye finds a colour.
        light = 0.299 * red + 0.587 * green + 0.114 * blue
        look, text = {"facecolor": colour}, number(value)
        font = {"color": "white" if light < DARK else "black", "weight": "bold" if value == best else "normal"}
    elif its.state != "failed":
        look, text, font = EMPTY, its.state, {"color": "0.35", "fontsize": 7}
    place.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, **look))
    place.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor="none", edgecolor="white", linewidth=1.5))
    place.text(x, y, text, ha="center", va="center", **font)
