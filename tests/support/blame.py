"""Which rank is blamed when one of two fails on a device, and how soon the others have ended."""

from __future__ import annotations

import re
import time

from digits_job import free_port, started_by_hand
from launchers import SUPPORT

TIMEOUT_S = 8
END_S = 60.0
"""After the fault, at most; limits other than those of the monitor are minutes."""


def check_blame(engine: str, fault: str, rank: int, **variables: str | None) -> float:
    """Let a rank fail; return after how many seconds all others had ended, which have blamed it.

    Args:
        fault: of `ways_to_train.FAULTS`.
        variables: of both ranks.
    """
    job = [str(SUPPORT / "faulty_job.py"), "--backend", engine, "--epochs", "1000", "--timeout-s", str(TIMEOUT_S)]
    variables = {
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "FAULT": f"{fault}:{rank}:5"},
        # As torchrun sets it: by it, PyTorch would end the process before the report.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **variables,
    }
    with started_by_hand(job, **variables) as jobs:
        jobs[rank].wait_for_output("strikes at ")
        # Nobody wakes a stopped process that no launcher has started.
        results = [job.wait(END_S) for number, job in enumerate(jobs) if (number, fault) != (rank, "is stopped")]
        seconds = time.time() - float(jobs[rank].stdout.rpartition("strikes at ")[2].split()[0])
        output = "\n".join(f"{job.stdout}\n{job.stderr}" for job in jobs)
    assert all(result.returncode != 0 for result in results), output
    blamed = re.findall(r"^failure: rank (\d+) of 2 .*$", output, re.MULTILINE)
    assert blamed, output
    assert set(blamed) == {str(rank)}, output
    return seconds
