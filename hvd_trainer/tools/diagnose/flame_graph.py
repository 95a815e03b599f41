"""The sampled stacks as a flame graph: for https://www.speedscope.app, and as nested boxes of a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_trainer.measure.formats import render_page
from hvd_trainer.measure.stack_record import Frame
from hvd_trainer.tools.diagnose.profile import RankProfile

PAGE = Path(__file__).with_name("page.html.j2")
SCHEMA = "https://www.speedscope.app/file-format-schema.json"
MIN_WIDTH = 0.002
"""Fraction of a rank's time below which a box is left out."""
NOISE = ("_call_impl", "_wrapped_call_impl", "_fit", "_fit_in_this_world", "decorate_context", "wrapper")
"""Functions of libraries that are in every stack, and tell nothing."""


def speedscope(profiles: Sequence[RankProfile], name: str) -> dict[str, Any]:
    """Return the stacks in speedscope's format, with one profile for each rank."""
    numbers: dict[Frame, int] = {}
    made = []
    for rank, profile in enumerate(profiles):
        stacks = list(profile.main())
        weights = [stack.raw.wall_s for stack in stacks]
        samples = [
            [numbers.setdefault(frame, len(numbers)) for frame in (_title(stack.role), *stack.frames)]
            for stack in stacks
        ]
        made.append(
            {
                "type": "sampled",
                "name": f"rank {rank}",
                "unit": "seconds",
                "startValue": 0,
                "endValue": sum(weights),
                "samples": samples,
                "weights": weights,
            }
        )
    frames = [
        {"name": frame.function, **({"file": frame.file, "line": frame.line} if frame.file else {})}
        for frame in numbers
    ]
    return {
        "$schema": SCHEMA,
        "exporter": "hvd_trainer diagnose",
        "name": name,
        "activeProfileIndex": 0,
        "profiles": made,
        "shared": {"frames": frames},
    }


def _title(role: str) -> Frame:
    return Frame("", 0, role, "", "role")


@dataclass
class Box:
    """A frame with what it calls, as nested boxes of the page."""

    label: str
    owner: str
    seconds: float = 0.0
    """of a step"""
    called: dict[str, Box] = field(default_factory=dict)

    def children(self, whole_s: float) -> list[Box]:
        """Return the boxes that are wide enough to be drawn in a graph of so many seconds, the widest first."""
        wide = (box for box in self.called.values() if box.seconds >= MIN_WIDTH * whole_s)
        return sorted(wide, key=lambda box: -box.seconds)


def nested_boxes(profile: RankProfile) -> Box:
    """Return the flame graph of a rank: a box with those of the roles in it."""
    root = Box("all", "role")
    for stack in profile.main():
        labels = [(stack.role, "role")]
        labels += [
            (f"{frame.name} {frame.place}", frame.owner) for frame in stack.frames if frame.name not in NOISE
        ]
        if stack.frames and stack.frames[-1].call:
            labels.append((stack.frames[-1].call, "library"))
        box = root
        box.seconds += stack.raw.wall_s / profile.steps
        for label, owner in labels:
            box = box.called.setdefault(label, Box(label, owner))
            box.seconds += stack.raw.wall_s / profile.steps
    return root


def render(profiles: Sequence[RankProfile], heading: str, said: Sequence[str]) -> str:
    """Return a page with the conclusions and a flame graph of each rank; it needs no network and no script."""
    graphs = [nested_boxes(profile) for profile in profiles]
    return render_page(PAGE, heading=heading, said=said, graphs=graphs)
