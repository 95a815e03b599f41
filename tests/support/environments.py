"""Environments that launchers give to ranks, as recorded from real launches (data/environments/*.json).

``CASES[name]`` has one dict per process, in rank order. Recorded with Horovod 0.28.1, torch 2.15.0,
Open MPI 4.1.4 and Slurm 22.05.8 (nodes of 8 CPUs on one machine, some with 8 GPUs that are none). Host names are
replaced; left out are paths, and what Open MPI tells its own library about sockets and shared memory.
"""

from __future__ import annotations

import json
from pathlib import Path


def _read(file: Path) -> tuple[dict[str, str], ...]:
    """Return one environment per rank, of what all have and what each has of its own."""
    case = json.loads(file.read_text())
    return tuple({**case["common"], **own} for own in case["ranks"])


FILES = sorted(Path(__file__).parents[1].glob("data/environments/*.json"))
CASES = {file.stem: _read(file) for file in FILES}
