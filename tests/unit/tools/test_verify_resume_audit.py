"""`verify-resume` without ranks: that lost samples, different bits and left processes would be noticed."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from hvd_trainer import LaunchError
from hvd_trainer.checkpoint import storage
from hvd_trainer.faults.shared_status import SharedStatus
from hvd_trainer.tools.runner.processes import Start
from hvd_trainer.tools.verify_resume import injector
from hvd_trainer.tools.verify_resume.audit import (
    BATCH,
    PLACES,
    count_different_bits,
    count_lost_samples,
    plan_kills,
)
from hvd_trainer.tools.verify_resume.audit_job import STEPS_PER_EPOCH
from hvd_trainer.tools.verify_resume.injector import FaultInjector, Kill


def test_planned_kills_cover_every_place() -> None:
    plans = plan_kills(20, 4, random.Random(0))
    assert {plan.place for plan in plans} == set(PLACES)
    assert [plan.step for plan in plans] == sorted(plan.step for plan in plans)
    assert plans == plan_kills(20, 4, random.Random(0))


@pytest.fixture
def sleeping_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultInjector]:
    """Start a job whose launcher and only rank do nothing."""
    for name in ("START_S", "END_S", "SETTLE_S"):
        monkeypatch.setattr(injector, name, 0.2)
    status = SharedStatus.create()
    with (
        injector.running_job(Start(["sleep", "60"]), tmp_path) as job,
        subprocess.Popen(["sleep", "60"]) as rank,
    ):
        made = FaultInjector(job, 1)
        made._ranks, made._statuses = {0: psutil.Process(rank.pid)}, {0: status}
        status.write(3, "data")
        yield made
        rank.kill()


def test_inject_gives_up_on_a_job_without_progress(sleeping_job: FaultInjector) -> None:
    with pytest.raises(LaunchError, match="did not come to step 4"):
        sleeping_job.inject(Kill("data", 0, 4, 0.0))


def test_inject_counts_a_launcher_that_outlives_its_ranks(sleeping_job: FaultInjector) -> None:
    kill = Kill("data", 0, 3, 0.0)
    sleeping_job.inject(kill)
    assert kill.left_behind == 1


def write_record(
    folder: Path, *, forget: int | None = None, repeat: int | None = None, torn: bool = False
) -> None:
    """Write the record of one epoch of one rank, two steps of which were repeated after a kill."""
    steps = [list(range(step * BATCH, (step + 1) * BATCH)) for step in range(STEPS_PER_EPOCH)]
    if repeat is not None:
        steps[1][0] = repeat
    lines = [" ".join(map(str, [step + 1, 0, *numbers])) for step, numbers in enumerate(steps)]
    lines = [*lines[:4], *(["4 0 17"] if torn else []), "", *lines[2:]]
    folder.mkdir()
    (folder / "rank-0").write_text("\n".join(line for line in lines if not line.startswith(f"{forget} ")) + "\n")


def test_count_lost_samples_counts_lost_and_repeated_ones(tmp_path: Path) -> None:
    write_record(tmp_path / "whole", torn=True)
    assert count_lost_samples(tmp_path / "whole", 1, 1) == 0
    write_record(tmp_path / "forgotten", forget=5)
    assert count_lost_samples(tmp_path / "forgotten", 1, 1) == BATCH
    write_record(tmp_path / "repeated", repeat=3)
    assert count_lost_samples(tmp_path / "repeated", 1, 1) == 2  # one twice, and another never


def test_count_different_bits_of_checkpoints(tmp_path: Path) -> None:
    weights = torch.arange(6.0).view(2, 3)
    other = weights.clone()
    other.view(torch.uint8)[0, 0] ^= 5
    for name, tensor in (("a", weights), ("same", weights.clone()), ("other", other)):
        state = {"model": {"weight": tensor}, "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}}}
        storage.save(tmp_path / name, state, step=1, epoch=1)
    assert count_different_bits(tmp_path / "a", tmp_path / "same") == 0
    assert count_different_bits(tmp_path / "a", tmp_path / "other") == 2
