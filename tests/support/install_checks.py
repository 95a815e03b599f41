"""Helpers of the tests of the installer and of `make`."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from hvd_trainer.horovod_build.patch_set import RECORD_FILE

ROOT = Path(__file__).resolve().parents[2]
# A port on which nobody listens: pip is refused at once, as on a machine without a network.
NO_NETWORK = {
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_EXTRA_INDEX_URL": "",
    "PIP_FIND_LINKS": "",
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_RETRIES": "1",
    "PIP_NO_CACHE_DIR": "1",
}


def tool_folder(folder: Path, *names: str) -> str:
    """Make a folder for PATH with only the named programs of this machine."""
    folder.mkdir()
    for name in names:
        found = shutil.which(name)
        if found is None:
            pytest.skip(f"needs {name}: apt-get install {name}")
        (folder / name).symlink_to(found)
    return str(folder)


def script(path: Path, text: str) -> str:
    """Write an executable shell script; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def put_nccl(home: Path, library: str | None = "lib/libnccl.so.2", header: bool = True) -> Path:
    """Write NCCL 2.28.9's header and library into a folder, as some package has them."""
    (home / "include").mkdir(parents=True)
    if header:
        text = "#define NCCL_MAJOR 2\n#define NCCL_MINOR 28\n#define NCCL_PATCH 9\n"
        (home / "include/nccl.h").write_text(text, encoding="utf-8")
    if library is not None:
        (home / library).parent.mkdir(parents=True)
        (home / library).touch()
    return home


def record_of(file: Path) -> dict[str, Any]:
    """Return what a Horovod was built for, from the file with its record."""
    values: dict[str, Any] = {}
    exec(file.read_text(encoding="utf-8"), values)
    record: dict[str, Any] = values["RECORD"]
    return record


def installed_record() -> dict[str, Any]:
    """Return what the installed Horovod was built for; empty if another tool has built it."""
    spec = importlib.util.find_spec("horovod")
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).parent.parent / RECORD_FILE
    return record_of(file) if file.is_file() else {}
