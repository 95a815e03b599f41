"""A rank that is lost takes no other with it: the Horovod that we build tells the others, and lets them leave."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from launchers import requires

JOB = Path(__file__).with_name("left_ranks_job.py")
TIMES = 5


@requires("horovod")
def test_who_is_left_by_another_can_leave() -> None:
    """Once, of ten times: three with a rank that aborted, four in which all waited for what never came."""
    command = [sys.executable, str(JOB), str(TIMES)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.splitlines() == ["0 0 0"] * TIMES, ended.stderr
