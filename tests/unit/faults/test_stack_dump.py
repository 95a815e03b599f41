"""Stacks that one process asks of another."""

import gc
import os
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

from hvd_trainer.faults.stack_dump import request_stacks, training_stack


class Model:
    """What a script holds while it trains."""


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


def test_a_look_at_the_stack_keeps_nothing_of_the_script() -> None:
    """The frames were in a cycle: the model and its tensors stayed until the next collection."""

    def train() -> weakref.ref[Model]:
        model = Model()
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(lambda: len(training_stack())).result() > 0
        return weakref.ref(model)

    gc.disable()
    try:
        assert train()() is None
    finally:
        gc.enable()
