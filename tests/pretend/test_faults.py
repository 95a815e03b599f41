"""Each fault in the product makes the check that is named with it fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from launchers import LaunchError
from rules import FOLDER

from pretend import faults, startup
from pretend.ranks import run_ranks


@pytest.mark.parametrize("fault", faults.ALL, ids=lambda fault: fault.what)
def test_fault_stands_where_it_is_put(fault: faults.Fault) -> None:
    source = (faults.REPOSITORY / "hvd_trainer" / fault.file).read_text()
    compile(fault.put_into(source), fault.file, "exec")


@pytest.mark.long
@pytest.mark.parametrize("fault", faults.ALL, ids=lambda fault: fault.what)
def test_fault_is_caught(fault: faults.Fault, tmp_path: Path) -> None:
    """By fresh processes: those that are forked have imported the product already."""
    args = [str(tmp_path) if argument == FOLDER else argument for argument in fault.args]
    with pytest.raises(LaunchError) as caught:
        run_ranks(
            fault.check,
            num_processes=fault.ranks,
            launcher="torchrun",
            args=args,
            env={startup.FAULT: fault.what},
            timeout_s=120,
        )
    assert "stands there" not in str(caught.value)
    # Neither a time limit nor a mistake that breaks the module's import shows that a check has seen the fault.
    # What is read before it has arrived is another sample or, where memory was freed, NaN.
    words = ("AssertionError", "RuntimeError", "hvd_trainer.errors.NonFiniteError")
    reason = next((line for line in reversed(str(caught.value).splitlines()) if line.startswith(words)), "")
    assert reason, str(caught.value)
    print(f"| {fault.what} | {fault.check.__name__} | {reason[:120]} |")
