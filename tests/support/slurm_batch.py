"""Submit a batch script to the tests' own Slurm and wait for it, or disturb it."""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import process_tree
import psutil
from child_environment import child_environment
from slurm_cluster import SlurmCluster
from waiting import PATIENCE_S

_NOT_ENDED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
TOLD_S = 3.0
"""After a job's last daemon is gone, its end may still be on its way to a busy controller."""


@dataclass(frozen=True)
class BatchResult:
    """How a batch job ended.

    ``state`` is Slurm's word (COMPLETED, FAILED, CANCELLED ...), ``returncode`` the script's exit
    code, or 128 + N when signal N ended it; of an array, those of the first task that has failed, if
    one has. ``output`` is what it printed, errors included.
    """

    job_id: int
    state: str
    returncode: int
    output: str


class Batch:
    """A batch job, or an array of them, that was submitted."""

    def __init__(self, slurm: SlurmCluster, job_id: int, output: Path) -> None:
        self._slurm, self.job_id, self._output = slurm, job_id, output

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def tasks(self) -> list[dict[str, str]]:
        """Return what ``scontrol show job`` prints of the job, or of each task of the array, by fields."""
        shown = self._slurm.client("scontrol", "--oneliner", "show", "job", str(self.job_id)).stdout
        lines = [line.split() for line in shown.splitlines() if line.strip()]
        return [dict(word.split("=", 1) for word in line if "=" in word) for line in lines]

    def _is_alive(self, job_id: str) -> bool:
        """Return whether a daemon of the job's steps or script, which has the job in its title, is still there."""
        return any(
            f"slurmstepd: [{job_id}." in " ".join(process.info["cmdline"] or [])
            for process in psutil.process_iter(["cmdline"])
        )

    def wait_for(self, file: Path, text: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait until the job has written a text into a file.

        Raises:
            TimeoutError: it had not in time; the message has its output.
        """
        deadline = time.monotonic() + timeout_s
        while not (file.is_file() and text in file.read_text()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {text} in {file} after {timeout_s:g} s; the job's output:\n{self.output}")
            time.sleep(0.05)

    def wait(self, timeout_s: float = PATIENCE_S) -> BatchResult:
        """Wait for the end of all tasks.

        Raises:
            TimeoutError: they had not ended in time; the message has their output.
        """
        deadline = time.monotonic() + timeout_s
        gone: dict[str, float] = {}
        while time.monotonic() < deadline:
            tasks = self.tasks()
            if all(task["JobState"] not in _NOT_ENDED for task in tasks):
                task = next((task for task in tasks if task["JobState"] != "COMPLETED"), tasks[0])
                code, signal = map(int, task["ExitCode"].split(":"))
                return BatchResult(self.job_id, task["JobState"], 128 + signal if signal else code, self.output)
            for task in tasks:
                if task.get("Reason") != "BeginTime" or self._is_alive(task["JobId"]):
                    gone.pop(task["JobId"], None)
                elif time.monotonic() > gone.setdefault(task["JobId"], time.monotonic()) + TOLD_S:
                    # A requeued job waits for two minutes, which a test need not, unless the end of its first
                    # run is yet to be told: Slurm would take it for that of the next.
                    name = f"{self.job_id}_{task['ArrayTaskId']}" if "ArrayTaskId" in task else str(self.job_id)
                    self._slurm.client("scontrol", "update", f"JobId={name}", "StartTime=now")
            time.sleep(0.1)
        raise TimeoutError(
            f"batch job {self.job_id} had not ended after {timeout_s:g} s; its output so far:\n{self.output}"
        )


@contextmanager
def submitted(
    slurm: SlurmCluster,
    script: str,
    *options: str,
    arguments: Sequence[str] = (),
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
) -> Iterator[Batch]:
    """Submit a batch script, with its ``#!`` line; what is left of it at the end of the block is cancelled.

    Args:
        options: of sbatch, such as ``--ntasks=2``.
        arguments: of the script.
        env: set on top of this process's environment; None removes a variable.
        cwd: where the script starts; the repository's root unless given.
    """
    name = f"batch-{secrets.token_hex(4)}"
    folder = slurm.folder / name
    folder.mkdir()
    output = folder / "output"
    output.touch()
    (folder / "script").write_text(script)
    mark = f"{os.environ.get(process_tree.MARK, 'session')}/{name}"
    environ = child_environment(os.environ, {**(env or {}), **slurm.environ}, mark=mark, folder=folder)
    command = ["sbatch", "--parsable", f"--job-name={name}", f"--output={output}", *options]
    accepted = subprocess.run(
        [*command, str(folder / "script"), *arguments],
        env=environ,
        cwd=cwd or Path(__file__).resolve().parents[2],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=30,
    )
    try:
        yield Batch(slurm, int(accepted.stdout.split(";")[0]), output)
    finally:
        slurm.cancel(name)
        process_tree.kill_all_marked(mark)


def sbatch(
    slurm: SlurmCluster,
    script: str,
    *options: str,
    arguments: Sequence[str] = (),
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
    timeout_s: float = PATIENCE_S,
) -> BatchResult:
    """Submit a batch script and wait for its end; the arguments are those of :func:`submitted`.

    Raises:
        TimeoutError: it had not ended in time; it was cancelled, the message has its output.
    """
    with submitted(slurm, script, *options, arguments=arguments, env=env, cwd=cwd) as batch:
        return batch.wait(timeout_s)
