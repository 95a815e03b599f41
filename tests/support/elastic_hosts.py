"""Jobs under horovodrun's elastic mode, on hosts that come and go: two names of this machine, without ssh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from launchers import REPOSITORY, Job, start

HERE, THERE = "localhost", "127.0.0.1"


class Cluster:
    """The hosts that horovodrun's discovery script prints."""

    def __init__(self, folder: Path) -> None:
        self._list, self.script = folder / "hosts", folder / "hosts.sh"
        self.script.write_text(f"#!/bin/sh\ncat {self._list}\n")
        self.script.chmod(0o755)

    def has(self, **slots: int) -> None:
        """Set the slots by host: `here`, `there`."""
        names = {"here": HERE, "there": THERE}
        temporary = self._list.with_suffix(".new")
        temporary.write_text("".join(f"{names[host]}:{count}\n" for host, count in slots.items()))
        temporary.replace(self._list)


@contextmanager
def elastic(
    argv: list[str], folder: Path, more: Sequence[str] = (), env: Mapping[str, str] | None = None, **slots: int
) -> Iterator[tuple[Job, Cluster]]:
    """Start a job on some hosts; `more` are horovodrun's options."""
    cluster = Cluster(folder)
    cluster.has(**slots)
    options = ["--min-np", "1", "--max-np", "4", "--network-interfaces", "lo", *more]
    options += ["--host-discovery-script", str(cluster.script)]
    env = {"PYTHONPATH": str(REPOSITORY), **(env or {})}
    with start("horovodrun", sum(slots.values()), argv, options=options, env=env) as job:
        yield job, cluster
