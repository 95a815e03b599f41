"""How often ranks exchange their requests to stop or to save."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hvd_trainer.backends import Backend, ReduceOp
from hvd_trainer.training import consensus
from hvd_trainer.training.consensus import StepConsensus


@pytest.mark.parametrize(
    ("step_s", "ask_s", "asks"),
    [
        (0.01, 0.0, 6),  # after steps 1, 3, 7, 15, 31 and 63, and then twice a second
        (0.6, 0.08, 35),  # asking would be 13 % of a step: after each third
        (0.6, 0.4, 22),  # no share is kept where that would make more than three seconds
        (5.0, 0.08, 100),
    ],
)
def test_polling_takes_a_small_share_of_time(
    step_s: float, ask_s: float, asks: int, lone_backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a link of 20 ms each way Horovod took 164 ms to ask, after each step of 600 ms."""
    now, asked = 0.0, 0
    monkeypatch.setattr(consensus.time, "monotonic", lambda: now)
    alone = lone_backend.collectives.all_reduce_numbers

    def all_reduce_numbers(values: Sequence[float], op: ReduceOp) -> list[float]:
        nonlocal now, asked
        now, asked = now + ask_s, asked + 1
        return alone(values, op)

    monkeypatch.setattr(lone_backend.collectives, "all_reduce_numbers", all_reduce_numbers)
    agreed = StepConsensus(lone_backend, ["stop"])
    agreed.request("stop")
    heard = 0
    for _ in range(100):
        now += step_s
        heard += len(agreed.poll())
    assert (asked, heard) == (asks, 1)
