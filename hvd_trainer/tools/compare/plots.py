"""The pictures of a comparison, as SVG whose text stays text: it can be searched, and read aloud.

Each is drawn small, so that its letters can still be read where a telephone makes it narrower.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from hvd_trainer.tools.compare import heat_map
from hvd_trainer.tools.compare.result import PART_TEXTS, Comparison, TrialResult
from hvd_trainer.utils.text import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT, ROW_HEIGHT = 5.0, 3.2, 0.42
"""Inches of one picture, and of one bar."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#888888")
"""Of Okabe and Ito, which the colour-blind tell apart."""
WHISKERS = {"whislo": 5, "q1": 25, "med": 50, "q3": 75, "whishi": 95}
"""The percentiles of a box."""
MAX_ROWS = 24
"""Bars or boxes of one picture; with more there is none."""
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e5e5",
    "axes.axisbelow": True,
}


class Picture(NamedTuple):
    """A drawing, and what it shows in words."""

    title: str
    text: str
    svg: str


def pictures(comparison: Comparison) -> list[Picture]:
    """Return all pictures that there are figures for, but heat maps."""
    drawn = [Picture(title, text, _svg(comparison, draw)) for title, text, draw in PICTURES]
    return [picture for picture in drawn if picture.svg]


def _svg(comparison: Comparison, draw: Callable[[Axes, Comparison], bool]) -> str:
    """Return a drawing as an element of a page; empty if there is nothing to draw."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = len(_timed(comparison)) if draw in (_draw_step_times, _draw_breakdown) else 0
    with rc_context({**heat_map.TEXT_STYLE, **STYLE, "svg.hashsalt": draw.__name__}):
        figure = Figure((WIDTH, max(HEIGHT, 0.9 + ROW_HEIGHT * rows)), layout="constrained")
        return heat_map.as_element(figure) if rows <= MAX_ROWS and draw(figure.subplots(), comparison) else ""


def _timed(comparison: Comparison) -> list[TrialResult]:
    return [its for its in comparison.results if its.median("samples_per_s") is not None]


def _colours(comparison: Comparison) -> Mapping[str, str]:
    """Return the colour of each entry with a variant."""
    names = dict.fromkeys(its.trial.series for its in comparison.results)
    return dict(zip(names, itertools.cycle(COLOURS), strict=False))


def _lines(comparison: Comparison) -> dict[str, list[TrialResult]]:
    """Return the trials of each entry with a variant; nothing if they are more than there are colours."""
    lines: dict[str, list[TrialResult]] = {}
    for its in _timed(comparison):
        lines.setdefault(its.trial.series, []).append(its)
    return lines if len(lines) <= len(COLOURS) else {}


def _draw_speed(axes: Axes, comparison: Comparison) -> bool:
    for name, results in _lines(comparison).items():
        ranks, colour = [its.trial.ranks for its in results], _colours(comparison)[name]
        spread = [its.by_round("samples_per_s").values() for its in results]
        rates = [median(values) for values in spread]
        below = [rate - min(values) for rate, values in zip(rates, spread, strict=True)]
        above = [max(values) - rate for rate, values in zip(rates, spread, strict=True)]
        axes.errorbar(ranks, rates, [below, above], color=colour, marker="o", capsize=3, label=name)
        if ranks[0] == 1 and len(ranks) > 1:
            axes.plot(ranks, [rates[0] * n for n in ranks], color=colour, linestyle=":", linewidth=1)
    return _finish(axes, comparison, "samples/s")


def _draw_efficiency(axes: Axes, comparison: Comparison) -> bool:
    for name, results in _lines(comparison).items():
        pairs = [(its.trial.ranks, comparison.figures[its.trial.key]["efficiency"]) for its in results]
        known = [(ranks, 100 * value) for ranks, value in pairs if value is not None]
        if len(known) > 1:
            axes.plot(*zip(*known, strict=True), color=_colours(comparison)[name], marker="o", label=name)
    return _finish(axes, comparison, "efficiency, %")


def _finish(axes: Axes, comparison: Comparison, label: str) -> bool:
    """Label the axes of a picture with a line for each entry, and return whether there is a line."""
    numbers = sorted({its.trial.ranks for its in comparison.results})
    axes.set_xticks(numbers, [str(n) for n in numbers])
    axes.set_ylim(bottom=0)
    axes.set(xlabel="ranks", ylabel=label)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    if axes.lines:
        axes.legend(frameon=False)
    return bool(axes.lines)


def _draw_step_times(axes: Axes, comparison: Comparison) -> bool:
    boxes, colours = [], []
    for its in _timed(comparison):
        # Every second percentile is kept; those between two are their mean.
        kept = [run.figures["percentiles_s"] for run in its.runs.values() if "percentiles_s" in run.figures]
        middle = [1000 * median(values) for values in zip(*kept, strict=True)]
        levels = {name: (middle[n // 2] + middle[(n + 1) // 2]) / 2 for name, n in WHISKERS.items()}
        boxes.append({"label": its.trial.label, **levels})
        colours.append(_colours(comparison)[its.trial.series])
    if not boxes:
        return False
    drawn = axes.bxp(boxes, orientation="horizontal", showfliers=False, patch_artist=True, widths=0.6)
    for box, line, colour in zip(drawn["boxes"], drawn["medians"], colours, strict=True):
        box.set(facecolor=colour, alpha=0.55)
        line.set(color="black")
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set(xlabel="ms")
    return True


def _draw_breakdown(axes: Axes, comparison: Comparison) -> bool:
    results = _timed(comparison)
    left = [0.0] * len(results)
    for (name, text), colour in zip(PART_TEXTS.items(), COLOURS, strict=True):
        widths = [1000 * (its.median(name) or 0.0) for its in results]
        axes.barh(range(len(results)), widths, left=left, color=colour, label=text, height=0.65)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(results)), [its.trial.label for its in results])
    axes.invert_yaxis()
    axes.set(xlabel="ms per step")
    axes.figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return bool(results)


def _draw_losses(axes: Axes, comparison: Comparison) -> bool:
    first = [(its, next(iter(its.runs.values()))) for its in comparison.results if its.runs]
    curves = [(its, run.figures["curve"]) for its, run in first if run.figures.get("curve")]
    ranks = max((its.trial.ranks for its, _ in curves), default=0)
    if not curves or not _lines(comparison):
        return False
    # Wide below and narrow above: both are seen where they are equal.
    widths = itertools.chain([4.0], itertools.repeat(1.5))
    for its, curve in curves:
        if its.trial.ranks == ranks:
            label, colour = its.trial.label, _colours(comparison)[its.trial.series]
            axes.plot(*zip(*curve, strict=True), color=colour, linewidth=next(widths), label=label)
    axes.set(xlabel=f"step, on {plural(ranks, 'rank')}", ylabel="loss")
    axes.legend(frameon=False)
    return True


PICTURES = (
    (
        "Speed by ranks",
        "Samples per second: medians, with the lowest and highest round. Dotted: as many times one rank.",
        _draw_speed,
    ),
    (
        "Efficiency",
        "The speed of one rank, as a part of that of a rank alone. 100 % is to lose nothing to the others.",
        _draw_efficiency,
    ),
    (
        "Step times",
        "Boxes hold the middle half of the steps, whiskers nine tenths; the line is the median.",
        _draw_step_times,
    ),
    (
        "Where a step's time goes",
        "Means over steps and ranks. Exchange and slowest rank are what others are waited for.",
        _draw_breakdown,
    ),
    (
        "Training loss",
        "Of the first round. Where both engines compute the same, one line covers the other.",
        _draw_losses,
    ),
)
