"""Stacks that one process asks of another."""

import os
import subprocess
import sys

from hvd_trainer.faults.stack_dump import request_stacks

ENDS_WHEN_RESUMED = """
import os, signal
from hvd_trainer.faults.stack_dump import register_signal

print(register_signal(), flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
os._exit(0)
"""


def test_stacks_of_a_suspended_process_that_ends_when_resumed() -> None:
    """A report had empty stacks: the rank ended between the signal and the first reading of its memory."""
    argv = [sys.executable, "-c", ENDS_WHEN_RESUMED]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        memory = int(process.stdout.readline())
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert 'File "<string>", line 6 in <module>' in request_stacks(process.pid, memory)
