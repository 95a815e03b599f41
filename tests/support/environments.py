"""Environments that launchers give to ranks, as recorded from real launches (data/environments/*.json).

``CASES[name]`` has one dict per process, in rank order. Recorded with Horovod 0.28.1, torch 2.15.0,
Open MPI 4.1.4 and Slurm 22.05.8 (nodes of 8 CPUs on one machine, some with 8 GPUs that are none). Host names are
replaced; left out are paths, and what Open MPI tells its own library about sockets and shared memory. What no test
can start is written from its documentation, as its ``recorded_from`` says.
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
HOSTS = {
    "node1": "node1",
    "n[1-3],m5": "n1 n2 n3 m5",
    "gpu[03-05,9],login": "gpu03 gpu04 gpu05 gpu9 login",
    "gpu[03-05,9]-ib[1-2]": "gpu03-ib1 gpu03-ib2 gpu04-ib1 gpu04-ib2 gpu05-ib1 gpu05-ib2 gpu9-ib1 gpu9-ib2",
    "n[1-2]m[3-4]k[7,08]": "n1m3k7 n1m3k08 n1m4k7 n1m4k08 n2m3k7 n2m3k08 n2m4k7 n2m4k08",
    "n[08-11]": "n08 n09 n10 n11",
    "n[098-101]": "n098 n099 n100 n101",
    "n[9-10],x-1-[2-3]": "n9 n10 x-1-2 x-1-3",
    "n[001-3]": "n001 n002 n003",
    "r1n[0-0],r1n7": "r1n0 r1n7",
    "n[1-2]-ib.cluster": "n1-ib.cluster n2-ib.cluster",
}
"""Slurm's lists of hosts, and the hosts that they name."""
