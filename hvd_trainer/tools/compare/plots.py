"""The pictures of a comparison, as SVG whose text stays text: it can be searched, and read aloud.

Each is drawn small, so that its letters can still be read where a telephone makes it narrower.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from hvd_trainer.tools.compare import heat_map
from hvd_trainer.tools.compare.result import PART_TEXTS, Comparison, TrialResult
from hvd_trainer.tools.runner.step_stats import STEP_PARTS
from hvd_trainer.utils.text import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    maps = [(quantity, heat_map.draw(comparison, quantity)) for quantity in heat_map.QUANTITIES]
    drawn = [
        *(
            Picture(f"Heat map: {quantity.title}", "By options; the best one is in bold.", _text(figure))
            for quantity, figure in maps
            if figure is not None
        ),
        Picture(
            "Speed by ranks",
            "Samples per second: medians, with the lowest and highest round. Dotted: as many times one rank.",
            _svg(comparison, _throughput),
        ),
        Picture(
            "Efficiency",
            "The speed of one rank, as a part of that of a rank alone. 100 % is to lose nothing to the others.",
            _svg(comparison, _efficiency),
        ),
        Picture(
            "Step times",
            "Boxes hold the middle half of the steps, whiskers nine tenths; the line is the median.",
            _svg(comparison, _boxes, rows=len(_bars(comparison))),
        ),
        Picture(
            "Where a step's time goes",
            "Means over steps and ranks. Exchange and slowest rank are what others are waited for.",
            _svg(comparison, _breakdown, rows=len(_bars(comparison))),
        ),
        Picture(
            "Training loss",
            "Of the first round. Where both engines compute the same, one line covers the other.",
            _svg(comparison, _losses),
        ),
    ]
    return [picture for picture in drawn if picture.svg]


def _svg(comparison: Comparison, draw: Callable[[Comparison, Axes], bool], rows: int = 0) -> str:
    """Return the drawing as an element of a page; empty if there is nothing to draw."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": draw.__name__,
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e5e5e5",
        "axes.axisbelow": True,
    }
    with rc_context(style):
        figure = Figure((WIDTH, max(HEIGHT, 0.9 + 0.42 * rows)), layout="constrained")
        return _text(figure) if draw(comparison, figure.subplots()) else ""


def _text(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    svg = out.getvalue()
    return svg[svg.index("<svg") :]


def _series(comparison: Comparison) -> Iterator[tuple[str, str, list[TrialResult]]]:
    """Yield name, colour and measured trials of each entry with each variant."""
    grouped: dict[str, list[TrialResult]] = {}
    for its in comparison.results:
        name = ", ".join(filter(None, (its.trial.entry.name, its.trial.variant.label)))
        grouped.setdefault(name, []).append(its)
    for place, (name, results) in enumerate(grouped.items()):
        timed = [its for its in results if its.median("samples_per_s") is not None]
        yield name, COLOURS[place % len(COLOURS)], timed


def _has_lines(comparison: Comparison) -> bool:
    """Return whether each series can have a colour of its own."""
    return sum(1 for *_, timed in _series(comparison) if timed) <= len(COLOURS)


def _timed(comparison: Comparison) -> list[TrialResult]:
    return [its for its in comparison.results if its.median("samples_per_s") is not None]


def _bars(comparison: Comparison) -> list[TrialResult]:
    """Return the trials of pictures with a row each; none if there are too many."""
    timed = _timed(comparison)
    return timed if len(timed) <= MAX_ROWS else []


def _throughput(comparison: Comparison, axes: Axes) -> bool:
    if not _timed(comparison) or not _has_lines(comparison):
        return False
    for name, colour, results in _series(comparison):
        if not results:
            continue
        ranks = [its.trial.ranks for its in results]
        rates = [its.median("samples_per_s") or 0.0 for its in results]
        spread = [list(its.by_round("samples_per_s").values()) for its in results]
        below = [rate - min(values) for rate, values in zip(rates, spread, strict=True)]
        above = [max(values) - rate for rate, values in zip(rates, spread, strict=True)]
        axes.errorbar(ranks, rates, [below, above], color=colour, marker="o", capsize=3, label=name)
        if ranks[0] == 1 and len(ranks) > 1:
            axes.plot(ranks, [rates[0] * n for n in ranks], color=colour, linestyle=":", linewidth=1)
    return _finish(comparison, axes, "samples/s")


def _efficiency(comparison: Comparison, axes: Axes) -> bool:
    found = False
    if not _has_lines(comparison):
        return False
    for name, colour, results in _series(comparison):
        known = [(its.trial.ranks, e) for its in results if (e := comparison.efficiency(its)) is not None]
        if len(known) > 1:
            found = True
            ranks, values = zip(*known, strict=True)
            axes.plot(ranks, [100 * value for value in values], color=colour, marker="o", label=name)
    return found and _finish(comparison, axes, "efficiency, %")


def _finish(comparison: Comparison, axes: Axes, label: str) -> bool:
    numbers = sorted({its.trial.ranks for its in comparison.results})
    axes.set_xticks(numbers, [str(n) for n in numbers])
    axes.set_ylim(bottom=0)
    axes.set(xlabel="ranks", ylabel=label)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(frameon=False)
    return True


def _colour_of(comparison: Comparison, its: TrialResult) -> str:
    return next(colour for _, colour, results in _series(comparison) if its in results)


def _boxes(comparison: Comparison, axes: Axes) -> bool:
    timed = _bars(comparison)
    boxes = []
    for its in timed:
        # Every second percentile is kept; those between two are their mean.
        kept = [run.figures["percentiles_s"] for run in its.runs.values() if "percentiles_s" in run.figures]
        middle = [1000 * median(values) for values in zip(*kept, strict=True)]
        low, first, mid, third, high = ((middle[level // 2] + middle[(level + 1) // 2]) / 2 for level in WHISKERS)
        boxes.append(
            {"whislo": low, "q1": first, "med": mid, "q3": third, "whishi": high, "label": its.trial.label}
        )
    if boxes:
        drawn = axes.bxp(boxes, orientation="horizontal", showfliers=False, patch_artist=True, widths=0.6)
        for box, line, its in zip(drawn["boxes"], drawn["medians"], timed, strict=True):
            box.set(facecolor=_colour_of(comparison, its), alpha=0.55)
            line.set(color="black")
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set(xlabel="ms")
    return bool(boxes)


def _breakdown(comparison: Comparison, axes: Axes) -> bool:
    timed = _bars(comparison)
    places = range(len(timed))
    left = [0.0] * len(timed)
    for name, colour in zip(STEP_PARTS, COLOURS, strict=True):
        widths = [1000 * (its.part(name) or 0.0) for its in timed]
        axes.barh(places, widths, left=left, color=colour, label=PART_TEXTS[name], height=0.65)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(places, [its.trial.label for its in timed])
    axes.invert_yaxis()
    axes.set(xlabel="ms per step")
    axes.figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return bool(timed)


def _losses(comparison: Comparison, axes: Axes) -> bool:
    ranks = max((its.trial.ranks for its in _curved(comparison)), default=0)
    shown = [its for its in _curved(comparison) if its.trial.ranks == ranks]
    if not shown or not _has_lines(comparison):
        return False
    for place, its in enumerate(shown):
        curve = next(iter(its.runs.values())).figures["curve"]
        steps, losses = zip(*curve, strict=True)
        # Wide below and narrow above: both are seen where they are equal.
        width = 4.0 if place == 0 else 1.5
        axes.plot(steps, losses, color=_colour_of(comparison, its), linewidth=width, label=its.trial.label)
    axes.set(xlabel=f"step, on {plural(ranks, 'rank')}", ylabel="loss")
    axes.legend(frameon=False)
    return True


def _curved(comparison: Comparison) -> list[TrialResult]:
    return [its for its in comparison.results if its.runs and next(iter(its.runs.values())).figures.get("curve")]
