"""Show how far the compilation is, from what CMake prints to the log."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

from tqdm import tqdm

POLL_S = 0.5
PERCENT = re.compile(rb"\[ *(\d+)%\] (?:Building|Linking)")


def wait_with_progress(process: subprocess.Popen[bytes], log: Path, since: int) -> int:
    """Wait for a build and return its exit code; show a bar with the time left if stderr is a terminal.

    Args:
        process: the build.
        log: to which it prints.
        since: bytes of the log that were there before.
    """
    with tqdm(total=100, desc="compiling", unit="%", disable=None, leave=False) as bar:
        while process.poll() is None:
            # The lines of the log are long; all of them together have a few megabytes.
            with log.open("rb") as file:
                file.seek(since)
                found = PERCENT.findall(file.read())
            bar.update(max(map(int, found), default=0) - bar.n)
            time.sleep(POLL_S)
    return process.returncode
