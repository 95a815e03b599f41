"""Ways to train on the pretend device: streams in any order give the same bits, and the host waits for none."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from launchers import run_ranks

from gpu import table
from pretend import build, checks, device

pytestmark = [
    pytest.mark.skipif(build.missing() is not None, reason=str(build.missing())),
    pytest.mark.timeout(600),
]
ENGINES = [pytest.param("ddp"), pytest.param("horovod")]


@pytest.mark.parametrize("engine", ENGINES)
def test_order_of_streams_changes_no_bit(engine: str, tmp_path: Path) -> None:
    ways = [f"{checks.DIGITS} --backend {engine} {row}" for row in checks.rows(engine).values()]
    run_ranks(
        checks.same_bits, num_processes=2, args=("mnist", ways, str(tmp_path), list(device.ORDERS)), timeout_s=500
    )
