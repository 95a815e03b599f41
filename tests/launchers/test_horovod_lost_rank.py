"""In the Horovod that we build, ranks learn that another was lost, and can shut down."""

from __future__ import annotations

import subprocess
import sys

from launchers import SUPPORT, requires
from waiting import PATIENCE_S

JOB = SUPPORT / "left_ranks_job.py"
REPETITIONS = 6


@requires("horovod")
def test_horovod_shuts_down_after_a_lost_rank() -> None:
    """With Horovod as published, of ten times a rank aborted in three, and all waited without end in four.

    Ranks that asked for operations meanwhile waited for a lock with the GIL, each time: see 04-ends-well.patch.
    """
    command = [sys.executable, str(JOB), str(REPETITIONS)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.stdout.splitlines() == ["0 0 0"] * REPETITIONS, ended.stderr
