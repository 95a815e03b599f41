"""Run checks of `hvd_trainer.hvd` in ranks."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping

from hvd_trainer import hvd

Check = Callable[[], None]


class Checks(dict[str, Check]):
    """Checks by name."""

    def add(self, function: Check) -> Check:
        self[function.__name__] = function
        return function


def run_checks(checks: Mapping[str, Check]) -> dict[str, str | None]:
    """Run checks; return each one's traceback, or None where it held."""
    outcomes: dict[str, str | None] = {}
    hvd.init(process_sets="dynamic")
    for name, function in checks.items():
        try:
            function()
            outcomes[name] = None
        except Exception:
            outcomes[name] = traceback.format_exc()
        hvd.barrier()
    hvd.shutdown()
    return outcomes
