"""Check who is blamed when a rank fails under NCCL, and how soon all ranks have ended."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from gpu import table
from gpu.bench import HERE, Bench, Check, FailedError

TIMEOUT_S = 8
SOON_S = {"loops": TIMEOUT_S + 22, "is stopped": TIMEOUT_S + 22}
USUAL_S = 20
"""After the fault, all processes have ended."""


def failures(bench: Bench) -> Iterable[Check]:
    for engine in ("ddp", "horovod"):
        for fault, ranks in table.FAULTS.items():
            for rank in ranks:
                name = f"{engine}: rank {rank} {fault}, and is blamed"
                yield Check(name, check_blame, (engine, fault, rank), table.needs_in(f"--backend {engine}"))


def check_blame(bench: Bench, engine: str, fault: str, rank: int) -> dict[str, Any]:
    job = (
        str(HERE.parent / "support/faulty_job.py"),
        "--backend",
        engine,
        "--device",
        bench.device,
        "--epochs",
        "1000",
    )
    # Nobody wakes a stopped process that no launcher has started.
    waits_for = [1 - rank] if fault == "is stopped" else None
    # The second as torchrun sets it: by it, PyTorch would end the process before the report.
    env = {"FAULT": f"{fault}:{rank}:5", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    ran = bench.ranks(*job, "--timeout-s", str(TIMEOUT_S), env=env, limit_s=90, waits_for=waits_for)
    output = "\n".join(its.output for its in ran)
    strike = re.search(r"^strikes at ([\d.]+)$", output, re.MULTILINE)
    if strike is None:
        raise FailedError("the job did not come to the fault")
    others = ran if waits_for is None else [ran[1 - rank]]
    if any(its.code is None for its in others):
        raise FailedError(f"ranks {[number for number, its in enumerate(ran) if its.code is None]} did not end")
    after = max(its.ended_at for its in others) - float(strike[1])
    named = re.findall(r"^failure: (rank (\d+) of \d+ .*)$", output, re.MULTILINE)
    report = named[0][0] if named else "nothing"
    if not named or any(int(number) != rank for _, number in named):
        raise FailedError(f"rank {rank} {fault}; the report: {report}")
    if any(its.code == 0 for its in others):
        raise FailedError(f"exit codes {[its.code for its in ran]}")
    if after > (limit := SOON_S.get(fault, USUAL_S)):
        raise FailedError(f"all ended {after:.0f} s after, {limit} s at most are allowed")
    return {"all ended after, s": round(after, 1), "the report": report}
