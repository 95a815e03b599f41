"""A rank that fails on its GPU is blamed, and all others have ended soon."""

from __future__ import annotations

from pathlib import Path

import pytest
from blame import check_blame
from ways_to_train import ENGINES, FAULTS

from gpu.machine import Record, variables_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("fault", "rank"), [(fault, rank) for fault, ranks in FAULTS.items() for rank in ranks])
@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_failed_rank_is_blamed(
    engine: str, fault: str, rank: int, tmp_path: Path, record_property: Record
) -> None:
    seconds = check_blame(engine, fault, rank, **variables_of(2))
    record_property("all had ended after, s", round(seconds, 1))
