"""The sampled stacks as a flame graph: a drawing of the page, and a file for https://www.speedscope.app."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_trainer.measure.formats import render_page
from hvd_trainer.measure.report import Picture
from hvd_trainer.measure.stack_record import Frame
from hvd_trainer.tools.diagnose.profile import RankProfile, Stack
from hvd_trainer.tools.diagnose.roles import LONE, START

DRAWING = Path(__file__).with_name("flame_graph.html.j2")
ROW = 22
"""Height of a box in pixels."""
COLOURS = {"role": "#cfe3f3", "user": "#f6b26b", "hvd_trainer": "#dfe7d8", "library": "#e8eaed"}
"""By whose code it is."""
TITLES = {LONE: "only this rank", START: "loader starts"}
"""Roles whose names would tell little."""
MIN_WIDTH = 0.005
"""Fraction of a rank's time below which a box is left out."""
STARTERS = ("<frozen runpy>", "/hvd_trainer/cli.py", "/hvd_trainer/tools/run/", "/hvd_trainer/utils/execute.py")
"""Code that starts a script: where none of the user's code runs, a stack is drawn from behind it."""
NOISE = ("_call_impl", "_wrapped_call_impl", "_fit", "_fit_in_this_world", "decorate_context", "wrapper")
"""Functions of libraries that are in every stack, and tell nothing."""
SCHEMA = "https://www.speedscope.app/file-format-schema.json"


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


def nested_boxes(profile: RankProfile, *, folded: bool = False) -> Box:
    """Return the flame graph of a rank: a box with those of the roles in it.

    Args:
        folded: whether frames of a library that call each other are one box.
    """
    root = Box("all", "role")
    for stack in profile.main():
        labels = [(TITLES.get(stack.role, stack.role), "role")]
        labels += [(_label(frame, folded), frame.owner) for frame in _shown(stack)]
        if folded:
            labels = [label for label, _ in itertools.groupby(labels)]
        if stack.frames and stack.frames[-1].call and (not folded or stack.frames[-1].owner == "user"):
            labels.append((stack.frames[-1].call, "library"))
        box = root
        box.seconds += stack.whole.wall
        for label, owner in labels:
            box = box.called.setdefault(label, Box(label, owner))
            box.seconds += stack.whole.wall
    return root


def _shown(stack: Stack) -> list[Frame]:
    """Return the frames from the first one of the user's code, without those that tell nothing."""
    started = (
        place + 1 for place, frame in enumerate(stack.frames) if any(name in frame.file for name in STARTERS)
    )
    user = (place for place, frame in enumerate(stack.frames) if frame.owner == "user")
    first = next(user, max(started, default=0))
    return [frame for frame in stack.frames[first:] if frame.name not in NOISE]


def _label(frame: Frame, folded: bool) -> str:
    if not folded or frame.owner == "user":
        return f"{frame.name} {frame.place}"
    package = re.split("/(?:site|dist)-packages/", frame.file)[-1]
    return (
        "hvd_trainer"
        if frame.owner == "hvd_trainer"
        else package.strip("/<>").split("/")[-1 if package[0] == "/" else 0]
    )


def draw(profiles: Sequence[RankProfile]) -> Picture:
    """Return the flame graphs of all ranks; their texts are as large in a narrow window as in a wide one."""
    text = (
        "A box is as wide as the time that it and what is below it take. Orange: your code; green: hvd_trainer; "
        "grey: libraries. Click a box, or press Enter, to zoom; arrow keys go from box to box, Escape zooms out."
    )
    ranks = [(nested_boxes(profile, folded=True), nested_boxes(profile)) for profile in profiles]
    svg = render_page(DRAWING, ranks=ranks, row=ROW, colours=COLOURS)
    return Picture("A step of each rank, by the functions in which it spends its time", text, svg, is_wide=True)


def speedscope(profiles: Sequence[RankProfile], name: str) -> dict[str, Any]:
    """Return the stacks in speedscope's format, with one profile for each rank."""
    numbers: dict[Frame, int] = {}
    made = []
    for rank, profile in enumerate(profiles):
        stacks = list(profile.main())
        weights = [profile.steps * stack.whole.wall for stack in stacks]
        samples = [
            [numbers.setdefault(frame, len(numbers)) for frame in (_title(stack.role), *stack.frames)]
            for stack in stacks
        ]
        times = {"unit": "seconds", "startValue": 0, "endValue": sum(weights)}
        made.append({"type": "sampled", "name": f"rank {rank}", **times, "samples": samples, "weights": weights})
    frames = [
        {"name": frame.function, **({"file": frame.file, "line": frame.line} if frame.file else {})}
        for frame in numbers
    ]
    return {"$schema": SCHEMA, "name": name, "profiles": made, "shared": {"frames": frames}}


def _title(role: str) -> Frame:
    return Frame("", 0, role, "", "role")
