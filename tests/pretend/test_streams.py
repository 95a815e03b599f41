"""The rules that are true on any device, on the pretend device."""

from __future__ import annotations

import hashlib
from pathlib import Path

import device_checks
import pytest
import small_mnist
from combinations import case, each_pair
from launchers import REPOSITORY, launch
from rules import LATE_SIDE, RULES
from ways_to_train import DIGITS

from pretend import startup
from pretend.ranks import run_ranks
from pretend.self_check import device_itself

EXAMPLES = REPOSITORY / "examples/mnist"
WEIGHTS: set[str] = set()
"""Digests of the weights that scripts have trained."""
LONG = {
    *("resume on horovod", "texts in chunks", "hvd: process sets of four ranks", "models on two devices each"),
    *(name for name in RULES if "waits" in name),
} - {"host waits on ddp: plain", "host waits on horovod: plain", "host waits on single: fp16"}


def test_device_is_as_a_gpu() -> None:
    run_ranks(device_itself, num_processes=1)


@pytest.mark.parametrize("name", [case(name, when="long" if name in LONG else "") for name in RULES])
def test_rule(name: str, tmp_path: Path) -> None:
    rule = RULES[name]
    # Two hide in which order values are added.
    ranks = max(3, rule.ranks) if rule.check is device_checks.resume or rule.devices > 2 else rule.ranks
    devices = {"PRETEND_DEVICES": str(max(2, ranks, ranks * rule.devices // rule.ranks))}
    run_ranks(rule.check, num_processes=ranks, args=rule.in_folder(tmp_path), env=devices, timeout_s=300)


@pytest.mark.parametrize(
    ("engine", "script", "order"),
    [
        case("ddp", "plain_horovod.py", LATE_SIDE),
        case("horovod", "plain_ddp.py", LATE_SIDE),
        case("ddp", "plain_ddp.py", "blocking", when="long"),
        case("horovod", "plain_horovod.py", "blocking", when="long"),
        case("ddp", "plain_ddp.py", LATE_SIDE, when="long"),
        case("horovod", "plain_horovod.py", LATE_SIDE, when="long"),
    ],
)
def test_scripts_by_run_train_the_same_bits(engine: str, script: str, order: str, tmp_path: Path) -> None:
    """By `hvd_trainer.hvd` and `hvd_trainer.c10d`, where the script was written for the other engine."""
    small_mnist.write(tmp_path)
    job = ["-m", "hvd_trainer", "run", "-np", "2", "--backend", engine, "--", str(EXAMPLES / script)]
    options = ["--data-dir", str(tmp_path), "--batch-size", "32", "--save", str(tmp_path / "weights")]
    launch("python", 1, [*job, *options], env={startup.DEVICE: order})
    WEIGHTS.add(hashlib.sha256((tmp_path / "weights").read_bytes()).hexdigest())
    assert len(WEIGHTS) == 1


@each_pair(push=0, long=4)
def test_launcher_starts_ranks_on_devices(launcher: str, backend: str, tmp_path: Path) -> None:
    job = ["-m", "hvd_trainer.mnist", *DIGITS.split(), "--backend", backend, "--log-dir", str(tmp_path)]
    launch(launcher, 2, job, env={startup.DEVICE: LATE_SIDE})
    assert "pretend GPU" in (tmp_path / "run.json").read_text()
