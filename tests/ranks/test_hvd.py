"""`from hvd_trainer import hvd`: Horovod's API on torch.distributed, in real ranks."""

from __future__ import annotations

from pathlib import Path

import hvd_checks
import pytest
from combinations import case, each_launcher
from launchers import QUICKEST, launch, requires, run_ranks

from hvd_trainer.hvd.common.matching import Matcher
from hvd_trainer.hvd.common.request import ALLREDUCE, Signature
from hvd_trainer.hvd.common.settings import engine_options, ignored_variables, read_settings, set_log_level

pytestmark = pytest.mark.warm


@pytest.fixture(scope="module", params=[1, 2, case(3, when="long"), 4])
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


def test_exchange_that_ends_as_the_time_to_check_is_up_is_no_failure() -> None:
    """PyTorch raised "Operation timed out!", and the exchange was complete by the time it was asked about."""
    assert run_ranks(hvd_checks.exchanges_end_as_the_time_to_check_is_up, num_processes=2) == [599, 599]


def test_operations_fail_once_a_rank_has_shut_down() -> None:
    texts = run_ranks(hvd_checks.one_rank_shuts_down, num_processes=3)
    assert ["rank 2 called hvd.shutdown()" in text for text in texts] == [True, True, False]


@requires("horovod")
def test_names_and_parameters_are_horovods() -> None:
    (differences,) = run_ranks(hvd_checks.differences_from_horovod, num_processes=1)
    assert not differences, "\n".join(differences)


STALL = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "2", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4"}


def test_stall_names_the_missing_rank_and_ends_the_wait() -> None:
    texts = run_ranks(hvd_checks.another_rank_never_comes, num_processes=3, env=STALL)
    assert all(texts)
    assert "ranks 0, 1 have waited for 4 s for rank 2 in allreduce.gradient" in texts[0]


def test_stall_names_ranks_that_ask_for_something_else() -> None:
    texts = run_ranks(hvd_checks.a_rank_asks_for_something_else, num_processes=3, env=STALL)
    assert any("ranks 0, 1 have waited for 4 s for rank 2 in allreduce.first" in text for text in texts)


ENDS = {
    "raises": (QUICKEST, "raise RuntimeError('this is why')", {1}, "RuntimeError: this is why"),
    "is killed": ("torchrun", "os.kill(os.getpid(), 9)", {1}, "ended without a word"),
    # The launcher has the code of the rank that ends first, which may be the one that then waits in vain.
    "exits": (QUICKEST, "sys.exit(3)", {1, 3}, "rank 1 called hvd.shutdown() or came to its end"),
}


@pytest.mark.parametrize("how", ENDS)
def test_no_rank_waits_for_one_that(how: str, tmp_path: Path) -> None:
    """The last rank ends in the middle: the others end, too, and one of them says why."""
    launcher, statement, codes, said = ENDS[how]
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, torch\n"
        "from hvd_trainer import hvd\n"
        "hvd.init()\n"
        "hvd.allreduce(torch.ones(3))\n"
        f"if hvd.rank() == 1:\n    {statement}\n"
        "hvd.allreduce(torch.ones(3))\n"
    )
    result = launch(launcher, 2, [str(script)], check=False, timeout_s=60)
    assert result.returncode in codes
    assert said in result.stdout + result.stderr


def test_variables_are_read_or_named() -> None:
    settings = read_settings(
        {"HOROVOD_CYCLE_TIME": "5", "HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_CACHE_CAPACITY": ""}
    )
    assert (settings.cycle_s, settings.fusion_bytes, settings.cache_capacity) == (0.005, 0, 1024)
    assert read_settings({"HOROVOD_STALL_CHECK_DISABLE": "1"}).stall_check_s == 0
    with pytest.raises(ValueError, match="HOROVOD_CYCLE_TIME=fast is not a number"):
        read_settings({"HOROVOD_CYCLE_TIME": "fast"})
    assert engine_options({"HOROVOD_GLOO_IFACE": "ib0"}).network_interface == "ib0"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        assert engine_options({"HOROVOD_GLOO_IFACE": "ib0", name: "eth0"}).network_interface is None
    environ = {"HOROVOD_AUTOTUNE": "1", "HOROVOD_THREAD_AFFINITY": "0", "HOROVOD_CYCLE_TIME": "5"}
    assert ignored_variables(environ) == ["HOROVOD_AUTOTUNE=1"]


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


def test_log_level_must_be_one() -> None:
    with pytest.raises(ValueError, match="HOROVOD_LOG_LEVEL=loud is none of trace, debug, info"):
        set_log_level({"HOROVOD_LOG_LEVEL": "loud"})


def test_cache_forgets_the_same_on_all_members() -> None:
    """A cache of two entries: members that ask for three operations in turn agree on every id."""
    members = [Matcher([0, 1], me, capacity=2) for me in range(2)]
    for step in range(7):
        signature = Signature(
            kind=ALLREDUCE, name=f"allreduce.{step % 3}", dtypes=("int64",), shapes=((4,),), device="cpu"
        )
        ids = {matcher.cached_id(signature) for matcher in members}
        assert len(ids) == 1
        for matcher in members:
            for member in range(2):
                matcher.add(member, signature, 0)
            (response,) = matcher.take_responses()
            assert response.error is None
    assert members[0].cached_id(Signature(kind=ALLREDUCE, name="other")) is None


@pytest.mark.parametrize(
    "setting",
    [("HOROVOD_CACHE_CAPACITY", "0"), ("HOROVOD_CACHE_CAPACITY", "3"), ("HOROVOD_FUSION_THRESHOLD", "0")],
)
def test_results_do_not_depend_on_cache_and_fusion(setting: tuple[str, str]) -> None:
    names = ["operations_are_matched_by_name_in_any_order", "large_operations_are_matched_by_name_in_any_order"]
    for outcome in run_ranks(hvd_checks.run_checks, num_processes=2, args=(names,), env=dict([setting])):
        assert not any(outcome.values()), outcome
