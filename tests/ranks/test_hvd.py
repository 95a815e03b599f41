"""`from hvd_trainer import hvd`: Horovod's API on torch.distributed, in real ranks."""

from __future__ import annotations

from pathlib import Path

import hvd_api
import hvd_checks
import hvd_elastic_checks
import pytest
from combinations import case, each_launcher
from launchers import QUICKEST, launch, requires, run_ranks

pytestmark = pytest.mark.warm

CHECKS = hvd_checks.CHECKS | hvd_elastic_checks.CHECKS


@pytest.fixture(scope="module", params=[1, 2, case(3, when="long"), 4])
def outcomes(request: pytest.FixtureRequest) -> list[dict[str, str | None]]:
    """The outcome of each check on each rank."""
    result: list[dict[str, str | None]] = run_ranks(
        hvd_checks.run_checks, num_processes=request.param, args=(CHECKS,)
    )
    return result


@pytest.mark.parametrize("name", CHECKS)
def test_contract(name: str, outcomes: list[dict[str, str | None]]) -> None:
    failures = [f"rank {rank}:\n{its[name]}" for rank, its in enumerate(outcomes) if its[name]]
    assert not failures, "\n".join(failures)


@each_launcher("horovodrun", "torchrun", "mpirun", "srun")
def test_any_launcher_starts_it_again_and_again(launcher: str) -> None:
    assert run_ranks(hvd_checks.start_and_stop_again, num_processes=2, launcher=launcher) == [[2.0] * 3] * 2


def test_exchange_that_ends_as_the_time_to_check_is_up_is_no_failure() -> None:
    """PyTorch raised "Operation timed out!", and the exchange was complete by the time it was asked about."""
    assert run_ranks(hvd_checks.exchanges_end_as_the_time_to_check_is_up, num_processes=2) == [599, 599]


@requires("horovod")
def test_names_and_parameters_are_horovods() -> None:
    (differences,) = run_ranks(hvd_api.differences_from_horovod, num_processes=1)
    assert not differences, "\n".join(differences)


STALL = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "2", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4"}


def test_stall_names_ranks_that_ask_for_something_else() -> None:
    texts = run_ranks(hvd_checks.a_rank_asks_for_something_else, num_processes=3, env=STALL)
    assert any("ranks 0, 1 have waited for 4 s for rank 2 in allreduce.first" in text for text in texts)


@pytest.mark.parametrize(
    ("level", "texts"), [("debug", (True, True)), ("INFO", (True, False)), ("error", (False, False))]
)
def test_log_level_is_horovods(level: str, texts: tuple[bool, bool], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nfrom hvd_trainer import hvd\nhvd.init()\nhvd.allreduce(torch.ones(3), name='x')\n"
    )
    result = launch(QUICKEST, 2, [str(script)], env={"HOROVOD_LOG_LEVEL": level, "HOROVOD_LOG_HIDE_TIME": "1"})
    assert ("[INFO] rank 1 of 2" in result.stderr, "allreduce.x: done" in result.stderr) == texts


@pytest.mark.parametrize(
    "setting",
    [("HOROVOD_CACHE_CAPACITY", "0"), ("HOROVOD_CACHE_CAPACITY", "3"), ("HOROVOD_FUSION_THRESHOLD", "0")],
)
def test_results_do_not_depend_on_cache_and_fusion(setting: tuple[str, str]) -> None:
    names = ["operations_are_matched_by_name_in_any_order", "large_operations_are_matched_by_name_in_any_order"]
    checks = {name: CHECKS[name] for name in names}
    for outcome in run_ranks(hvd_checks.run_checks, num_processes=2, args=(checks,), env=dict([setting])):
        assert not any(outcome.values()), outcome
