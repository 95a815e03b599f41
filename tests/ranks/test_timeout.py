"""A rank that hangs does not block the others: each exchange has a time limit, on both engines."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
from combinations import case
from launchers import QUICKEST, SUPPORT, LaunchError, launch, run_ranks

from hvd_trainer import EngineOptions, backends

TIMEOUT_S, STUCK_S = 3.0, 60.0


def wait_for_a_stuck_rank(backend_name: str) -> tuple[int, None]:
    """Let rank 0 wait for rank 1, which sleeps, in a loop without the Trainer, so that no step is reported."""
    options = EngineOptions(backend=backend_name, startup_timeout_s=TIMEOUT_S)  # type: ignore[arg-type]
    with backends.create(options) as backend:
        backend.collectives.barrier()
        if backend.world.rank == 1:
            time.sleep(STUCK_S)
        backend.collectives.all_reduce(torch.ones(3))
    return backend.world.rank, None


@pytest.mark.parametrize(
    ("backend", "launcher", "message"),
    [
        case("ddp", "torchrun", "Timed out .*3000", when="long"),
        case("horovod", "horovodrun", "did not take part .* within 3 s"),
    ],
)
def test_exchange_times_out(backend: str, launcher: str, message: str) -> None:
    """Horovod's own wait has no limit, and its stall check did not end it. The rank that hangs ends, too."""
    started = time.monotonic()
    told = rf"(?s)failure: rank 1 of 2 .* has not come to .*time\.sleep.*{message}"
    with pytest.raises(LaunchError, match=told):
        run_ranks(wait_for_a_stuck_rank, num_processes=2, launcher=launcher, args=(backend,), timeout_s=120)
    assert time.monotonic() - started < STUCK_S - 10


IN_A_THREAD = """
import os, signal, sys, threading
from trainings import fit_small
from hvd_trainer import Callback

def planted_wait():
    threading.Event().wait(60)

def planted_stop():
    os.kill(os.getpid(), signal.SIGSTOP)

class Stop(Callback):
    def on_step_end(self, run, result):
        if run.world.rank == 1:
            globals()[sys.argv[1]]()

def train():
    fit_small("ddp", [Stop()], timeout_s=3.0)

thread = threading.Thread(target=train)
thread.start()
thread.join()
"""


@pytest.mark.parametrize("planted", ["planted_wait", "planted_stop"])
def test_report_has_the_stack_of_the_thread_that_trains(planted: str, tmp_path: Path) -> None:
    """Ray Train calls the function in a thread. The report had the stack of the main one, which waits."""
    script = tmp_path / "script.py"
    script.write_text(IN_A_THREAD)
    env = {"PYTHONPATH": str(SUPPORT)}
    result = launch(QUICKEST, 3, [str(script), planted], env=env, check=False)
    told = re.search(r"failure: rank 1 of 3 .*\n(?:(?!rank 0: ).*\n)*?.* in fit_small\n", result.stderr)
    assert told is not None, result.stderr
    assert "threading.py" not in told[0].splitlines()[1]
