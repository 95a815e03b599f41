"""Single rules of streams, memory, devices and ends, on the pretend device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from combinations import case
from launchers import SCRIPTS, launch, run_ranks

from pretend import build, faults, startup, stream_checks

pytestmark = [
    pytest.mark.skipif(build.missing() is not None, reason=str(build.missing())),
]


@pytest.mark.parametrize(
    ("check", "ranks", "args"),
    [
        case(stream_checks.device_itself, 1, ()),
        case(stream_checks.copies_overlap, 1, ()),
        case(stream_checks.copy_to_host_is_whole, 1, ()),
        case(stream_checks.hvd_in_any_order, 2, ("late side streams",)),
        case(stream_checks.hvd_in_any_order, 2, ("late default stream",)),
        case(stream_checks.c10d_in_any_order, 2, ("late side streams",)),
        case(stream_checks.c10d_in_any_order, 2, ("late default stream",)),
        case(stream_checks.abort_ends_a_wait, 2, ("ddp", faults.FOLDER), when="nightly"),
        case(stream_checks.abort_ends_a_wait, 2, ("hvd", faults.FOLDER)),
        case(stream_checks.peak, 2, ("--backend ddp --shard full", 0.75, "--backend ddp")),
        case(stream_checks.peak, 2, ("--backend ddp --reproducible 2", 2.0, "--backend ddp")),
    ],
)
def test_rule(check: Any, ranks: int, args: tuple[Any, ...], tmp_path: Path) -> None:
    args = tuple(str(tmp_path) if argument == faults.FOLDER else argument for argument in args)
    run_ranks(check, num_processes=ranks, args=args, timeout_s=200)


@pytest.mark.parametrize(
    ("engine", "script"),
    [
        case("ddp", "device_horovod.py", when="long"),
        case("horovod", "device_ddp.py", when="long"),
        case("ddp", "device_ddp.py", when="nightly"),
        case("horovod", "device_horovod.py", when="nightly"),
    ],
)
def test_script_by_run_gives_the_same_bits_in_any_order(engine: str, script: str) -> None:
    found = set()
    for order in ("blocking", "late side streams"):
        job = ["-m", "hvd_trainer", "run", "-np", "2", "--backend", engine, "--", str(SCRIPTS / script)]
        found.add(launch("python", 1, job, env={startup.DEVICE: order}).stdout)
    assert len(found) == 1
    assert "weights" in found.pop()
