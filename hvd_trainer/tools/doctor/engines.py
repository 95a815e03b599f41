"""Prove by two ranks that each installed engine can exchange tensors here, for `doctor --run`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hvd_trainer.errors import OptionError
from hvd_trainer.horovod_build.facts import Facts
from hvd_trainer.jobs.all_reduce import JOB, LARGE, SMALL, AllReduceTrial
from hvd_trainer.measure.command import LAUNCHER_OF
from hvd_trainer.measure.machine import threads_per_rank
from hvd_trainer.measure.trials import TrialRunner
from hvd_trainer.tools.doctor.findings import Finding, error, ok
from hvd_trainer.utils.text import INSTALL_HOROVOD

RANKS, RUN_TIMEOUT_S = 2, 120.0


def devices_of_engines(facts: Facts) -> dict[str, str]:
    """Return the installed engines, whether they work or not, with the device type on which two ranks can run.

    NCCL refuses two on one GPU, and a Horovod built for CPUs has no GPU at all.
    """
    torch, horovod = facts.torch, facts.horovod
    if torch.error is not None:
        return {}
    device = (torch.kind or "cpu") if len(torch.gpus) >= RANKS else "cpu"
    on_horovod = {} if horovod is None else {"horovod": device if horovod.record.get("cuda") else "cpu"}
    return {"ddp": device, **on_horovod}


def prove_engine(engine: str, device: str) -> Finding:
    """Start the job with two ranks on an engine, as a user would, and return a finding about it."""
    name, launcher = f"run {engine}", LAUNCHER_OF[engine]
    trial = AllReduceTrial(name, engine, RANKS, threads_per_rank(RANKS), ("--device", device))
    with tempfile.TemporaryDirectory(prefix="hvd_trainer-doctor-") as folder:
        try:
            run = TrialRunner(Path(folder), limit_s=RUN_TIMEOUT_S).run(trial)
        except OptionError:
            return error(name, f"there is no {launcher} here", f"{INSTALL_HOROVOD} --force")
    if run.state != "done":
        note = f"no end after {RUN_TIMEOUT_S:g} s" if run.seconds >= RUN_TIMEOUT_S else run.note
        two = "-np 2 python" if launcher == "horovodrun" else "--standalone --nproc-per-node 2"
        remedy = f"{launcher} {two} {' '.join(JOB)} --backend {engine} --device {device}    (prints all of it)"
        return error(name, f"{RANKS} ranks by {launcher} failed: {note}", remedy)
    started_s, seconds = float(run.figures["started_s"]), dict(run.figures["seconds"])
    small_ms, large_ms, gb_per_s = 1000 * seconds[SMALL], 1000 * seconds[LARGE], LARGE / 1e9 / seconds[LARGE]
    figures = {"all_reduce_4kb_ms": small_ms, "all_reduce_4mb_ms": large_ms, "gb_per_s": gb_per_s}
    return ok(
        name,
        f"{RANKS} ranks by {launcher}, {run.figures['engine']}: sums are right; 4 kB in {small_ms:.2f} ms, "
        f"4 MB in {large_ms:.1f} ms ({gb_per_s:.1f} GB/s); started in {started_s:.1f} s",
        **{key: round(value, 4) for key, value in {"started_s": started_s, **figures}.items()},
    )
