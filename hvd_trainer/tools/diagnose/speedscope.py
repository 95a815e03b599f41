"""The sampled stacks as a file for https://www.speedscope.app, which draws them as flame graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvd_trainer.measure.stack_record import Frame
from hvd_trainer.tools.diagnose.profile import RankProfile

SCHEMA = "https://www.speedscope.app/file-format-schema.json"


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
