"""The sampled stacks as a flame graph, a drawing of the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvd_trainer.measure.formats import render_page
from hvd_trainer.measure.report import Picture
from hvd_trainer.measure.stack_record import Frame
from hvd_trainer.tools.diagnose.profile import LONE, START, RankProfile, Stack

DRAWING = Path(__file__).with_name("flame_graph.svg.j2")
ROW = 22
"""Height of a box in pixels."""
COLOURS = {"role": "#cfe3f3", "user": "#f6b26b", "hvd_trainer": "#dfe7d8", "library": "#e8eaed"}
"""By whose code it is."""
TITLES = {LONE: "only this rank", START: "loader starts"}
"""Roles whose names would tell little."""
MIN_WIDTH = 0.005
"""Fraction of a rank's time below which a box is left out."""
NOISE = ("_call_impl", "_wrapped_call_impl", "_fit", "_fit_in_this_world", "decorate_context", "wrapper")
"""Functions of libraries that are in every stack, and tell nothing."""


@dataclass
class Box:
    """A frame with what it calls."""

    label: str
    owner: str
    seconds: float = 0.0
    """of a step"""
    begin: float = 0.0
    """seconds of the box around it that are left of it"""
    called: dict[str, Box] = field(default_factory=dict)

    def children(self, whole_s: float) -> Iterator[Box]:
        """Yield the boxes that are wide enough to be drawn in a graph of so many seconds, the widest first."""
        begin = 0.0
        for box in sorted(self.called.values(), key=lambda box: -box.seconds):
            if box.seconds >= MIN_WIDTH * whole_s:
                box.begin = begin
                begin += box.seconds
                yield box

    def depth(self, whole_s: float) -> int:
        """Return how many boxes are drawn on top of each other in it."""
        return max((1 + box.depth(whole_s) for box in self.children(whole_s)), default=0)


def nested_boxes(profile: RankProfile) -> Box:
    """Return the flame graph of a rank: a box with those of the roles in it."""
    root = Box("all", "role")
    for stack in profile.main():
        labels = [(TITLES.get(stack.role, stack.role), "role")]
        labels += [(f"{frame.name} {frame.place}", frame.owner) for frame in _shown(stack)]
        if stack.frames and stack.frames[-1].call:
            labels.append((stack.frames[-1].call, "library"))
        box = root
        box.seconds += stack.raw.wall_s / profile.steps
        for label, owner in labels:
            box = box.called.setdefault(label, Box(label, owner))
            box.seconds += stack.raw.wall_s / profile.steps
    return root


def _shown(stack: Stack) -> list[Frame]:
    """Return the frames from the first one of the user's code, without those that tell nothing."""
    first = next((place for place, frame in enumerate(stack.frames) if frame.owner == "user"), 0)
    return [frame for frame in stack.frames[first:] if frame.name not in NOISE]


def draw(profiles: Sequence[RankProfile]) -> Iterator[Picture]:
    """Yield the flame graph of each rank; its texts are as large in a narrow window as in a wide one."""
    text = (
        "A box is as wide as the time that it and what is below it take. Orange: your code; green: hvd_trainer; "
        "grey: libraries."
    )
    for rank, profile in enumerate(profiles):
        graph = nested_boxes(profile)
        rows = graph.depth(graph.seconds)
        svg = render_page(DRAWING, graph=graph, rows=rows, row=ROW, colours=COLOURS)
        yield Picture(f"A step of rank {rank}", text, svg, is_wide=True)
