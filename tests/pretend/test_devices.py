"""Which device a script computes on under `run`."""

from __future__ import annotations

import re

import pytest
from combinations import case
from launchers import SCRIPTS, launch
from rules import LATE_SIDE

from pretend import startup


@pytest.mark.parametrize(
    ("backend", "chosen", "current"),
    [
        case("cpu:gloo,pretend:pccl", "other", {"0", "1"}),
        case("cpu:gloo,pretend:pccl", "none", {"0", "1"}, when="long"),
        case("gloo", "other", {"0", "1"}, when="long"),
        case("gloo", "none", {"no device"}),
    ],
)
def test_script_keeps_the_device_that_it_has_chosen(backend: str, chosen: str, current: set[str]) -> None:
    """`run` made that of the rank's number the current one, and a context for scripts on CPUs."""
    job = ["-m", "hvd_trainer", "run", "-np", "2", "--", str(SCRIPTS / "chosen_device.py"), backend, chosen]
    output = launch("python", 1, job, env={startup.DEVICE: LATE_SIDE}).stdout
    printed = dict(re.findall(r"rank (\d): (.*)", output))
    assert set(printed.values()) == current
    if chosen == "other":
        assert printed == {"0": "1", "1": "0"}
