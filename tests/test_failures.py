"""A rank that fails, in whatever way, ends the job: soon, with one report that names it, and nothing left behind.

A new fault is an entry of `faulty_job.FAULTS` and a line of `CASES`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import faulty_job
import pytest
from launchers import REPOSITORY, Result, requires, start

from hvd_trainer.watch.judge import Event, Sign, Stuck, culprit, find_stuck

TIMEOUT_S, SOON_S = 3, 25
JOB = [str(Path(__file__).with_name("faulty_job.py")), "--epochs", "1000", "--timeout-s", str(TIMEOUT_S)]
REPORT = re.compile(r"^(?:\[\d\]<stderr>:)?(failure: rank .*)$", re.MULTILINE)


class Case(NamedTuple):
    """A fault of one rank after a step, and what the report says of it."""

    launcher: str
    backend: str
    fault: str
    rank: int
    said: str

    @property
    def hangs(self) -> bool:
        return self.fault in ("is stopped", "loops", "is stuck")


GONE = "ended without a word"
SILENT = f"has not answered for {TIMEOUT_S}"
CASES = [
    Case("horovodrun", "horovod", "raises", 1, "raised an exception"),
    Case("horovodrun", "horovod", "exits", 1, "called sys.exit(0), and other ranks have not come to their end"),
    Case("horovodrun", "horovod", "is stopped", 1, SILENT),
    Case("horovodrun", "ddp", "exits at once", 1, GONE),
    Case("torchrun", "ddp", "is killed", 1, GONE),
    Case("torchrun", "ddp", "loops", 1, f"has not got on for {TIMEOUT_S}"),
    Case("torchrun", "horovod", "is killed", 0, GONE),
    Case("mpirun", "horovod", "is killed", 1, GONE),
    Case("mpirun", "ddp", "is stopped", 0, "has not answered for"),
    Case("srun", "ddp", "is killed", 0, GONE),
    Case("srun", "horovod", "is stuck", 1, SILENT),
]


def run(case: Case, log_dir: Path) -> Result:
    argv = [*JOB, "--backend", case.backend, "--log-dir", str(log_dir)]
    env = {"FAULT": f"{case.fault}:{case.rank}:40", "PYTHONPATH": str(REPOSITORY)}
    with start(case.launcher, 2, argv, env=env) as job:
        job.wait_for_output("steps", count=2)
        return job.wait(SOON_S)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, marks=requires(case.launcher, "horovod"), id=f"{case.launcher}, {case.backend}: {case.fault}"
        )
        for case in CASES
    ],
)
def test_a_failing_rank_is_named_once(case: Case, tmp_path: Path) -> None:
    """By its number, host, step and phase; with the traceback, or for a hang with all ranks' stacks."""
    result = run(case, tmp_path)
    assert result.returncode != 0
    assert result.seconds < SOON_S
    printed = result.stderr
    (report,) = REPORT.findall(printed.split("Root Cause")[0])
    place = (
        rf"failure: rank {case.rank} of 2 on \S+ \(process \d+\), step \d+, (step|data|forward|backward|reduce): "
    )
    assert re.match(place + re.escape(case.said), report), printed
    if case.fault in ("raises", "exits"):
        assert "step 41, step:" in report
    assert ("ValueError: the user's own words" in printed) == (case.fault == "raises")
    kept = {path.name for path in tmp_path.glob("failures/*")}
    if case.hangs:
        assert faulty_job.FAULTS[case.fault].__name__ in printed or "faulty_job.py" in printed
        # Where rank 0 is stopped, rank 1 tells of it.
        assert kept == ({"rank-0.txt", "rank-1.txt", "report.txt"})
        assert "faulty_job.py" in (tmp_path / "failures" / f"rank-{case.rank}.txt").read_text()
    else:
        assert not kept


@pytest.mark.parametrize(
    ("launcher", "backend"),
    [
        pytest.param("torchrun", "ddp", marks=requires("torchrun")),
        pytest.param("horovodrun", "horovod", marks=requires("horovodrun")),
        pytest.param("mpirun", "horovod", marks=requires("mpirun", "horovod")),
    ],
)
def test_ranks_end_with_their_launcher(launcher: str, backend: str) -> None:
    """torchrun's, left to themselves, train to the end of the epoch."""
    env = {"FAULT": "lives:0:0", "PYTHONPATH": str(REPOSITORY)}
    with start(launcher, 2, [*JOB, "--backend", backend], env=env) as job:
        job.wait_for_output("steps", count=2)
        job.popen.kill()
        job.popen.wait()
        job.check_nothing_left()
        assert len(REPORT.findall(job.stderr)) <= 1
        if launcher == "torchrun":
            assert "its launcher, torchrun, has ended" in job.stderr


# Who is to blame.


def test_the_cause_comes_before_its_consequences() -> None:
    """A killed rank breaks exchanges, which ranks may tell of before its own line breaks."""
    broken = [Event("raised", rank, "connection closed", in_exchange=True) for rank in (0, 3)]
    lost, raised = Event("lost", 2), Event("raised", 1, "ValueError")
    assert culprit([*broken, lost]) == lost
    assert culprit([broken[0], lost, raised]) == raised
    assert culprit(broken) == broken[0]
    assert culprit([broken[0], Event("interrupted", 1)]).rank == 1
    assert culprit([Event("left", 1), broken[0]]) == broken[0]
    assert culprit([broken[0], Event("orphaned", 2)]).kind == "orphaned"


def waits(seconds: float, step: int = 7) -> Sign:
    return Sign(step, "reduce", seconds, waits=True, limit_s=60)


@pytest.mark.parametrize(
    ("signs", "found"),
    [
        ([waits(59), Sign(7, "data", 59, limit_s=60)], None),
        # Who waits is not stuck; who does not get on is, unless it may be slow.
        ([waits(61), Sign(7, "data", 62, limit_s=60), waits(61)], Stuck((1,), "late")),
        ([waits(61), Sign(7, "save", 62, limit_s=300), waits(61)], None),
        ([waits(61), Sign(0, "start", 200), waits(61)], None),
        # A rank on a GPU runs ahead of the one that holds it up.
        ([Sign(9, "forward", 61, limit_s=60), Sign(7, "data", 61, limit_s=60)], Stuck((1,), "late")),
        ([waits(61), Sign(7, "backward", 3, silent_s=61, limit_s=60), waits(61)], Stuck((1,), "silent")),
        ([waits(61, step=8), waits(61, step=7)], Stuck((1,), "crossed")),
    ],
)
def test_who_holds_the_others_up(signs: list[Sign], found: Stuck | None) -> None:
    assert find_stuck(dict(enumerate(signs)), patience_s=60) == found
