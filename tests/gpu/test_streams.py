"""The rules that are true on any device, on a GPU."""

from __future__ import annotations

from pathlib import Path

import device_checks
import pytest
from rules import RULES

from gpu.machine import InRanks, Record, gpus

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("engine", "name"),
    [pytest.param(rule.engine, name, marks=gpus(rule.devices)) for name, rule in RULES.items()],
    indirect=["engine"],
)
def test_rule(engine: str, name: str, in_ranks: InRanks, tmp_path: Path, record_property: Record) -> None:
    rule = RULES[name]
    values = in_ranks(rule.ranks, rule.check, *rule.in_folder(tmp_path))
    if rule.check is device_checks.peak:
        record_property("peak, MB", round(max(values)))
