r"""Pipeline schedules: the order in which a stage works on micro-batches, and how long it waits.

    gpipe, 2 stages, 3 chunks                1f1b
    stage 0  F0 F1 F2 .  .  B0 B1 B2         F0 F1 .  B0 F2 B1 .  B2      . is the bubble: (p-1)/(m+p-1) of
    stage 1  .  F0 F1 F2 B0 B1 B2 .          .  F0 B0 F1 B1 F2 B2 .       the time, with p stages and m chunks

1f1b has the same bubble and keeps the activations of at most p chunks. `interleaved` gives each stage several
parts of the model, and `zero-bubble` fills the gaps with the gradients of weights, for which no other stage waits.
The schedules themselves are those of torch.distributed.pipelining.
"""

from __future__ import annotations

from typing import Literal

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
CLASSES: dict[str, str] = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
}
ONE_PART = ("gpipe", "1f1b")
"""Schedules of `PipelineScheduleSingle`, which takes one part per process."""


def bubble(schedule: Schedule, stages: int, chunks: int, parts: int = 1) -> float:
    """Return the fraction of a step that a stage waits if all parts take equally long and sending takes no time.

    gpipe and 1f1b: Huang et al., GPipe (NeurIPS 2019). interleaved: Narayanan et al., Efficient large-scale
    language model training on GPU clusters (SC'21). zero-bubble: the schedule ZB-H1 of Qi et al., Zero bubble
    pipeline parallelism (ICLR 2024), with forward and both halves of backward equally long.
    """
    gaps = stages - 1
    if schedule == "zero-bubble":
        return gaps / (3 * parts * chunks + gaps)
    return gaps / (parts * chunks + gaps)
