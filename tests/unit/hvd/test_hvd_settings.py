"""`hvd_trainer.hvd` without ranks: the variables that it reads, and the messages by which ranks agree."""

from __future__ import annotations

import pytest
import torch

from hvd_trainer.hvd.common import wire
from hvd_trainer.hvd.common.matching import Matcher
from hvd_trainer.hvd.common.request import Kind, Op, Request, Signature
from hvd_trainer.hvd.common.settings import engine_options, ignored_variables, read_settings, set_log_level


def test_variables_are_read_or_named() -> None:
    settings = read_settings({"HOROVOD_CYCLE_TIME": "5", "HOROVOD_FUSION_THRESHOLD": "0"})
    assert (settings.cycle_s, settings.fusion_bytes) == (0.005, 0)
    assert read_settings({"HOROVOD_CYCLE_TIME": ""}).cycle_s == 0.001
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


def test_small_tensors_travel_with_the_requests_for_them() -> None:
    matcher, rows = Matcher([0, 1]), [torch.arange(4), torch.ones(4, dtype=torch.int64)]
    for member, row in enumerate(rows):
        signature = Signature(
            kind=Kind.ALLREDUCE, name="x", dtypes=("int64",), shapes=((4,),), device="cpu", op=Op.SUM
        )
        message = wire.write([Request(signature, number=7, tensors=[row])], wire.JOINED)
        assert wire.read(member, message, matcher) == wire.JOINED
    (response,) = matcher.take_responses()
    assert response.key == ("x", 7)
    assert response.error is None
    assert response.is_inline
    assert response.payloads == [row.numpy().tobytes() for row in rows]
