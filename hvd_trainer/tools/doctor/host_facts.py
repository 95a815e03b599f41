"""Collect what a host has for training: `doctor` sends the text of this file to other hosts by ssh.

So it imports the standard library only, and none of the packages that it looks for.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

MARK = "hvd_trainer doctor "
"""The prefix of the answer's line: a login script may print, too."""


def describe(folder: str) -> dict[str, Any]:
    """Return the versions that all hosts must have alike, the numbers of CPUs and GPUs, and whether `folder`
    exists.
    """
    versions = {"python": platform.python_version()}
    for name in ("hvd_trainer", "torch", "horovod"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    gpus = Path("/proc/driver/nvidia/gpus")
    return {
        "versions": versions,
        "files": {"hvd_trainer": _digest("hvd_trainer", "**/*.py"), "horovod": _digest("horovod", "*_build.py")},
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": len(list(gpus.iterdir())) if gpus.is_dir() else 0,
        "folder": os.path.isdir(folder),
    }


def _digest(package: str, pattern: str) -> str:
    """Return the SHA-256 of a package's files, without importing it."""
    spec = importlib.util.find_spec(package)
    digest = hashlib.sha256()
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        for file in sorted(Path(place).glob(pattern)):
            digest.update(str(file.relative_to(place)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    if os.path.isdir(sys.argv[1]):
        # horovodrun would start the ranks in that folder, where a package in it comes before an installed one.
        os.chdir(sys.argv[1])
    print(MARK + json.dumps(describe(sys.argv[1])), flush=True)
