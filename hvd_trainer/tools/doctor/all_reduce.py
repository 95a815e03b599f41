"""Start two ranks on each engine for `doctor --run`, as a user would, and have them exchange tensors."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from hvd_trainer.errors import OptionError
from hvd_trainer.horovod_build.facts import Facts
from hvd_trainer.tools.doctor import all_reduce_job
from hvd_trainer.tools.doctor.finding import Finding, error, ok
from hvd_trainer.tools.runner.command import LAUNCHER_OF, command_for
from hvd_trainer.tools.runner.machine import threads_per_rank
from hvd_trainer.tools.runner.runs import RunRecord, log_dir
from hvd_trainer.tools.runner.trial_runner import run_once
from hvd_trainer.utils.text import INSTALL_HOROVOD

RANKS = 2
RUN_TIMEOUT_S = 120.0


def engines(facts: Facts) -> list[str]:
    """Return the names of the installed engines, whether they work or not."""
    if facts.torch.error is not None:
        return []
    return ["ddp"] if facts.horovod is None else ["ddp", "horovod"]


def device_of(facts: Facts, engine: str) -> str:
    """Return the device type on which two ranks of an engine can run: NCCL refuses two on one GPU, and a
    Horovod built for CPUs has no GPU at all.
    """
    on_cpu_only = engine == "horovod" and facts.horovod is not None and not facts.horovod.record.get("cuda")
    return "cpu" if on_cpu_only or len(facts.torch.gpus) < RANKS else facts.torch.kind or "cpu"


def prove_engine(engine: str, device: str) -> Finding:
    """Run the job with two ranks on an engine and return a finding about it."""
    job = ["-m", all_reduce_job.__name__, "--backend", engine, "--device", device]
    threads = threads_per_rank(RANKS)
    with tempfile.TemporaryDirectory(prefix="hvd_trainer-doctor-") as name:
        folder = Path(name)
        job += ["--log-dir", str(log_dir(folder)), "--began", str(time.time())]
        try:
            command = command_for(LAUNCHER_OF[engine], RANKS, job)
        except OptionError:
            return error(f"run {engine}", f"there is no {LAUNCHER_OF[engine]} here", f"{INSTALL_HOROVOD} --force")
        read, limit_s = all_reduce_job.read_result, RUN_TIMEOUT_S
        run = run_once(command, folder, {"engine": engine}, 1, threads=threads, limit_s=limit_s, read=read)
    return judge_run(engine, device, run)


def judge_run(engine: str, device: str, run: RunRecord) -> Finding:
    """Return the finding for a run that has ended."""
    launcher = LAUNCHER_OF[engine]
    if run.state != "done":
        note = f"no end after {RUN_TIMEOUT_S:g} s" if run.seconds >= RUN_TIMEOUT_S else run.note
        start = f"{launcher} {'-np' if launcher == 'horovodrun' else '--standalone --nproc-per-node'} {RANKS}"
        python = " python" if launcher == "horovodrun" else ""
        job = f"-m {all_reduce_job.__name__} --backend {engine} --device {device}"
        remedy = f"{start}{python} {job}    (prints all of it)"
        return error(f"run {engine}", f"{RANKS} ranks by {launcher} failed: {note}", remedy)
    seconds = dict(run.figures["seconds"])
    small, large = (round(1000 * seconds[size], 4) for size in (4 * 2**10, 4 * 2**20))
    figures = {
        "started_s": round(float(run.figures["started_s"]), 4),
        "all_reduce_4kb_ms": small,
        "all_reduce_4mb_ms": large,
        "gb_per_s": round(4 * 2**20 / 1e9 / (large / 1000), 3),
    }
    found = (
        f"{RANKS} ranks by {launcher}, {run.figures['engine']}: sums are right; 4 kB in {small:.2f} ms, "
        f"4 MB in {large:.1f} ms ({figures['gb_per_s']:.1f} GB/s); started in {figures['started_s']:.1f} s"
    )
    return ok(f"run {engine}", found, **figures)
