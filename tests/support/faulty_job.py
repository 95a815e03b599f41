"""A small job in which a rank fails, or all do: `FAULT="what:rank:step"`, with a fault of `FAULTS`.

OWN_FOLDERS=1: each rank works in a folder of its own, by its number.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hvd_trainer import Callback, RunView, TensorData, Trainer, TrainerOptions, run_job


def raise_an_error() -> None:
    raise ValueError("the user's own words")


def loop_for_ever() -> None:
    while True:
        pass


def hold_the_interpreter() -> None:
    """Hold the GIL without end, by a regular expression."""
    re.match("(a+)+$", 40 * "a" + "b")


def use_a_label_out_of_range() -> None:
    """Use an invalid label: a GPU fails long after the call and is lost to the process, a CPU raises at once."""
    nn.functional.cross_entropy(torch.zeros(1, 2), torch.tensor([2]))


def take_too_much_memory() -> None:
    """Allocate more than any address space has."""
    torch.empty(2**50)


def leave_no_place_for_its_trace() -> None:
    Path("log/profile/rank-1.json.gz/full").mkdir(parents=True, exist_ok=True)


FAULTS: dict[str, Callable[[], Any]] = {
    "raises": raise_an_error,
    "raises in the loss": raise_an_error,
    "raises after fit": lambda: None,
    "exits": lambda: sys.exit(0),
    "exits at once": lambda: os._exit(0),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "is stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "loops": loop_for_ever,
    "is stuck": hold_the_interpreter,
    "asserts on the device": use_a_label_out_of_range,
    "takes too much memory": take_too_much_memory,
    "lives": lambda: None,
    "is slow": lambda: None,
    "has no place for its trace": leave_no_place_for_its_trace,
}


class Grief(Callback):
    """Strikes after a step, or in the loss of the next one, the first time that the job is started."""

    def __init__(self) -> None:
        self.what, self.who, step = os.environ["FAULT"].split(":")
        self.step, self.strikes = int(step), False

    def on_step_end(self, run: RunView, result: Any) -> None:
        if run.progress.step == 1:
            print("steps", flush=True)
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        if run.progress.step == self.step and self.who in ("all", str(run.world.rank)) and not restarts:
            print(f"strikes at {time.time():.3f}", flush=True)
            self.strikes = True
            if self.what != "raises in the loss":
                with run.device:
                    FAULTS[self.what]()
        time.sleep(0.01)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.strikes and self.what == "raises in the loss":
            FAULTS[self.what]()
        return nn.functional.mse_loss(outputs, targets)


def fetch_slowly(inputs: Tensor) -> Tensor:
    time.sleep(0.03)
    return inputs


def main(options: TrainerOptions) -> None:
    with Trainer(options) as trainer:
        grief, rank = Grief(), str(trainer.world.rank)
        if "OWN_FOLDERS" in os.environ:
            Path(rank).mkdir(exist_ok=True)
            os.chdir(rank)
        is_slow = grief.what == "is slow" and grief.who == rank
        model = nn.Linear(2, 1)
        data = TensorData(torch.ones(2048, 2), torch.ones(2048, 1), fetch_slowly if is_slow else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer.fit(model, optimizer, grief.loss, data, callbacks=[grief])
        if grief.what == "raises after fit" and grief.who == rank:
            raise_an_error()


if __name__ == "__main__":
    run_job(TrainerOptions, main)
