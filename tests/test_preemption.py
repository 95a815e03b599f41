"""A signal on one rank stops all after the same step, saved; the run that goes on ends as an undisturbed one."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import digits_job
import pytest
import slurm_cluster
from launchers import QUICKEST, REPOSITORY, launch, requires, start
from slurm_batch import sbatch

from hvd_trainer.faults.preemption import listen_for_signals

JOB = ["--epochs", "12", "--batch-size", "64", "--workers", "1"]


@pytest.mark.parametrize(
    ("launcher", "backend", "number", "code"),
    [
        pytest.param("python", "single", signal.SIGTERM, 75, marks=pytest.mark.nightly),
        pytest.param("horovodrun", "horovod", signal.SIGTERM, 1, marks=requires("horovodrun")),
        pytest.param("srun", "ddp", signal.SIGUSR1, 75, marks=[requires("srun"), pytest.mark.nightly]),
    ],
)
def test_a_signal_on_one_rank_stops_all(
    launcher: str, backend: str, number: signal.Signals, code: int, tmp_path: Path
) -> None:
    size = 1 if launcher == "python" else 2
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    with start(launcher, size, digits_job.argv(backend, parts, JOB)) as running:
        running.wait_for_output("epoch 2/")
        rank = running.ranks(size)[-1]
        # As a scheduler does it: the loader process gets it too, and before its rank.
        for process in [*rank.children(recursive=True), rank]:
            process.send_signal(number)
        assert running.wait(20).returncode == code, running.report("ended otherwise")
        running.check_nothing_left()
        assert running.stderr.count("stopped by a signal after step") == 1, running.stderr
        assert "Traceback" not in running.stderr, running.stderr
    again = launch(QUICKEST, size, digits_job.argv(backend, parts, [*JOB, "--resume", "auto"]))
    assert "resume   restored model, optimizer, random, metrics" in again.stdout
    launch(QUICKEST, size, digits_job.argv(backend, whole, JOB))
    assert digits_job.weights(parts) == digits_job.weights(whole)


@pytest.mark.long
def test_without_a_folder_a_signal_ends_it_as_ever() -> None:
    with start("python", 1, digits_job.argv("single", extra=JOB)) as running:
        running.wait_for_output("epoch 1/")
        running.ranks(1)[0].terminate()
        assert running.wait(10).returncode == -signal.SIGTERM


def wait_until(condition: list[int]) -> None:
    end = time.monotonic() + 5
    while not condition:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_was_there_is_put_back() -> None:
    numbers: list[int] = []
    before = signal.getsignal(signal.SIGTERM)
    for _ in range(2):
        with listen_for_signals(numbers.append) as request:
            for _ in range(2):  # by a scheduler, and by a launcher again
                os.kill(os.getpid(), signal.SIGUSR1)
            wait_until(numbers)
            request.granted = True
        assert numbers == [signal.SIGUSR1]
        numbers.clear()
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_what_was_not_done_in_time_has_its_usual_effect() -> None:
    numbers: list[int] = []
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    try:
        with listen_for_signals(numbers.append):
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_until(numbers)
        assert got == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_fork_that_is_ended_stops_nobody() -> None:
    """DataLoader ends loader processes by SIGTERM; their socket is their parent's too."""
    numbers: list[int] = []
    forked, tell = os.pipe()
    with listen_for_signals(numbers.append) as request:
        child = os.fork()
        if child == 0:
            os.write(tell, b"!")  # what Python does after a fork is done
            signal.pause()
            os._exit(0)
        os.read(forked, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitpid(child, 0)[1] == signal.SIGTERM
        # What is heard comes in order: after this one, nothing else is on its way.
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(numbers)
        request.granted = True
        assert numbers == [signal.SIGUSR1]
    os.close(forked)
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
def test_a_signalled_slurm_job_requeues_itself_and_goes_on(tmp_path: Path) -> None:
    """By its own end it is the undisturbed run, bit for bit, and nobody typed anything."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    script = REQUEUED.replace("{arguments}", " ".join(digits_job.argv("horovod", parts, JOB)))
    env = {"LOG": str(parts), "PYTHON": sys.executable}
    options = ["--ntasks=2", "--requeue", "--open-mode=append"]
    result = sbatch(slurm_cluster.shared(), script, *options, env=env)
    assert (result.state, result.returncode) == ("COMPLETED", 0), result.output
    assert result.output.count("It goes back into Slurm's queue, and then on by itself") == 1, result.output
    assert "restart  this job was started before, and goes on" in result.output
    assert "resume   restored model, optimizer, random, metrics" in result.output
    launch(QUICKEST, 2, digits_job.argv("ddp", whole, JOB))
    assert digits_job.weights(parts) == digits_job.weights(whole)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--requeue", "--log-dir", "somewhere"], "--requeue is for jobs in a Slurm queue"),
        (["--requeue"], "--requeue needs a log folder"),
    ],
)
def test_requeue_where_it_cannot_work(options: list[str], said: str, tmp_path: Path) -> None:
    argv = digits_job.argv("single", extra=options)
    env = {"SLURM_JOB_ID": None, "PYTHONPATH": str(REPOSITORY)}
    result = launch("python", 1, argv, check=False, env=env, cwd=tmp_path)
    assert result.returncode == 2
    assert said in result.stderr
