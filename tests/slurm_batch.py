"""Submit a batch script to the tests' own Slurm and wait for it."""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import process_tree
from child_environment import child_environment
from slurm_cluster import SlurmCluster

_NOT_ENDED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")


@dataclass(frozen=True)
class BatchResult:
    """How a batch job ended.

    ``state`` is Slurm's word (COMPLETED, FAILED, CANCELLED ...), ``returncode`` the script's exit
    code, or 128 + N when signal N ended it, ``output`` what it printed, errors included.
    """

    job_id: int
    state: str
    returncode: int
    output: str


def sbatch(
    slurm: SlurmCluster,
    script: str,
    *options: str,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
    timeout_s: float = 120.0,
) -> BatchResult:
    """Submit a batch script, with its ``#!`` line, and wait for its end.

    Args:
        options: of sbatch, such as ``--ntasks=2``.
        env: set on top of this process's environment; None removes a variable.
        cwd: where the script starts; the repository's root unless given.

    Raises:
        TimeoutError: it had not ended in time; it was cancelled, the message has its output.
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
    submitted = subprocess.run(
        [*command, str(folder / "script")],
        env=environ,
        cwd=cwd or Path(__file__).resolve().parent.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=30,
    )
    job_id = int(submitted.stdout.split(";")[0])
    try:
        state, returncode = _wait_for_end(slurm, job_id, timeout_s)
    except TimeoutError as error:
        text = output.read_text(errors="replace")
        raise TimeoutError(f"{error}; its output so far:\n{text}") from None
    finally:
        slurm.cancel(name)
        process_tree.kill_all_marked(mark)
    return BatchResult(job_id, state, returncode, output.read_text(errors="replace"))


def _wait_for_end(slurm: SlurmCluster, job_id: int, timeout_s: float) -> tuple[str, int]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        shown = slurm.client("scontrol", "--oneliner", "show", "job", str(job_id)).stdout
        fields = dict(field.split("=", 1) for field in shown.split() if "=" in field)
        if fields["JobState"] not in _NOT_ENDED:
            code, signal = map(int, fields["ExitCode"].split(":"))
            return fields["JobState"], 128 + signal if signal else code
        if fields.get("Reason") == "BeginTime":
            # A requeued job waits for two minutes, which a test need not.
            slurm.client("scontrol", "update", f"JobId={job_id}", "StartTime=now")
        time.sleep(0.1)
    raise TimeoutError(f"batch job {job_id} had not ended after {timeout_s:g} s")
