"""A job that hangs or whose collective fails ends with a report: who is at fault, where, and who waits in what.

The scripts lie in a folder that is called like the engines' own: a clone of Horovod is.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from combinations import case
from launchers import QUICKEST, Result, launch

pytestmark = pytest.mark.warm
TIMEOUT_S = 5
HVD = """
import sys, time, torch
import {api} as hvd
hvd.init()
rank, who = hvd.rank(), int(sys.argv[1])
"""
HVD_SCRIPTS = {
    "other names": "hvd.allreduce(torch.ones(3), name='a' if rank == who else 'b')",
    "a pending operation": """
if rank == who:
    handle = hvd.allreduce_async(torch.ones(3), name="never")
    time.sleep(600)  # stuck
hvd.allreduce(torch.ones(3), name="a")
""",
}
TORCH = """
import datetime, os, sys, time, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP

limit = {limit}
dist.init_process_group("gloo", **({{}} if limit is None else dict(timeout=datetime.timedelta(seconds=limit))))
rank, who = dist.get_rank(), int(sys.argv[1])
dist.all_reduce(torch.ones(2))
"""
BUFFERS = """
model = DDP(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)))
for step in range(3):
    if rank == who and step == 2:
        time.sleep(600)  # stuck
    model(torch.randn(4, 2)).mean().backward()
"""
DECORATED = """
@record
def main():
    if rank == who:
        time.sleep(600)  # stuck
    dist.all_reduce(torch.ones(3))
main()
"""
IN_BACKWARD = """
class Stuck(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if rank == who:
            time.sleep(600)  # stuck
        return gradient
model = DDP(nn.Linear(2, 4))
Stuck.apply(model(torch.randn(4, 2))).mean().backward()
"""
LATE = """
if rank == who:
    time.sleep(600)  # stuck
dist.all_reduce(torch.ones(3))
"""
SIZES = "dist.all_reduce(torch.ones(4 if rank == who else 5))"
CALLS = """
if rank == who:
    dist.broadcast(torch.ones(4), who)
    dist.broadcast(torch.ones(4), who)
else:
    dist.all_reduce(torch.ones(5))
"""
ABORTS = """
if rank == who:
    os.abort()  # stuck
dist.all_reduce(torch.ones(3))
"""


def write(folder: Path, text: str) -> Path:
    script = folder / "horovod" / "torch" / "nn" / "script.py"
    script.parent.mkdir(parents=True)
    script.write_text(text)
    return script


def line_of(script: Path, mark: str) -> int:
    return next(number for number, line in enumerate(script.read_text().split("\n"), 1) if mark in line)


def run(ranks: int, engine: str, script: Path, who: int, *, limit: bool = True) -> str:
    """Return what a job has printed that has failed."""
    options = ["--timeout-s", str(TIMEOUT_S)] if limit else []
    words = ["-m", "hvd_trainer", "run", "-np", str(ranks), *options, "--backend", engine, "--"]
    env = {"PYTHONFAULTHANDLER": None}  # who has asked for it reads there by which signal a rank has ended
    return check_failed(launch("python", 1, [*words, str(script), str(who)], env=env, check=False, timeout_s=60))


def check_failed(result: Result) -> str:
    assert result.returncode != 0, result.stdout
    assert len(re.findall("(?m)^failure: ", result.stderr.split("Root Cause")[0])) == 1, result.stderr
    return result.stderr


def check_waits(printed: str, expected: dict[int, str]) -> None:
    """Check what is said of ranks besides the one at fault, and where they are."""
    for rank, text in expected.items():
        assert re.search(rf"(?m)^rank {rank}: .*{text}.*, at \S+/script\.py, line \d+$", printed), printed


def check_stuck(printed: str, script: Path, who: int, ranks: int) -> None:
    assert re.search(rf"failure: rank {who} of {ranks} on ", printed), printed
    assert f'/script.py", line {line_of(script, "# stuck")}' in printed, printed


@pytest.mark.parametrize(("ranks", "engine"), [case(3, "ddp"), case(3, "horovod"), case(4, "ddp", when="long")])
def test_ranks_that_wait_under_different_names(ranks: int, engine: str, tmp_path: Path) -> None:
    """It never ended: rounds in which nothing is agreed on counted as progress."""
    script = write(tmp_path, HVD.format(api="horovod.torch") + HVD_SCRIPTS["other names"])
    printed = run(ranks, engine, script, who=0)
    assert "waits for the others and they for it: under other names" in printed
    others = f"ranks {', '.join(map(str, range(1, ranks)))}"
    waits = {0: f"collective, waits for . s in allreduce.a for {others}", 1: "in allreduce.b for rank 0"}
    check_waits(printed, waits)


@pytest.mark.parametrize(
    ("ranks", "engine", "who"), [case(3, "ddp", 0), case(3, "horovod", 1), case(4, "horovod", 0, when="long")]
)
def test_rank_that_is_stuck_with_an_operation_pending(ranks: int, engine: str, who: int, tmp_path: Path) -> None:
    """Its background thread's rounds made it a rank that waits, and counted as its progress."""
    script = write(tmp_path, HVD.format(api="horovod.torch") + HVD_SCRIPTS["a pending operation"])
    printed = run(ranks, engine, script, who)
    check_stuck(printed, script, who, ranks)
    check_waits(printed, {(who + 1) % ranks: f"waits for . s in allreduce.a for rank {who}"})


@pytest.mark.parametrize(
    ("ranks", "engine", "who", "text", "waits"),
    [
        # The other ranks wait for their buffers, in a file that was taken for a model's forward.
        case(2, "ddp", 0, BUFFERS, {1: "collective, waits for . s in broadcast of .* for rank 0"}),
        case(3, "horovod", 1, BUFFERS, {2: "collective, waits for . s in broadcast .* for rank 1"}),
        case(3, "ddp", 2, BUFFERS, {0: "in broadcast of .* for rank 2"}, when="long"),
        # Whatever stands above them in the stack does not wait.
        case(3, "ddp", 1, DECORATED, {0: r"in all_reduce of float\[3\], number 2 of group 0 for rank 1"}),
        case(3, "ddp", 2, IN_BACKWARD, {0: "backward, waits for . s in all_reduce .* for rank 2"}),
        case(
            3, "horovod", 0, IN_BACKWARD, {2: "backward, waits for . s in all_reduce .* for rank 0"}, when="long"
        ),
    ],
)
def test_rank_that_is_stuck_in_its_own_code(
    ranks: int, engine: str, who: int, text: str, waits: dict[int, str], tmp_path: Path
) -> None:
    script = write(tmp_path, TORCH.format(limit=None) + text)
    printed = run(ranks, engine, script, who)
    check_stuck(printed, script, who, ranks)
    check_waits(printed, waits)


@pytest.mark.parametrize(
    ("ranks", "engine", "who"), [case(3, "ddp", 0), case(3, "horovod", 1), case(4, "horovod", 3, when="long")]
)
def test_rank_that_does_not_come_within_the_time_limit_of_a_group(
    ranks: int, engine: str, who: int, tmp_path: Path
) -> None:
    """The report was of a rank that had waited, and had no word where the other one was."""
    script = write(tmp_path, TORCH.format(limit=3) + LATE)
    printed = run(ranks, engine, script, who, limit=False)
    check_stuck(printed, script, who, ranks)
    assert re.search(
        r"has not come to all_reduce of .*float\S*\[3\], number 2 of group 0, in which rank \d", printed
    )
    assert "Timed out" in printed


@pytest.mark.parametrize(
    ("ranks", "engine", "text", "calls"),
    [
        case(3, "ddp", SIZES, {0: r"all_reduce of float\[5\], number 2"}),
        case(3, "ddp", CALLS, {0: r"all_reduce of float\[5\], number 2", 1: r"broadcast of float\[4\], number 2"}),
        case(
            3, "horovod", CALLS, {0: r"all_reduce of SUM float32\[5\], n", 1: r"broadcast from 1 float32\[4\], n"}
        ),
        case(
            2, "horovod", SIZES, {0: r"all_reduce of SUM float32\[5\], n", 1: r"SUM float32\[4\], n"}, when="long"
        ),
    ],
)
def test_ranks_that_call_different_operations(
    ranks: int, engine: str, text: str, calls: dict[int, str], tmp_path: Path
) -> None:
    """They were said to have unequally many batches, or only one of them was named."""
    script = write(tmp_path, TORCH.format(limit=3) + text)
    printed = run(ranks, engine, script, 1, limit=False)
    check_waits(printed, calls)
    assert "equally many batches" not in printed


@pytest.mark.warm(False)
@pytest.mark.parametrize(("ranks", "who"), [(3, 1), case(2, 0, when="long")])
def test_rank_that_a_fatal_signal_ends(ranks: int, who: int, tmp_path: Path) -> None:
    """Gloo does so where tensors differ in size, and the report took it for kill -9."""
    script = write(tmp_path, TORCH.format(limit=None) + ABORTS)
    printed = run(ranks, "ddp", script, who)
    check_stuck(printed, script, who, ranks)
    assert "was ended by SIGABRT" in printed
    check_waits(printed, {(who + 1) % ranks: r"in all_reduce of float\[3\], number 2 of group 0"})


STALL = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "2", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4"}


@pytest.mark.parametrize(
    ("ranks", "who", "text"),
    [
        case(2, 0, "other names"),
        case(3, 1, "a pending operation"),
        case(4, 3, "other names", when="long"),
        case(3, 2, "a pending operation", when="long"),
    ],
)
def test_stall_is_reported_and_ended_as_horovods_variables_say(
    ranks: int, who: int, text: str, tmp_path: Path
) -> None:
    """Without `run`, which has time limits of its own."""
    script = write(tmp_path, HVD.format(api="hvd_trainer.hvd") + HVD_SCRIPTS[text])
    printed = check_failed(launch(QUICKEST, ranks, [str(script), str(who)], env=STALL, check=False, timeout_s=60))
    blamed = 0 if text == "other names" else who
    kept = f"rank {blamed} of {ranks} on .*has kept others waiting for"
    assert re.search(rf"no progress, and the job continues: {kept} 2 s \(HOROVOD_STALL_CHECK_", printed), printed
    assert re.search(rf"failure: {kept} 4 s \(HOROVOD_STALL_SHUTDOWN_", printed), printed
    check_waits(printed, {next(rank for rank in range(ranks) if rank != who): f"for rank {who}"})


def test_rank_that_has_joined_may_wait_for_long(tmp_path: Path) -> None:
    text = "if rank != who:\n    for _ in range(6): time.sleep(0.5); hvd.allreduce(torch.ones(3))\nhvd.join()"
    script = write(tmp_path, HVD.format(api="hvd_trainer.hvd") + text)
    env = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    assert "waiting" not in launch(QUICKEST, 3, [str(script), "1"], env=env).stderr


def test_stall_check_may_be_disabled(tmp_path: Path) -> None:
    text = "time.sleep(4 * (rank == who))\nhvd.allreduce(torch.ones(3), name='a')"
    script = write(tmp_path, HVD.format(api="hvd_trainer.hvd") + text)
    env = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_CHECK_DISABLE": "1"}
    assert "waiting" not in launch(QUICKEST, 2, [str(script), "1"], env=env).stderr
