"""Each fault in the product makes the rule fail that is named with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launchers import LaunchError
from rules import RULES

from pretend import startup
from pretend.faults import FAULTS, PACKAGE
from pretend.ranks import run_ranks


@pytest.mark.parametrize("what", FAULTS)
def test_fault_stands_where_it_is_put(what: str) -> None:
    fault = FAULTS[what]
    assert fault.rule in RULES
    compile(fault.put_into((PACKAGE / fault.file).read_text()), fault.file, "exec")


@pytest.mark.long
@pytest.mark.parametrize("what", FAULTS)
def test_fault_is_caught(what: str, tmp_path: Path) -> None:
    """By fresh processes: those that are forked have imported the product already."""
    rule = RULES[FAULTS[what].rule]
    env = {startup.FAULT: what, "PRETEND_DEVICES": str(max(2, rule.ranks, rule.devices))}
    how = {"launcher": "torchrun", "env": env, "timeout_s": 120}
    with pytest.raises(LaunchError) as caught:
        run_ranks(rule.check, num_processes=rule.ranks, args=rule.in_folder(tmp_path), **how)
    # Neither a time limit nor a mistake that breaks the module's import shows that a check has seen the fault.
    # What is read before it has arrived is another sample or, where memory was freed, NaN.
    own = ("NonFiniteError", "ReplicasDifferError", "CheckpointError", "HorovodInternalError")
    raised = (
        "Failed: DID NOT RAISE",
        "ValueError: Both events must be created with argument 'enable_timing=True'",
    )
    words = "|".join(map(re.escape, ("AssertionError", "RuntimeError", *raised, *own)))
    # On a busy machine a rank can be ended before its traceback is kept: then its report has the reason.
    reported = rf"^(?:failure: rank .*?: |hvd_trainer\.[\w.]*\.)?((?:{words}).*)"
    reasons = re.findall(reported, str(caught.value), re.MULTILINE)
    assert reasons, str(caught.value)
    assert "stands there" not in reasons[-1]
    print(f"| {what} | {FAULTS[what].rule} | {reasons[-1][:120]} |")
