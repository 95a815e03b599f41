"""`hvd_trainer.hvd` without ranks: the variables that it reads, and its cache of operations."""

from __future__ import annotations

import pytest

from hvd_trainer.hvd.common.matching import Matcher
from hvd_trainer.hvd.common.request import Kind, Signature
from hvd_trainer.hvd.common.settings import engine_options, ignored_variables, read_settings, set_log_level


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


def test_log_level_must_be_one() -> None:
    with pytest.raises(ValueError, match="HOROVOD_LOG_LEVEL=loud is none of trace, debug, info"):
        set_log_level({"HOROVOD_LOG_LEVEL": "loud"})


def test_cache_forgets_the_same_on_all_members() -> None:
    """A cache of two entries: members that ask for three operations in turn agree on every id."""
    members = [Matcher([0, 1], me, capacity=2) for me in range(2)]
    for step in range(7):
        signature = Signature(
            kind=Kind.ALLREDUCE, name=f"allreduce.{step % 3}", dtypes=("int64",), shapes=((4,),), device="cpu"
        )
        ids = {matcher.cached_id(signature) for matcher in members}
        assert len(ids) == 1
        for matcher in members:
            for member in range(2):
                matcher.add(member, signature, 0)
            (response,) = matcher.take_responses()
            assert response.error is None
    assert members[0].cached_id(Signature(kind=Kind.ALLREDUCE, name="other")) is None
