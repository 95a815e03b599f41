"""Tell of the switches that slow every step (`measure/switches.py`): what is on, where, and what to type."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_trainer.measure.machine import read_text
from hvd_trainer.tools.diagnose.evidence import Evidence
from hvd_trainer.tools.diagnose.profile import RankProfile
from hvd_trainer.utils.text import plural

MIN_ANOMALY, MIN_FLOAT64 = 0.01, 0.01
"""Fractions of the time and of the parameters' elements from which it is told."""
OF_GPUS = ("CUDA_", "NCCL_", "PYTORCH_NO_CUDA", "TORCH_NCCL")
"""Beginnings of variables that cost nothing without a GPU."""


@dataclass(frozen=True)
class Switch:
    """Something that is on, and slows every step."""

    kind: str
    text: str
    where: str = ""
    """the line that may have turned it on, as far as the script's files show it"""


def find_switches(evidence: Evidence, *, with_threads: bool = True) -> Iterator[Switch]:
    """Yield what is on.

    Args:
        with_threads: whether it is told that the ranks have more threads than there are cores.
    """
    all_of = [profile.switches for profile in evidence.profiles]
    uses_gpu = any(profile.uses_gpu for profile in evidence.profiles)
    if max(one.anomaly for one in all_of) >= MIN_ANOMALY:
        where = _line(evidence.profiles, r"detect_anomaly\(")
        text = "anomaly detection is on, which keeps a traceback of each operation: take it out, but for a search"
        yield Switch("anomaly", text, where)
    if any(one.deterministic for one in all_of):
        where = _line(evidence.profiles, r"use_deterministic_algorithms\(")
        text = "torch.use_deterministic_algorithms is on, which forbids the faster algorithms: take it out"
        yield Switch("deterministic", text, where)
    threads, ranks = evidence.threads, evidence.ranks
    if with_threads and not uses_gpu and threads > 1 and threads * ranks > evidence.cores:
        text = (
            f"{ranks} ranks with {threads} threads each are {threads * ranks} on "
            f"{plural(evidence.cores, 'core')}: OMP_NUM_THREADS={max(1, evidence.cores // ranks)}, or --threads"
        )
        yield Switch("threads", text)
    doubles = max(one.float64 for one in all_of)
    if doubles >= MIN_FLOAT64:
        where = _line(evidence.profiles, r"float64|\.double\(\)")
        text = (
            f"{doubles:.0%} of the parameters have 64 bits: model.float(), and no set_default_dtype(torch.float64)"
        )
        yield Switch("float64", text, where)
    if all(one.needless_search for one in all_of):
        where = _line(evidence.profiles, r"find_unused_parameters\s*=\s*True")
        text = "DDP searches for unused parameters in each step, and all are used: find_unused_parameters=False"
        yield Switch("search", text, where)
    for name, value in sorted({pair for one in all_of for pair in one.variables.items()}):
        if uses_gpu or not name.startswith(OF_GPUS):
            yield Switch("variable", f"{name}={value} is for a search only: unset {name}")


def _line(profiles: Sequence[RankProfile], pattern: str) -> str:
    """Return `train.py:6`, the first line with a pattern in the user's files that were seen; empty without one."""
    # Of a Trainer job, the frames outside of its loop are in no stack.
    frames = (frame for profile in profiles for record in profile.records for frame in record.frames)
    files = {frame.file for frame in frames if frame.owner == "user"}
    for file in sorted(files):
        for number, line in enumerate(read_text(Path(file)).splitlines(), 1):
            if re.search(pattern, line.partition("#")[0]):
                return f"{Path(file).name}:{number}"
    return ""
