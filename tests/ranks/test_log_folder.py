"""The log folder: where its checkpoints are, which files are the user's, and a disk that is full."""

from __future__ import annotations

import errno
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import trainings
from torch import nn

from hvd_trainer import EngineOptions, OptionError, TensorData
from hvd_trainer.backends import create
from hvd_trainer.observe.run_folder import CONFIG, FACTS, JOB, TOKENIZER, RunFolder
from hvd_trainer.observe.run_log import RunLog


def fit(folder: Path, **options: Any) -> None:
    """Train three steps per epoch in this process."""
    data = TensorData(torch.ones(12, 2), torch.zeros(12).long())
    options = {"epochs": 1, "batch_size": 4, "log_dir": str(folder), **options}
    trainings.fit(trainings.options_of(**options), nn.Linear(2, 2), data, data)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def keeps_checkpoints_on_their_disk(log: Path, disk: Path) -> None:
    """Train twice, and check that the checkpoints of both runs are on the disk that the user has chosen."""
    for _ in range(2):
        fit(log, epochs=1)
    assert names(disk) == ["earlier-1", "step-000000003"]
    assert names(disk / "earlier-1") == ["step-000000003"]
    assert not (log / "earlier-1/checkpoints").exists()
    fit(log, epochs=2, resume="auto")
    assert names(disk) == ["earlier-1", "step-000000003", "step-000000006"]


def test_checkpoints_may_be_a_link_to_another_disk(tmp_path: Path) -> None:
    """The first run moved the link away, and saved to the small disk of the log folder."""
    disk = tmp_path / "scratch"
    (tmp_path / "log").mkdir()
    (tmp_path / "log/checkpoints").symlink_to(disk)
    with pytest.raises(OptionError, match=r"checkpoints is a link to .*scratch, which is no folder\. Make it"):
        fit(tmp_path / "log")
    disk.mkdir()
    keeps_checkpoints_on_their_disk(tmp_path / "log", disk)
    assert (tmp_path / "log/checkpoints").is_symlink()


def test_checkpoints_may_be_a_mounted_volume(small_disk: Path, tmp_path: Path) -> None:
    """It was refused, because a volume cannot be moved away: EBUSY."""
    place = tmp_path / "log/checkpoints"
    place.mkdir(parents=True)
    subprocess.run(["mount", "--bind", str(small_disk), str(place)], check=True)
    try:
        keeps_checkpoints_on_their_disk(tmp_path / "log", small_disk)
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_log_folder_that_is_a_file_is_one_sentence(below: str, tmp_path: Path) -> None:
    """`[Errno 17] File exists`, or `[Errno 20]`, and no word of what to do."""
    file = tmp_path / "log"
    file.touch()
    assert RunFolder(file / below).lock(0) == f"{file} is a file, and no folder. Name another one"


def test_files_of_the_user_stay_in_the_log_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("of the user")
    for _ in range(2):
        fit(tmp_path, epochs=1)
        (tmp_path / TOKENIZER).write_text("of this run")
    assert (tmp_path / "tokenizer.json").read_text() == "of the user"
    assert (tmp_path / "earlier-1" / TOKENIZER).read_text() == "of this run"


@pytest.mark.parametrize("left", [0, 4096, 8192])
def test_full_disk_at_the_start_is_one_sentence(left: int, small_disk: Path) -> None:
    """It was a traceback, where the disk was full once the lock and the log were there."""
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(filler, filler.stat().st_size - left)
    with pytest.raises(OptionError, match=r"^--log-dir .* cannot be written to: \[Errno 28\] No space left"):
        fit(small_disk / "log")


def test_files_of_a_run_are_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that was killed while it wrote left half of one, and forgot its name: it did not resume by itself."""
    fit(tmp_path, epochs=1)
    kept = {name: (tmp_path / name).read_bytes() for name in (CONFIG, FACTS, JOB)}
    monkeypatch.setattr(Path, "replace", fail_to_write)
    folder, log = RunFolder(tmp_path), RunLog(create(EngineOptions(backend="single"), {}), str(tmp_path))
    for write in (lambda: folder.write_names(["x"]), lambda: log.describe({}, {})):
        with pytest.raises((OSError, OptionError), match="No space"):
            write()
    log.close()
    assert {name: (tmp_path / name).read_bytes() for name in kept} == kept


def fail_to_write(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
