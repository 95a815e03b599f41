"""One process in several worlds, as under horovodrun's elastic mode, without the launcher."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from trainings import options_of, signs

from hvd_trainer import Callback, RunView, Trainer, accuracy
from hvd_trainer.backends import Backend, EngineOptions
from hvd_trainer.backends.session import Session
from hvd_trainer.checkpoint import manager, storage
from hvd_trainer.errors import CheckpointError, LaunchError
from hvd_trainer.faults.activity import CollectiveAbortedError
from hvd_trainer.faults.elastic import RescaleError
from hvd_trainer.hvd.common import basics
from hvd_trainer.launch.world import World

STEPS = 10
"""of the one epoch"""


def horovodrun() -> Any:
    """Return a driver as an elastic rank sees it, where it is the only one in each world."""
    driver = SimpleNamespace(hosts_changed=threading.Event(), past_worlds=0, listen=lambda: None)

    def next_world() -> World:
        driver.hosts_changed.clear()
        driver.past_worlds += 1
        return World()

    driver.next_world = next_world
    return driver


class Trouble(Callback):
    """A callback that calls functions after certain steps, the first time that these are made."""

    def __init__(self, **at: Callable[[RunView], None]) -> None:
        self.at = at

    def on_step_end(self, run: RunView, result: Any) -> None:
        self.at.pop(f"step_{run.progress.step}", lambda _: None)(run)


def hosts_change(run: RunView) -> None:
    driver: Any = run.backend.session.driver
    driver.hosts_changed.set()


def a_rank_is_lost(run: RunView) -> None:
    """End the world in the middle of a step, before anything of it is in the snapshot."""
    raise RescaleError


def figures(save: dict[str, Any], folder: Path | None = None, **at: Callable[[RunView], None]) -> dict[str, float]:
    """Train an epoch in which all this happens; return its figures."""
    log_dir = None if folder is None else str(folder)
    with Trainer(options_of(epochs=1, batch_size=4, log_dir=log_dir, **save)) as trainer:
        trainer.backend.session.driver = horovodrun()
        model = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trouble, loss = Trouble(**at), nn.functional.cross_entropy
        history = trainer.fit(
            model, optimizer, loss, signs(4 * STEPS), metrics={"accuracy": accuracy}, callbacks=[trouble]
        )
        assert not trouble.at
        (record,) = history.epochs
        return {name: record[name] for name in ("train_loss", "train_accuracy")}


def test_metrics_after_two_lost_ranks() -> None:
    """The state at a world's start was saved again without the metrics' sums.

    Also of ranks that are lost before the first commit: the next world begins with the first one's weights.
    """
    seldom = {"commit_every_steps": 1000}
    # The ranks reach consensus after steps 1 and 3.
    lost = figures(seldom, step_2=hosts_change, step_5=a_rank_is_lost, step_6=a_rank_is_lost)
    assert lost == figures(seldom) == figures(seldom, step_2=a_rank_is_lost, step_3=a_rank_is_lost)


def test_metrics_after_lost_rank_and_resume(tmp_path: Path) -> None:
    def stop(run: RunView) -> None:
        raise CheckpointError("stopped")

    often = {"save_every_steps": 4}
    with pytest.raises(CheckpointError, match="stopped"):
        figures(often, tmp_path, step_6=stop)
    resumed = {"resume": "auto", "commit_every_steps": 1000}
    assert figures(resumed, tmp_path, step_5=a_rank_is_lost) == figures({})


class Watched(IterableDataset[tuple[Tensor, Tensor]]):
    """Validation data that notes how many samples are taken in each pass, and acts in the first one."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act, self.data = act, signs(100)
        self.taken: list[int] = []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.taken.append(0)
        for number in range(100):
            if number == 20 and len(self.taken) == 1:
                self.act()
            self.taken[-1] += 1
            yield self.data[number]


def test_hosts_change_in_an_evaluation() -> None:
    """The world was left after it; now at once, and the next world evaluates again."""
    records = []
    for changes in (True, False):
        with Trainer(options_of(epochs=2, batch_size=4, workers=0, evaluate_every_steps=4)) as trainer:
            driver = trainer.backend.session.driver = horovodrun()
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 2), nn.BatchNorm1d(2), nn.Dropout(0.2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            data = Watched(driver.hosts_changed.set if changes else lambda: None)
            loss = nn.functional.cross_entropy
            history = trainer.fit(model, optimizer, loss, signs(4 * STEPS), data, metrics={"accuracy": accuracy})
        assert driver.past_worlds == changes
        assert data.taken[changes:] == [100] * 6  # after steps 4, 8 and 10 of each epoch
        assert data.taken[0] < 100 or not changes
        records.append([(r["train_loss"], r["train_accuracy"], r["val_loss"], r["step"]) for r in history])
    assert records[0] == records[1]


def test_rescale_raises_error_of_pending_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next world has a new writer, which does not know of the error."""
    save, trouble = storage.save, [CheckpointError("the disk is full")]

    def full_once(*args: Any, **more: Any) -> Path:
        if trouble:
            raise trouble.pop()
        return save(*args, **more)

    monkeypatch.setattr(storage, "save", full_once)
    with pytest.raises(CheckpointError, match="the disk is full"):
        figures({"save_every_steps": 3, "save_every_epochs": None}, tmp_path, step_2=hosts_change)


def test_snapshot_excludes_aborted_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an abort, NCCL's kernel ends, and a copy that waited for it reads invalid results."""
    runs: list[Any] = []

    def abort_during_the_next_copy(run: RunView) -> None:
        runs.append(run)

        def copy(state: Any) -> Any:
            run.backend.activity.abort()
            return state

        monkeypatch.setattr(manager, "copy_to_host", copy)

    with pytest.raises(CollectiveAbortedError):
        figures({"commit_every_steps": 2}, step_3=abort_during_the_next_copy)
    assert runs[0].manager.snapshot.step == 2


def test_rejoin_retries_failed_rendezvous(lone_backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its time limit Horovod raises TimeoutError, which is no RuntimeError: it ended the rank."""
    lone_backend.session.driver = driver = horovodrun()
    trouble: list[Exception] = [TimeoutError("the others did not take part"), LaunchError("not all came")]

    def start() -> None:
        if trouble:
            raise trouble.pop()

    monkeypatch.setattr(lone_backend, "_start", start)
    assert lone_backend.session.leave(RescaleError())
    lone_backend.session.join_next_world(lone_backend)
    assert driver.past_worlds == 3


def test_hvd_retries_failed_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first start had registered its process sets, and the second one none of its own."""
    make, trouble = basics.Controller, [TimeoutError("the others did not take part")]

    def controller(*args: Any) -> Any:
        if trouble:
            raise trouble.pop()
        return make(*args)

    monkeypatch.setattr(basics, "Controller", controller)
    session = Session(EngineOptions(backend="ddp"), {})
    session.driver = horovodrun()
    runtime = basics.Runtime(session, {}, ())
    session.join_next_world(runtime)
    try:
        assert runtime.controller(0).ranks == [0]
    finally:
        session.end()
