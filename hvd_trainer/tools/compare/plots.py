"""The pictures of a comparison, as SVG whose text stays text: it can be searched, and read aloud.

Each is drawn small, so that its letters can still be read where a telephone makes it narrower.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from hvd_trainer.tools.compare import heat_map
from hvd_trainer.tools.compare.result import PART_TEXTS, Comparison, TrialResult
from hvd_trainer.tools.runner.step_stats import STEP_PARTS
from hvd_trainer.utils.text import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 5.0, 3.2
"""Inches of one panel."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#888888")
"""Of Okabe and Ito, which the colour-blind tell apart."""
WHISKERS = (5, 25, 50, 75, 95)
"""The percentiles of a box."""
MAX_ROWS = 24
"""Bars or boxes of one picture."""


class Picture(NamedTuple):
    """A drawing, and what it shows in words."""

    title: str
    text: str
    svg: str


def pictures(comparison: Comparison) -> list[Picture]:
    """Return all pictures that there are figures for."""
    plots = _Plots(comparison)
    drawn = [
        *(
            Picture(f"Heat map: {quantity.title}", "By options; the best one is in bold.", svg)
            for quantity in heat_map.QUANTITIES
            if (svg := heat_map.svg(comparison, quantity))
        ),
        Picture(
            "Speed by ranks",
            "Samples per second: medians, with the lowest and highest round. Dotted: as many times one rank.",
            _svg(plots.throughput),
        ),
        Picture(
            "Efficiency",
            "The speed of one rank, as a part of that of a rank alone. 100 % is to lose nothing to the others.",
            _svg(plots.efficiency),
        ),
        Picture(
            "Step times",
            "Boxes hold the middle half of the steps, whiskers nine tenths; the line is the median.",
            _svg(plots.boxes, rows=len(plots.bars)),
        ),
        Picture(
            "Where a step's time goes",
            "Means over steps and ranks. Exchange and slowest rank are what others are waited for.",
            _svg(plots.breakdown, rows=len(plots.bars)),
        ),
        Picture(
            "Training loss",
            "Of the first round. Where both engines compute the same, one line covers the other.",
            _svg(plots.losses),
        ),
    ]
    return [picture for picture in drawn if picture.svg]


def _svg(draw: Callable[[Axes], bool], rows: int = 0) -> str:
    """Return a drawing as an element of a page; empty if there is nothing to draw."""
    from matplotlib.figure import Figure

    style = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e5e5e5",
        "axes.axisbelow": True,
    }
    with heat_map.drawing_style(draw.__name__, style):
        figure = Figure((WIDTH, max(HEIGHT, 0.9 + 0.42 * rows)), layout="constrained")
        return heat_map.as_element(figure) if draw(figure.subplots()) else ""


class _Plots:
    """The plots of a comparison: each method draws one, and returns whether there was anything to draw."""

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison
        timed = [its for its in comparison.results if its.median("samples_per_s") is not None]
        names = list(dict.fromkeys(map(_series_name, comparison.results)))
        self._colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
        series = {name: [its for its in timed if _series_name(its) == name] for name in names}
        self._series = {name: results for name, results in series.items() if results}
        self.bars = timed if len(timed) <= MAX_ROWS else []
        """the trials of pictures with a row each; none if there are too many"""

    def _colour_of(self, its: TrialResult) -> str:
        return self._colours[_series_name(its)]

    @property
    def _has_lines(self) -> bool:
        """Whether each series can have a colour of its own."""
        return len(self._series) <= len(COLOURS)

    def throughput(self, axes: Axes) -> bool:
        if not self._series or not self._has_lines:
            return False
        for name, results in self._series.items():
            ranks, colour = [its.trial.ranks for its in results], self._colours[name]
            rates = [its.median("samples_per_s") or 0.0 for its in results]
            spread = [list(its.by_round("samples_per_s").values()) for its in results]
            below = [rate - min(values) for rate, values in zip(rates, spread, strict=True)]
            above = [max(values) - rate for rate, values in zip(rates, spread, strict=True)]
            axes.errorbar(ranks, rates, [below, above], color=colour, marker="o", capsize=3, label=name)
            if ranks[0] == 1 and len(ranks) > 1:
                axes.plot(ranks, [rates[0] * n for n in ranks], color=colour, linestyle=":", linewidth=1)
        return self._finish(axes, "samples/s")

    def efficiency(self, axes: Axes) -> bool:
        found = False
        for name, results in self._series.items() if self._has_lines else ():
            pairs = ((its.trial.ranks, self._comparison.efficiency(its)) for its in results)
            known = [(ranks, 100 * value) for ranks, value in pairs if value is not None]
            if len(known) > 1:
                found = True
                axes.plot(*zip(*known, strict=True), color=self._colours[name], marker="o", label=name)
        return found and self._finish(axes, "efficiency, %")

    def _finish(self, axes: Axes, label: str) -> bool:
        numbers = sorted({its.trial.ranks for its in self._comparison.results})
        axes.set_xticks(numbers, [str(n) for n in numbers])
        axes.set_ylim(bottom=0)
        axes.set(xlabel="ranks", ylabel=label)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.legend(frameon=False)
        return True

    def boxes(self, axes: Axes) -> bool:
        boxes = []
        for its in self.bars:
            # Every second percentile is kept; those between two are their mean.
            kept = [run.figures["percentiles_s"] for run in its.runs.values() if "percentiles_s" in run.figures]
            middle = [1000 * median(values) for values in zip(*kept, strict=True)]
            levels = [(middle[level // 2] + middle[(level + 1) // 2]) / 2 for level in WHISKERS]
            names = ("whislo", "q1", "med", "q3", "whishi")
            boxes.append({"label": its.trial.label, **dict(zip(names, levels, strict=True))})
        if boxes:
            drawn = axes.bxp(boxes, orientation="horizontal", showfliers=False, patch_artist=True, widths=0.6)
            for box, line, its in zip(drawn["boxes"], drawn["medians"], self.bars, strict=True):
                box.set(facecolor=self._colour_of(its), alpha=0.55)
                line.set(color="black")
            axes.invert_yaxis()
            axes.set_xlim(left=0)
            axes.set(xlabel="ms")
        return bool(boxes)

    def breakdown(self, axes: Axes) -> bool:
        places = range(len(self.bars))
        left = [0.0] * len(self.bars)
        for name, colour in zip(STEP_PARTS, COLOURS, strict=True):
            widths = [1000 * (its.part(name) or 0.0) for its in self.bars]
            axes.barh(places, widths, left=left, color=colour, label=PART_TEXTS[name], height=0.65)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.set_yticks(places, [its.trial.label for its in self.bars])
        axes.invert_yaxis()
        axes.set(xlabel="ms per step")
        axes.figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
        return bool(self.bars)

    def losses(self, axes: Axes) -> bool:
        first = [(its, next(iter(its.runs.values()))) for its in self._comparison.results if its.runs]
        curves = [(its, run.figures["curve"]) for its, run in first if run.figures.get("curve")]
        ranks = max((its.trial.ranks for its, _ in curves), default=0)
        if not curves or not self._has_lines:
            return False
        # Wide below and narrow above: both are seen where they are equal.
        widths = itertools.chain([4.0], itertools.repeat(1.5))
        for its, curve in curves:
            if its.trial.ranks == ranks:
                label, colour = its.trial.label, self._colour_of(its)
                axes.plot(*zip(*curve, strict=True), color=colour, linewidth=next(widths), label=label)
        axes.set(xlabel=f"step, on {plural(ranks, 'rank')}", ylabel="loss")
        axes.legend(frameon=False)
        return True


def _series_name(its: TrialResult) -> str:
    """Return the name of a line: an entry with a variant."""
    return ", ".join(filter(None, (its.trial.entry.name, its.trial.variant.label)))
