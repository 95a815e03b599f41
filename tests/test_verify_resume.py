"""`verify-resume`: a dozen kills here, and that it would notice what it looks for."""

from __future__ import annotations

import os
import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from launchers import launch, requires

from hvd_trainer import LaunchError
from hvd_trainer.checkpoint import storage
from hvd_trainer.faults.shared_status import SharedStatus
from hvd_trainer.tools.verify_resume import kill
from hvd_trainer.tools.verify_resume.audit_job import STEPS_PER_EPOCH
from hvd_trainer.tools.verify_resume.cli import BATCH, PLACES, bits_different, plans_for, samples_lost


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "seed", "kills"),
    [("ddp", 0, 2), pytest.param("horovod", 1, 4, marks=[requires("horovod"), pytest.mark.nightly])],
)
def test_some_kills(backend: str, seed: int, kills: int) -> None:
    options = ["--kills", str(kills), "--backend", backend, "--seed", str(seed)]
    result = launch("python", 1, ["-m", "hvd_trainer", "verify-resume", *options], timeout_s=300)
    assert len(re.findall(r"^kill \d: in step", result.stdout, re.MULTILINE)) == kills
    for nothing in ("samples lost or repeated", "bits different", "processes left behind"):
        assert re.search(rf"^{nothing} +0$", result.stdout, re.MULTILINE), result.stdout
    assert re.search(r"^recovery, s, p95 +\d+\.\d$", result.stdout, re.MULTILINE)


def test_plans_cover_every_place() -> None:
    plans = plans_for(20, 4, random.Random(0))
    assert {plan.place for plan in plans} == set(PLACES)
    assert [plan.step for plan in plans] == sorted(plan.step for plan in plans)
    assert plans == plans_for(20, 4, random.Random(0))


@pytest.fixture
def asleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[kill.RunningJob]:
    """A job whose launcher and only rank do nothing, for ever."""
    for name in ("START_S", "END_S", "SETTLE_S"):
        monkeypatch.setattr(kill, name, 0.2)
    page = SharedStatus.create()
    assert page is not None
    with kill.RunningJob(["sleep", "60"], tmp_path, size=1) as job, subprocess.Popen(["sleep", "60"]) as rank:
        job._ranks, job._pages = {0: psutil.Process(rank.pid)}, {0: page[0]}
        page[0].write(3, "data")
        yield job
        rank.kill()
    os.close(page[1])


def test_a_job_that_does_not_get_on_is_given_up(asleep: kill.RunningJob) -> None:
    with pytest.raises(LaunchError, match=r"did not come to step 4 in 0\.2 s"):
        asleep.hunt(kill.Plan("data", 0, 4, 0.0))


def test_a_launcher_that_outlives_its_ranks_is_counted(asleep: kill.RunningJob) -> None:
    hit = asleep.hunt(kill.Plan("data", 0, 3, 0.0))
    assert hit is not None
    assert hit.left_behind == 1


def audit(folder: Path, *, forget: int | None = None, repeat: int | None = None, torn: bool = False) -> None:
    """One epoch of one rank, written down; after a kill two of its steps were made again."""
    steps = [list(range(step * BATCH, (step + 1) * BATCH)) for step in range(STEPS_PER_EPOCH)]
    if repeat is not None:
        steps[1][0] = repeat
    lines = [" ".join(map(str, [step + 1, 0, *numbers])) for step, numbers in enumerate(steps)]
    lines = [*lines[:4], *(["4 0 17"] if torn else []), "", *lines[2:]]
    folder.mkdir()
    (folder / "rank-0").write_text("\n".join(line for line in lines if not line.startswith(f"{forget} ")) + "\n")


def test_lost_and_repeated_samples_are_counted(tmp_path: Path) -> None:
    audit(tmp_path / "whole", torn=True)
    assert samples_lost(tmp_path / "whole", 1, 1) == 0
    audit(tmp_path / "forgotten", forget=5)
    assert samples_lost(tmp_path / "forgotten", 1, 1) == BATCH
    audit(tmp_path / "repeated", repeat=3)
    assert samples_lost(tmp_path / "repeated", 1, 1) == 2  # one twice, and another never


def test_a_different_bit_is_counted(tmp_path: Path) -> None:
    weights = torch.arange(6.0).view(2, 3)
    other = weights.clone()
    other.view(torch.uint8)[0, 0] ^= 5
    for name, tensor in (("a", weights), ("same", weights.clone()), ("other", other)):
        state = {"model": {"weight": tensor}, "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}}}
        storage.save(tmp_path / name, state, step=1, epoch=1)
    assert bits_different(tmp_path / "a", tmp_path / "same") == 0
    assert bits_different(tmp_path / "a", tmp_path / "other") == 2
