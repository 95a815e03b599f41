"""The pictures of a comparison, as SVG whose text stays text: it can be searched, and read aloud.

Speed by ranks is drawn small, so that its letters can still be read where a telephone makes it narrower. With
varied options there is a heat map: chunks against batch size, a panel for each other combination.

    ranks 2, stages 1            ranks 2, stages 2
64   | 310 | 305 | 290 |         | /// | 402 | 455 |      the number is what the colour says
32   | 300 | 290 | 260 |         | /// | 380 | 401 |      /// has failed
        1     2     4               1     2     4
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_trainer.measure.chart import COLOURS, SIZE, STYLE, TEXT_STYLE, as_element, figure_in
from hvd_trainer.measure.formats import number
from hvd_trainer.measure.report import Picture
from hvd_trainer.tools.compare.result import Comparison, Result
from hvd_trainer.tools.compare.trials import ENTRIES, RANKS
from hvd_trainer.tools.compare.variants import Axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INNER = ("chunks", "batch_size")
"""The axes of a panel, if they have several values."""
OUTER = ("stages", RANKS, ENTRIES)
"""The axes that make panels before all other axes do."""
CELL_WIDTH, CELL_HEIGHT, MIN_WIDTH = 0.78, 0.5, 2.1
"""Inches; a panel is at least as wide as its title."""
MAX_ACROSS = 4
"""Panels side by side."""
COLOUR_MAP = "viridis"
"""Even in lightness, so that it can be read in grey as well."""
DARK = 0.65
"""Of the highest figure, below which a colour needs white letters."""
FAILED: dict[str, Any] = {"facecolor": "0.95", "edgecolor": "0.7", "linewidth": 0, "hatch": "////"}
CENTRED: dict[str, Any] = {"ha": "center", "va": "center"}
MAP_STYLE: dict[Any, Any] = {**TEXT_STYLE, "hatch.linewidth": 0.6, "font.size": 9}


def draw_speed(results: Sequence[Result]) -> list[Picture]:
    """Return the picture; nothing without samples per second, or with more lines than there are colours."""
    lines: dict[str, list[Result]] = {}
    for result in results:
        if result.median("samples_per_s") is not None:
            lines.setdefault(result.trial.series, []).append(result)
    if not 0 < len(lines) <= len(COLOURS):
        return []
    with figure_in(STYLE, SIZE) as figure:
        axes = figure.subplots()
        for colour, (name, line) in zip(COLOURS, lines.items(), strict=False):
            ranks = [result.trial.ranks for result in line]
            spread = [result.by_round("samples_per_s").values() for result in line]
            rates = [median(values) for values in spread]
            below = [rate - min(values) for rate, values in zip(rates, spread, strict=True)]
            above = [max(values) - rate for rate, values in zip(rates, spread, strict=True)]
            axes.errorbar(ranks, rates, [below, above], color=colour, marker="o", capsize=3, label=name)
            if ranks[0] == 1 and len(ranks) > 1:
                axes.plot(ranks, [rates[0] * n for n in ranks], color=colour, linestyle=":", linewidth=1)
        numbers = sorted({result.trial.ranks for result in results})
        axes.set_xticks(numbers, [str(n) for n in numbers])
        axes.set_ylim(bottom=0)
        axes.set(xlabel="ranks", ylabel="samples/s")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.legend(frameon=False)
        svg = as_element(figure)
    text = "Medians, with the lowest and highest round. Dotted: as many times one rank."
    return [Picture("Samples per second by ranks", text, svg)]


def draw_heat_map(comparison: Comparison) -> list[Picture]:
    """Return the picture of the throughput by options; nothing where none is varied, or nothing was measured."""
    values = [value for its in comparison.results if (value := its.median("samples_per_s")) is not None]
    if not values or not any(axis.varies for axis in comparison.varied):
        return []
    from matplotlib import rc_context

    with rc_context(MAP_STYLE):
        svg = as_element(_draw_panels(comparison, values))
    text = "By options; the fastest is in bold."
    return [Picture("Heat map: throughput, samples/s", text, svg)]


def _draw_panels(comparison: Comparison, values: Sequence[float]) -> Figure:
    """Return all panels, the scale of their colours, and what the hatching means."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    across, up = inner_axes(comparison.axes)
    panels = panels_of(comparison.results, comparison.axes, across, up)
    # Side by side stand those that differ in the last axis only.
    last = [len(axis.values) for axis in comparison.axes if axis not in (across, up) and axis.varies][-1:] or [1]
    columns = min(last[0], MAX_ACROSS)
    lines = -(-len(panels) // columns)
    width = max(len(across.values) * CELL_WIDTH, MIN_WIDTH) * columns + 2
    height = (len(up.values) * CELL_HEIGHT + 0.8) * lines + 0.8
    figure = Figure(figsize=(max(width, 4.5), max(height, 2.6)), layout="constrained")
    places = figure.subplots(lines, columns, squeeze=False).flatten()
    # From 0, so that twice the way along the colours is twice the figure.
    shades = ScalarMappable(Normalize(0, max(values)), COLOUR_MAP)
    for place, (title, results) in zip(places, panels.items(), strict=False):
        place.set_title(title, fontsize=9)
        _draw_panel(place, results, across, up, best=max(values))
    for place in places[len(panels) :]:
        place.set_axis_off()
    for place in places[::columns]:
        place.set_ylabel(up.label)
    figure.colorbar(shades, ax=places, label="throughput, samples/s", format="{x:,.0f}", pad=0.02)
    if any(its.state == "failed" for its in comparison.results):
        figure.legend(handles=[Patch(label="failed", **FAILED)], loc="outside lower right", frameon=False)
    return figure


def _draw_panel(place: Axes, results: Sequence[Result], across: Axis, up: Axis, *, best: float) -> None:
    """Draw a cell for each pair of values, with its figure; where there is none, the hatching is seen."""
    rates = np.full((len(up.values), len(across.values)), np.nan)
    for its in results:
        x, y = (axis.values.index(its.trial.values.get(axis.name, "")) for axis in (across, up))
        rate = its.median("samples_per_s")
        if rate is not None:
            rates[y, x] = rate
            colour, weight = "white" if rate < DARK * best else "black", "bold" if rate == best else "normal"
            place.text(x, y, number(rate), color=colour, weight=weight, **CENTRED)
        elif its.state != "failed":
            place.text(x, y, its.state, **CENTRED, fontsize=7, backgroundcolor="0.95")
    place.patch.set(**FAILED)
    cells = range(len(across.values)), range(len(up.values)), rates
    place.pcolormesh(*cells, vmin=0, vmax=best, cmap=COLOUR_MAP, edgecolors="white", linewidth=1.5)
    place.set_xticks(range(len(across.values)), across.values)
    place.set_yticks(range(len(up.values)), up.values)
    place.set_xlabel(across.label)
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


def panels_of(results: Sequence[Result], axes: Sequence[Axis], across: Axis, up: Axis) -> dict[str, list[Result]]:
    """Return the trials of each panel in their order, by its title: the values on all other axes."""
    outer = [axis for axis in axes if axis not in (across, up) and axis.varies]
    panels: dict[str, list[Result]] = {}
    for its in results:
        values = ((axis.label, its.trial.values[axis.name]) for axis in outer)
        title = ", ".join(f"{label} {value}" for label, value in values)
        panels.setdefault(title, []).append(its)
    return panels
