"""A signal to one rank stops all ranks after the same step; the resumed run ends like an undisturbed one."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import digits_job
import pytest
import slurm_cluster
from combinations import case
from launchers import QUICKEST, REPOSITORY, launch, requires, start
from slurm_batch import sbatch
from waiting import wait_for

from hvd_trainer.faults import preemption
from hvd_trainer.faults.activity import Activity
from hvd_trainer.faults.preemption import listen_for_signals

pytestmark = pytest.mark.warm

JOB = ["--epochs", "12", "--batch-size", "64", "--workers", "1"]


# What the launchers themselves do with a signal.
@pytest.mark.warm(False)
@pytest.mark.parametrize(
    ("launcher", "backend", "number", "code"),
    [
        case("python", "single", signal.SIGTERM, 75, when="long"),
        case("horovodrun", "horovod", signal.SIGTERM, 1),
        case("srun", "ddp", signal.SIGUSR1, 75, when="long"),
    ],
)
def test_signal_on_one_rank_stops_all_and_resume_is_exact(
    launcher: str, backend: str, number: signal.Signals, code: int, tmp_path: Path
) -> None:
    size = 1 if launcher == "python" else 2
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    with start(launcher, size, digits_job.argv(backend, parts, JOB)) as running:
        running.wait_for_output("epoch 2/")
        rank = running.ranks(size)[-1]
        # A scheduler signals the loader process, too, and before its rank.
        for process in [*rank.children(recursive=True), rank]:
            process.send_signal(number)
        assert running.wait().returncode == code, running.report("ended otherwise")
        running.check_nothing_left()
        assert running.stderr.count("stopped by a signal after step") == 1, running.stderr
        assert "Traceback" not in running.stderr, running.stderr
    again = launch(QUICKEST, size, digits_job.argv(backend, parts, [*JOB, "--resume", "auto"]))
    assert "resume   restored model, optimizer, random, metrics" in again.stdout
    launch(QUICKEST, size, digits_job.argv(backend, whole, JOB))
    assert digits_job.weights(parts) == digits_job.weights(whole)


@pytest.mark.long
def test_signal_without_log_folder_kills() -> None:
    with start("python", 1, digits_job.argv("single", extra=JOB)) as running:
        running.wait_for_output("epoch 1/")
        running.ranks(1)[0].terminate()
        assert running.wait().returncode == -signal.SIGTERM


def test_listen_for_signals_restores_handlers() -> None:
    numbers: list[int] = []
    before = signal.getsignal(signal.SIGTERM)
    for _ in range(2):
        with listen_for_signals(numbers.append, Activity(60)) as request:
            for _ in range(2):  # by a scheduler, and by a launcher again
                os.kill(os.getpid(), signal.SIGUSR1)
            wait_for(numbers.copy)
            request.granted = True
        assert numbers == [signal.SIGUSR1]
        numbers.clear()
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_signal_that_was_not_granted_is_sent_again() -> None:
    numbers: list[int] = []
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    try:
        with listen_for_signals(numbers.append, Activity(60)):
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_for(numbers.copy)
        assert got == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_signal_to_forked_process_is_no_stop_request() -> None:
    """DataLoader terminates loader processes by SIGTERM, and they share the parent's wakeup socket."""
    numbers: list[int] = []
    forked, tell = os.pipe()
    with listen_for_signals(numbers.append, Activity(60)) as request:
        child = os.fork()
        if child == 0:
            os.write(tell, b"!")  # what Python does after a fork is done
            signal.pause()
            os._exit(0)
        os.read(forked, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitpid(child, 0)[1] == signal.SIGTERM
        # Signals are handled in order: after this one, no earlier one is pending.
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(numbers.copy)
        request.granted = True
        assert numbers == [signal.SIGUSR1]
    os.close(forked)
    os.close(tell)


def test_process_that_makes_no_progress_after_sigterm_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock of the rank's activity: whatever phase it enters is progress, and no step need end for that."""
    monkeypatch.setattr(preemption, "MAX_STALL_S", 2)
    phases, tell = os.pipe()
    child = os.fork()
    if child == 0:
        activity = Activity(60)
        with listen_for_signals(lambda number: None, activity):
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(12):
                time.sleep(0.25)
                activity.enter("forward")
                os.write(tell, b"!")
            time.sleep(60)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert (status, len(os.read(phases, 99))) == (128 + signal.SIGTERM, 12)
    os.close(phases)
    os.close(tell)


REQUEUED = f"""#!/bin/bash
cd {REPOSITORY}
if [ -z "$SLURM_RESTART_COUNT" ]; then
    (until grep -qs '"epoch": 3' "$LOG/metrics.jsonl"; do sleep 0.1; done; scancel --signal=USR1 "$SLURM_JOB_ID") &
fi
srun --mpi=none "$PYTHON" {{arguments}} --requeue
"""


@pytest.mark.long
@requires("srun", "horovod")
def test_requeued_slurm_job_continues(tmp_path: Path) -> None:
    """The job requeues itself, resumes, and ends with the bits of an undisturbed run."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    script = REQUEUED.replace("{arguments}", " ".join(digits_job.argv("horovod", parts, JOB)))
    env = {"LOG": str(parts), "PYTHON": sys.executable}
    options = ["--ntasks=2", "--requeue", "--open-mode=append"]
    result = sbatch(slurm_cluster.shared(), script, *options, env=env)
    assert (result.state, result.returncode) == ("COMPLETED", 0), result.output
    assert result.output.count("It goes back into Slurm's queue, and then on by itself") == 1, result.output
    assert "restart  this job was started before, and resumes" in result.output
    assert "resume   restored model, optimizer, random, metrics" in result.output
    launch(QUICKEST, 2, digits_job.argv("ddp", whole, JOB))
    assert digits_job.weights(parts) == digits_job.weights(whole)


def test_requeue_is_refused_without_slurm(tmp_path: Path) -> None:
    argv = digits_job.argv("single", extra=["--requeue", "--log-dir", "somewhere"])
    env = {"SLURM_JOB_ID": None, "PYTHONPATH": str(REPOSITORY)}
    result = launch("python", 1, argv, check=False, env=env, cwd=tmp_path)
    assert result.returncode == 2
    assert "--requeue is for jobs in a Slurm queue" in result.stderr
