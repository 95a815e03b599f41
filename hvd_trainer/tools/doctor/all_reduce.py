"""`doctor --run`: two ranks on each engine, started as a user would start them, that exchange tensors."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvd_trainer.errors import OptionError
from hvd_trainer.tools.doctor import all_reduce_job
from hvd_trainer.tools.doctor.finding import Finding, error, ok
from hvd_trainer.tools.doctor.torch_facts import Seen
from hvd_trainer.tools.runner.command import LAUNCHER_OF, command_for
from hvd_trainer.tools.runner.runs import Run, log_dir, run_once
from hvd_trainer.utils.process import cpu_ids
from hvd_trainer.utils.text import INSTALL_HOROVOD

RANKS = 2
LIMIT_S = 120.0


def engines(seen: Seen) -> list[str]:
    """Those that are installed, whether they work or not."""
    if seen.torch.error is not None:
        return []
    return ["ddp"] if seen.horovod is None else ["ddp", "horovod"]


def device_of(seen: Seen, engine: str) -> str:
    """Where two ranks of an engine can be at once: NCCL refuses them on one GPU, and a Horovod for CPUs on any."""
    on_cpu_only = engine == "horovod" and seen.horovod is not None and not seen.horovod.record.get("cuda")
    return "cpu" if on_cpu_only or len(seen.torch.gpus) < RANKS else seen.torch.kind or "cpu"


def prove_engine(engine: str, device: str) -> Finding:
    """Starts the ranks, and tells what came of it."""
    job = ["-m", all_reduce_job.__name__, "--backend", engine, "--device", device]
    threads = max(1, len(cpu_ids()) // RANKS)
    with tempfile.TemporaryDirectory(prefix="hvd_trainer-doctor-") as name:
        folder = Path(name)
        job += ["--log-dir", str(log_dir(folder)), "--began", str(time.time())]
        try:
            command = command_for(LAUNCHER_OF[engine], RANKS, job)
        except OptionError:
            return error(f"run {engine}", f"there is no {LAUNCHER_OF[engine]} here", f"{INSTALL_HOROVOD} --force")
        run = run_once(command, folder, {"engine": engine}, 1, threads=threads, limit_s=LIMIT_S, read=read_result)
    return judge_run(engine, device, run)


def read_result(folder: Path) -> Mapping[str, Any] | None:
    """What rank 0 has written; None: it did not come to that."""
    with suppress(OSError, ValueError):
        result: Mapping[str, Any] = json.loads((folder / all_reduce_job.RESULT).read_text())
        return result
    return None


def judge_run(engine: str, device: str, run: Run) -> Finding:
    """Of how the ranks have ended."""
    launcher = LAUNCHER_OF[engine]
    if run.state != "done":
        note = f"no end after {LIMIT_S:g} s" if run.seconds >= LIMIT_S else run.note
        start = f"{launcher} {'-np' if launcher == 'horovodrun' else '--standalone --nproc-per-node'} {RANKS}"
        python = " python" if launcher == "horovodrun" else ""
        job = f"-m {all_reduce_job.__name__} --backend {engine} --device {device}"
        remedy = f"{start}{python} {job}    (prints all of it)"
        return error(f"run {engine}", f"{RANKS} ranks by {launcher} failed: {note}", remedy)
    figures = {name: round(float(run.figures[name]), 4) for name in ("started_s", *all_reduce_job.SIZES)}
    small, large = (figures[name] for name in all_reduce_job.SIZES)
    figures["gb_per_s"] = round(4 * 2**20 / 1e9 / (large / 1000), 3)
    found = (
        f"{RANKS} ranks by {launcher}, {run.figures['engine']}: sums are right; 4 kB in {small:.2f} ms, "
        f"4 MB in {large:.1f} ms ({figures['gb_per_s']:.1f} GB/s); started in {figures['started_s']:.1f} s"
    )
    return ok(f"run {engine}", found, **figures)
