"""The rules that are true on any device, on the pretend device."""

from __future__ import annotations

from pathlib import Path

import pytest
from combinations import case
from launchers import SCRIPTS, launch
from rules import RULES

from pretend import startup
from pretend.ranks import run_ranks
from pretend.self_check import device_itself

LONG = {"resume on horovod", "abort on ddp"}.union(name for name in RULES if "waits" in name) - {
    "host waits on ddp: plain",
    "host waits on horovod: plain",
    "host waits on single: fp16",
}


def test_device_is_as_a_gpu() -> None:
    run_ranks(device_itself, num_processes=1)


@pytest.mark.parametrize("name", [case(name, when="long" if name in LONG else "") for name in RULES])
def test_rule(name: str, tmp_path: Path) -> None:
    rule = RULES[name]
    run_ranks(rule.check, num_processes=rule.ranks, args=rule.in_folder(tmp_path), timeout_s=300)


@pytest.mark.parametrize(
    ("engine", "script"),
    [
        case("ddp", "device_horovod.py", when="long"),
        case("horovod", "device_ddp.py", when="long"),
        case("ddp", "device_ddp.py", when="long"),
        case("horovod", "device_horovod.py", when="long"),
    ],
)
def test_script_by_run_gives_the_same_bits_in_any_order(engine: str, script: str) -> None:
    outputs = set()
    for order in ("blocking", "late side streams"):
        job = ["-m", "hvd_trainer", "run", "-np", "2", "--backend", engine, "--", str(SCRIPTS / script)]
        outputs.add(launch("python", 1, job, env={startup.DEVICE: order}).stdout)
    assert len(outputs) == 1
    assert "weights" in outputs.pop()
