"""The picture of speed by ranks, as SVG whose text stays text: it can be searched, and read aloud.

It is drawn small, so that its letters can still be read where a telephone makes it narrower.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from hvd_trainer.measure.report import Picture
from hvd_trainer.tools.compare.heat_map import TEXT_STYLE, as_element
from hvd_trainer.tools.compare.result import TrialResult

SIZE = (5.0, 3.2)
"""Inches."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#888888")
"""Of Okabe and Ito, which the colour-blind tell apart."""
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e5e5",
    "axes.axisbelow": True,
    "svg.hashsalt": "speed",
}


def draw_speed(results: Sequence[TrialResult]) -> list[Picture]:
    """Return the picture; nothing without samples per second, or with more lines than there are colours."""
    lines: dict[str, list[TrialResult]] = {}
    for result in results:
        if result.median("samples_per_s") is not None:
            lines.setdefault(result.trial.series, []).append(result)
    if not 0 < len(lines) <= len(COLOURS):
        return []
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({**TEXT_STYLE, **STYLE}):
        figure = Figure(SIZE, layout="constrained")
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
