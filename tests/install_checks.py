"""What the tests of the installer and of `make` share."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
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
    """A PATH with only the named programs of this machine."""
    folder.mkdir()
    for name in names:
        found = shutil.which(name)
        if found is None:
            pytest.skip(f"needs {name}: apt-get install {name}")
        (folder / name).symlink_to(found)
    return str(folder)


def script(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)
