"""Written files follow the user's umask, never a planted link, and are replaced atomically."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import checkpoints
import digits_job
import fake_imdb
import pytest
import torch
from launchers import launch

from hvd_trainer.checkpoint import storage
from hvd_trainer.checkpoint.export import export_tensors
from hvd_trainer.jobs.reviews import archive, tokenizer
from hvd_trainer.rendezvous import registry
from hvd_trainer.utils.files import atomic_write

pytestmark = pytest.mark.warm

UMASKS = (0o077, 0o022, 0o002)


@pytest.fixture(params=UMASKS, ids=[f"{mask:03o}" for mask in UMASKS])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def rights(folder: Path) -> dict[str, str]:
    """Return the permissions of all paths in a folder."""
    return {
        str(path.relative_to(folder)): f"{stat.S_IMODE(path.stat().st_mode):03o}" for path in folder.rglob("*")
    }


def wanted(folder: Path, umask: int) -> dict[str, str]:
    modes = {path: 0o777 if path.is_dir() else 0o666 for path in folder.rglob("*")}
    return {str(path.relative_to(folder)): f"{mode & ~umask:03o}" for path, mode in modes.items()}


def test_run_files_follow_umask(umask: int, tmp_path: Path) -> None:
    """safetensors creates files for their owner only, whatever the umask: others could not read the weights."""
    out = tmp_path / "out"
    extra = ["--save-every-steps", "1", "--profile-steps", "1", "--profile-skip", "0"]
    launch("python", 1, [*digits_job.argv("single", out / "log", extra), "--max-steps", "3"])
    launch("python", 1, ["-m", "hvd_trainer", "export", str(out / "log"), str(out / "weights.safetensors")])
    names = {path.name for path in out.rglob("*")}
    assert names >= {
        *("metrics.jsonl", "config.yaml", "run.json", "model.safetensors", "state.safetensors", "state.json"),
        *("manifest.json", ".lock"),
        "rank-0.json.gz",
        "weights.safetensors",
    }
    assert rights(out) == wanted(out, umask)


def test_token_cache_follows_umask(umask: int, tmp_path: Path) -> None:
    """Other users of a shared cache could not read it, and each built their own."""
    source = fake_imdb.write_archive(tmp_path / archive.ARCHIVE, fake_imdb.reviews())
    tokens = tokenizer.encode(archive.read(source), 300, 16)
    tokenizer.save(tokens, tmp_path / "cache/of.tokens")
    assert rights(tmp_path / "cache") == wanted(tmp_path / "cache", umask)


def test_file_registry_is_private_under_any_umask(
    umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the token: whoever reads it could join the job."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    registry.FileRegistry(registry.private_file("job")).publish("endpoint")
    folder = f"hvd_trainer-{os.getuid()}"
    assert rights(tmp_path) == {folder: "700", f"{folder}/job": "600"}


def test_written_files_do_not_follow_planted_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In /tmp another user may create links at names that can be guessed from the file's or the process's."""
    mine, shared = tmp_path / "mine", tmp_path / "shared"
    mine.write_text("precious")
    shared.mkdir()
    file = shared / "weights.safetensors"
    for name in (file.name, f".{file.name}", f".{file.name}.{os.getpid()}"):
        (shared / name).symlink_to(mine)
    (shared / f".step-000000001.{os.getpid()}").symlink_to(tmp_path, target_is_directory=True)
    export_tensors({"a": torch.zeros(2)}, file)
    path = checkpoints.save(shared, {"a": 1})
    assert mine.read_text() == "precious"
    assert not file.is_symlink()
    assert not path.is_symlink()
    assert checkpoints.load(path) == {"a": 1}
    assert not (tmp_path / storage.TENSORS).exists()
    monkeypatch.setattr("secrets.token_hex", lambda size: "guessed")
    (shared / f".{file.name}.guessed").symlink_to(mine)
    with pytest.raises(FileExistsError):
        export_tensors({"a": torch.zeros(2)}, file)
    assert mine.read_text() == "precious"


def test_atomic_write_keeps_old_file_after_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with atomic_write(file) as temporary:
        temporary.write_text("first")

    def fail() -> None:
        with atomic_write(file) as temporary:
            temporary.write_text("second")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        fail()
    assert file.read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
