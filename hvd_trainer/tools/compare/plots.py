"""The pictures of a comparison. With varied options there is a heat map, with the one that has most values across:

ranks 2, stages 1   | 310 | 305 | 290 |
ranks 2, stages 2   | /// | 402 | 455 |      the number is what the colour says, /// has failed
             chunks    1     2     4
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_trainer.measure.chart import TEXT_STYLE, Style, Value, as_element, draw_lines, figure_in
from hvd_trainer.measure.formats import number
from hvd_trainer.measure.report import Picture
from hvd_trainer.tools.compare.plan import Axis
from hvd_trainer.tools.compare.result import Comparison, Result

CELL_WIDTH, CELL_HEIGHT, LETTER_WIDTH, MIN_WIDTH = 0.78, 0.5, 0.07, 4.5
"""Inches, of the heat map."""
LINEAR = "linear scaling"
COLOUR_MAP = "viridis"
"""Even in lightness, so that it can be read in grey as well."""
DARK = 0.65
"""Of the highest figure, below which a colour needs white letters."""
FAILED: dict[str, Any] = {"facecolor": "0.95", "edgecolor": "0.7", "linewidth": 0, "hatch": "////"}
CENTRED: dict[str, Any] = {"ha": "center", "va": "center"}
MAP_STYLE: dict[Any, Any] = {**TEXT_STYLE, "hatch.linewidth": 0.6, "font.size": 9}


def draw_speed(results: Sequence[Result]) -> list[Picture]:
    """Return the picture of the speed by ranks; nothing where all have as many."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        if (rate := result.median("samples_per_s")) is not None:
            lines.setdefault(result.trial.series, []).append((result.trial.ranks, rate))
    if all(len(points) == 1 for points in lines.values()):
        return []
    first = next(iter(lines.values()))
    (ranks, rate), styles = first[0], {name: Style(colour) for colour, name in enumerate(lines)}
    styles[LINEAR], lines[LINEAR] = Style(0, ":"), [(more, rate * more / ranks) for more, _ in first]
    title, text = "Samples per second by ranks", f"Medians of the rounds; dotted: {LINEAR} of the first."
    return draw_lines(title, text, lines, across="ranks", up="samples/s", styles=styles, from_zero=True)


def draw_heat_map(comparison: Comparison) -> list[Picture]:
    """Return the picture of the throughput by options; nothing where none is varied, or nothing was measured."""
    rates = {result.trial.key: result.median("samples_per_s") for result in comparison.results}
    best = max((rate for rate in rates.values() if rate is not None), default=None)
    options = [axis for axis in comparison.varied if axis.varies]
    if best is None or not options:
        return []
    across = max(reversed(options), key=lambda axis: len(axis.values))
    up = rows_of(comparison, across)
    width = len(across.values) * CELL_WIDTH + max(map(len, up)) * LETTER_WIDTH
    with figure_in(MAP_STYLE, (max(width + 1, MIN_WIDTH), len(up) * CELL_HEIGHT + 1)) as figure:
        from matplotlib.patches import Patch

        axes, values = figure.subplots(), []
        axes.patch.set(**FAILED)  # seen where there is no cell
        shades = np.full((len(up), len(across.values)), np.nan)
        for y, results in enumerate(up.values()):
            for result in results:
                x, rate = across.values.index(result.trial.values[across.name]), rates[result.trial.key]
                if rate is not None:
                    shades[y, x] = rate
                    values.append(Value(axes, x, y, f"{result.trial.label}: {rate:,.1f} samples/s"))
                    colour, weight = "white" if rate < DARK * best else "black", "bold" if rate == best else None
                    axes.text(x, y, number(rate), color=colour, weight=weight, **CENTRED)
                elif result.state != "failed":
                    axes.text(x, y, result.state, **CENTRED, fontsize=7, backgroundcolor="0.95")
        cells = range(len(across.values)), range(len(up)), shades
        # From 0, so that twice the way along the colours is twice the figure.
        mesh = axes.pcolormesh(*cells, vmin=0, vmax=best, cmap=COLOUR_MAP, edgecolors="white", linewidth=1.5)
        axes.set_xticks(range(len(across.values)), across.values)
        axes.set_yticks(range(len(up)), up)
        axes.invert_yaxis()  # as in the tables
        axes.set_xlabel(across.label)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        figure.colorbar(mesh, ax=axes, label="throughput, samples/s", format="{x:,.0f}", pad=0.02)
        if any(result.state == "failed" for result in comparison.results):
            figure.legend(handles=[Patch(label="failed", **FAILED)], loc="outside lower right", frameon=False)
        svg = as_element(figure, values)
    return [Picture("Heat map: throughput, samples/s", "By options; the fastest is in bold.", svg)]


def rows_of(comparison: Comparison, across: Axis) -> dict[str, list[Result]]:
    """Return the trials of each row of the heat map, by its title: the values on all axes but the one across."""
    rows: dict[str, list[Result]] = {}
    everyone = [result.trial.values for result in comparison.results]
    names = [
        name for name in everyone[0] if name != across.name and len({values[name] for values in everyone}) > 1
    ]
    for result in comparison.results:
        title = ", ".join(f"{name.replace('_', ' ')} {result.trial.values[name]}" for name in names)
        rows.setdefault(title, []).append(result)
    return rows
