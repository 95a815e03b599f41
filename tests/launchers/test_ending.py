"""How a job ends: normally, by an error in a rank, or by Ctrl-C; no process or thread is left."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import digits_job
import pytest
import torch
from combinations import case, each_pair
from launchers import OWN_FRAME, REPOSITORY, SUPPORT, in_ranks, requires, start
from launchers import LaunchError as RanksError
from torch import nn
from trainings import options_of, signs

import hvd_trainer
from hvd_trainer import EngineOptions, LaunchError, Trainer, backends

pytestmark = pytest.mark.warm

LONG = ["--epochs", "100000", "--log-every", "1000000"]


@each_pair(push=2, long=3)
def test_ctrl_c_ends_all_ranks(launcher: str, backend: str) -> None:
    with start(launcher, 2, digits_job.argv(backend, extra=LONG)) as job:
        job.wait_for_output("epoch 2/")
        # srun only prints its state at the first Ctrl-C, and ends at a second one within a second.
        job.press_ctrl_c(times=2 if launcher == "srun" else 1)
        assert job.wait().returncode != 0
        job.check_nothing_left()
        assert OWN_FRAME not in job.stderr, job.report("a rank printed a traceback")


@requires("horovod")
def test_ctrl_c_ends_single_process() -> None:
    with start("python", 1, digits_job.argv("horovod", extra=LONG)) as job:
        job.wait_for_output("epoch 2/")
        job.press_ctrl_c()
        assert job.wait().returncode == 130
        assert "error: interrupted" in job.stderr
        assert "Traceback" not in job.stderr


def train_and_fail_in_rank_1(backend: str) -> None:
    with Trainer(options_of(backend)) as trainer:
        trainer.backend.collectives.barrier()
        if trainer.world.rank == 1:
            raise ValueError("rank 1's own words")
        trainer.backend.collectives.all_reduce(torch.ones(1))


@pytest.mark.parametrize("backend", [case("horovod"), case("ddp")])
def test_run_raises_error_of_first_failed_rank(backend: str) -> None:
    with pytest.raises(LaunchError, match=r"rank 1 of 2 failed(.|\n)*ValueError: rank 1's own words"):
        hvd_trainer.run(train_and_fail_in_rank_1, num_processes=2, args=(backend,))


def train_again_after_an_error(backend: str, failing: int | None, trains_again: bool) -> None:
    with Trainer(options_of(backend, epochs=1)) as trainer:
        model = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        calls = itertools.count()

        def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            if next(calls) == 1 and failing in (None, trainer.world.rank):
                raise OSError("the disk of this rank")
            return nn.functional.cross_entropy(outputs, targets)

        with suppress(OSError):
            trainer.fit(model, optimizer, loss, signs(512))
        if trains_again:
            trainer.fit(model, optimizer, loss, signs(512))


@pytest.mark.parametrize(
    ("backend", "size", "failing", "trains_again"),
    [
        case("ddp", 2, 1, True),
        case("ddp", 3, 0, False),
        case("horovod", 2, 0, True),
        case("horovod", 3, 1, False),
    ],
)
def test_rank_that_catches_its_own_error_is_named(
    backend: str, size: int, failing: int, trains_again: bool
) -> None:
    """The others waited for ever, or took its next collective for theirs, by which Gloo ended one of them."""
    with pytest.raises(RanksError) as ending:
        in_ranks(size, train_again_after_an_error, backend, failing, trains_again)
    assert str(ending.value).count("failure: ") == 1
    assert f"failure: rank {failing} of {size} on" in str(ending.value)
    assert "step 2, forward: raised an exception (caught by its script" in str(ending.value)
    assert "OSError: the disk of this rank" in str(ending.value)


@pytest.mark.parametrize(("backend", "size"), [case("ddp", 3), case("horovod", 2)])
def test_ranks_that_catch_the_same_error_train_again(backend: str, size: int) -> None:
    in_ranks(size, train_again_after_an_error, backend, None, True)


def end_at_once() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_run_names_signal_that_killed_rank() -> None:
    with pytest.raises(LaunchError, match=r"rank 0 of 1 ended by SIGKILL"):
        hvd_trainer.run(end_at_once, num_processes=1)
    with pytest.raises(LaunchError, match="num_processes of 1 or more, not 0"):
        hvd_trainer.run(end_at_once, num_processes=0)


def sleep_long() -> None:
    print("started", flush=True)
    threading.Event().wait(600)


SLEEPING_SESSION = """
import hvd_trainer, test_ending
if __name__ == "__main__":
    hvd_trainer.run(test_ending.sleep_long, num_processes=2)
"""


def test_run_ends_ranks_when_notebook_is_interrupted(tmp_path: Path) -> None:
    """A notebook interrupts the parent process only; a terminal would also interrupt the ranks."""
    (tmp_path / "session.py").write_text(SLEEPING_SESSION)
    path = os.pathsep.join(map(str, (REPOSITORY, SUPPORT, Path(__file__).parent)))
    with start("python", 1, [str(tmp_path / "session.py")], env={"PYTHONPATH": path}) as job:
        job.wait_for_output("started", count=2)
        os.kill(job.popen.pid, signal.SIGINT)
        job.wait()
        job.check_nothing_left()
        assert job.stderr.count("Traceback") == 1


# Exit. A thread of Gloo that still runs when the interpreter ends may abort the process: one of ten exits of plain
# DDP did. `python -m benchmarks.exit_runs` counts hundreds of exits.


def gloo_threads() -> list[str]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except FileNotFoundError:  # it ended meanwhile
            continue
    return [name for name in names if "gloo" in name]


def threads_of_a_trainer(backend: str) -> tuple[int, tuple[bool, list[str]]]:
    with Trainer(options_of(backend, epochs=1)) as trainer:
        model = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer.fit(model, optimizer, nn.functional.cross_entropy, signs(512))
        inside = bool(gloo_threads())
    return trainer.world.rank, (inside, gloo_threads())


def threads_of_a_held_model(backend: str) -> tuple[int, tuple[bool, list[str]]]:
    """Keep a reference to the engine's module, which holds its connections, as a traceback may."""
    engine = backends.create(EngineOptions(backend=backend))  # type: ignore[arg-type]
    with engine:
        model = nn.Linear(2, 1)
        prepared, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with engine.gradient_sync(prepared, True):
            loss = prepared(torch.ones(1, 2)).sum()
            loss.backward()
        engine.step(optimizer)
        inside = bool(gloo_threads())
    return engine.world.rank, (inside, gloo_threads())


@pytest.mark.parametrize("use", [threads_of_a_trainer, threads_of_a_held_model])
def test_ddp_leaves_no_gloo_threads(use) -> None:
    for _, (inside, after) in in_ranks(2, use, "ddp"):
        assert inside
        assert after == []


@pytest.mark.long
def test_run_leaves_no_gloo_threads() -> None:
    outcomes = hvd_trainer.run(threads_of_a_trainer, num_processes=2, args=("ddp",))
    assert [rank for rank, _ in outcomes] == [0, 1]
    assert [after for _, (_, after) in outcomes] == [[], []]


@requires("horovod")
def test_horovodrun_exit_code_of_terminated_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C it returned 0 if the thread that kills a rank was the one that got its exit code."""
    from horovod.runner.common.util import safe_shell_exec as module

    def nothing(*_: object, **__: object) -> None:
        pass

    monkeypatch.setattr(module.os, "setsid", nothing)
    monkeypatch.setattr(module.os, "read", lambda *_: module.END)
    monkeypatch.setattr(module, "terminate_executor_shell_and_children", nothing)
    # subprocess returns 0 if another thread has already waited for the process.
    shell = SimpleNamespace(pid=1, wait=lambda: 0, stdin=None)
    monkeypatch.setattr(module.subprocess, "Popen", lambda *_, **__: shell)
    pipe = SimpleNamespace(close=nothing, fileno=nothing)
    for in_thread, code in ((lambda target: target(), 128 + signal.SIGTERM), (nothing, 0)):
        monkeypatch.setattr(module, "in_thread", in_thread)
        with pytest.raises(SystemExit) as ending:
            module._exec_middleman("true", {}, (pipe, pipe), (pipe, pipe), (pipe, pipe), False)
        assert ending.value.code == code
