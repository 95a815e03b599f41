"""The package's cache folders of this user, outside any one environment."""

from __future__ import annotations

import os
from pathlib import Path


def default_data_dir() -> Path:
    """Return the folder for data sets and their tokens: $XDG_CACHE_HOME (else ~/.cache) /hvd_trainer/data."""
    return _cache_folder() / "data"


def default_wheel_dir() -> Path:
    """Return the folder for built wheels: $XDG_CACHE_HOME (else ~/.cache) /hvd_trainer/wheels."""
    return _cache_folder() / "wheels"


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hvd_trainer"
