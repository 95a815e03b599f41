"""The fusion of operations of `hvd`: which share one collective."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvd_trainer.hvd.common import wire
from hvd_trainer.hvd.common.executor import Executor
from hvd_trainer.hvd.common.launch_order import LaunchOrder
from hvd_trainer.hvd.common.matching import Matcher
from hvd_trainer.hvd.common.request import Kind, Op, Signature


def exchanged(monkeypatch: pytest.MonkeyPatch, indices: list[tuple[int, int]], **fields: Any) -> list[list[str]]:
    """Return the names in each exchange of two members, whose tensors lie on devices of these indices."""
    matcher, names = Matcher([0, 1]), [str(number) for number in range(len(indices))]
    for member in range(2):
        requests: list[Any] = [
            SimpleNamespace(
                signature=Signature(
                    kind=Kind.ALLREDUCE,
                    name=name,
                    dtypes=("float32",),
                    shapes=((300,),),
                    device="cuda",
                    op=Op.SUM,
                    **fields,
                ),
                number=0,
                tensors=[],
                device_index=index[member],
            )
            for name, index in zip(names, indices, strict=True)
        ]
        wire.read(member, wire.write(requests, 0), matcher)
    together: list[list[str]] = []
    executor = Executor(None, [0, 1], 128 << 20, LaunchOrder([0]))  # type: ignore[arg-type]  nothing is sent
    for name in ("_all_reduce", "_start_bucket"):
        monkeypatch.setattr(
            executor, name, lambda responses, device: together.append([one.key[0] for one in responses])
        )
    monkeypatch.setattr(executor, "_device", lambda responses: torch.device("cpu"))
    executor.run(matcher.take_responses())
    return together


def test_operations_on_one_device_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on several devices shared one collective, on the first tensor's device."""
    assert exchanged(monkeypatch, [(0, 1), (1, 1), (0, 1)]) == [["0", "2"], ["1"]]


@pytest.mark.parametrize(("has_device", "is_refused"), [(False, True), (True, False)])
def test_tensors_on_a_gpu_want_zeros_on_one(has_device: bool, is_refused: bool) -> None:
    """`hvd.join()` made zeros on the CPU, and the ranks waited for each other in two libraries."""
    matcher = Matcher([0, 1])
    matcher.join(1, has_device=has_device)
    matcher.add(0, Signature(Kind.ALLREDUCE, "loss", ("float32",), ((1,),), "cuda"), 0, device_index=0)
    (response,) = matcher.take_responses()
    assert ("Type hvd.join(hvd.local_rank())" in (response.error or "")) is is_refused


def test_buckets_travel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which buckets are ready together depends on timing, and the order of a sum on its place in the buffer."""
    assert exchanged(monkeypatch, [(0, 0)] * 2, is_bucket=True) == [["0"], ["1"]]
