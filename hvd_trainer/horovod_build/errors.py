"""The installer's one error, and the causes that it finds in the log of a failed step."""

from __future__ import annotations

import re
from pathlib import Path

from hvd_trainer.errors import UserError
from hvd_trainer.utils.text import INSTALL_HOROVOD


class InstallError(UserError):
    """Horovod cannot be built or installed: what was asked, what was found, what to type."""

    def __init__(self, asked: str, cause: str, remedy: str, log: Path | None = None) -> None:
        self.found = cause
        lines = [asked, f"  found: {cause}", f"  type:  {remedy}"]
        if log is not None:
            lines.append(f"  the full log: {log}")
        super().__init__("\n".join(lines))


# (pattern in the log, `found`, `type`); the first that matches counts.
CAUSES = (
    (
        r"No space left on device|Disk quota exceeded|Errno 28\b|Errno 122\b",
        "the disk is full",
        "free some space (a build takes about 1 GB), or --wheel-dir on another disk",
    ),
    (
        r"DO NOT MATCH THE HASHES",
        "the downloaded horovod-0.28.1.tar.gz is not the published one (its sha256 differs)",
        "check the package index that pip is set to: pip config list",
    ),
    (
        r"Failed to establish a new connection|Temporary failure in name resolution"
        r"|Connection refused|Network is unreachable|ProxyError|Read timed out|ConnectTimeout"
        r"|Max retries exceeded|Remote end closed connection|Connection reset"
        # pip without retries keeps quiet about the connection itself.
        r"|\(from versions: none\)",
        "pip could not reach the package index (no network?)",
        "check the network and `pip config list`, then run the same command again",
    ),
    (
        r"Killed signal terminated program|out of memory allocating|virtual memory exhausted",
        "the compiler ran out of memory",
        f"{INSTALL_HOROVOD} --jobs 1",
    ),
)


def explain(asked: str, log: Path, since: int = 0) -> InstallError:
    """Return the error for a step that failed, by what it wrote to `log` after byte `since`."""
    with log.open("rb") as file:
        file.seek(since)
        text = file.read().decode(errors="replace")
    for pattern, cause, remedy in CAUSES:
        if re.search(pattern, text):
            return InstallError(asked, cause, remedy, log)
    errors = re.search(r"^.*\b(?:fatal )?(?:error|Error)\b.*$", text, re.MULTILINE)
    cause = errors.group(0).strip()[:300] if errors else (text.strip().splitlines() or ["?"])[-1]
    return InstallError(asked, cause, f"look at the log's end: tail -50 {log}", log)
