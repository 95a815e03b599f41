"""`from hvd_trainer import hvd`: Horovod's API on torch.distributed, in real ranks."""

from __future__ import annotations

import hvd_checks
import pytest
from launchers import each_launcher, run_ranks


@pytest.fixture(scope="module", params=[1, 2, pytest.param(3, marks=pytest.mark.long), 4])
def outcomes(request: pytest.FixtureRequest) -> list[dict[str, str | None]]:
    """The outcome of each check on each rank."""
    result: list[dict[str, str | None]] = run_ranks(hvd_checks.run_checks, num_processes=request.param)
    return result


@pytest.mark.parametrize("name", hvd_checks.CHECKS)
def test_contract(name: str, outcomes: list[dict[str, str | None]]) -> None:
    failures = [f"rank {rank}:\n{its[name]}" for rank, its in enumerate(outcomes) if its[name]]
    assert not failures, "\n".join(failures)


@each_launcher("horovodrun", "torchrun", "mpirun", "srun")
def test_any_launcher_starts_it_again_and_again(launcher: str) -> None:
    assert run_ranks(hvd_checks.start_and_stop_again, num_processes=2, launcher=launcher) == [[2.0] * 3] * 2


def test_operations_fail_once_a_rank_has_shut_down() -> None:
    texts = run_ranks(hvd_checks.one_rank_shuts_down, num_processes=3)
    assert ["rank 2 called hvd.shutdown()" in text for text in texts] == [True, True, False]
