"""Run a training script with a stopwatch on its optimizer steps: one measure for every contestant.

    torchrun --nproc-per-node 2 -m benchmarks.probe -m benchmarks.raw.ddp --data-dir ...

The script is run as it is and knows nothing of this. PyTorch's global optimizer hooks see each step
of any optimizer in the process. Two times are taken: from the end of step ``warmup`` to the end of
step ``steps`` (so set-up, evaluation and exit are outside), and the wall clock at the end of the
first step. They go to a file of this process's own, as soon as the last step is done.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

PLAN_VARIABLE = "BENCHMARK_PLAN"


@dataclass(frozen=True)
class Plan:
    """What the probe is told: optimizer steps not timed, steps in all, and where to write."""

    warmup: int
    steps: int
    folder: str


@dataclass
class Record:
    """What the probe saw in one process."""

    first_step_at: float = 0.0
    """Wall clock at the end of the first step, seconds since the epoch."""
    seconds: float = 0.0
    """From the end of step ``warmup`` to the end of step ``steps``."""
    steps: int = 0
    """Steps seen; more than planned means that the script did not do the planned work."""


class Probe:
    """Counts optimizer steps that follow a backward pass, and writes a :class:`Record`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.record = Record()
        self._path = Path(plan.folder) / f"{os.getpid()}.json"
        self._depth = 0
        self._gradients = False
        self._warm_at = 0.0

    def install(self) -> None:
        """Hook every optimizer that this process will make, and every ``Tensor.backward``."""
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        original = torch.Tensor.backward

        # Horovod's broadcast_optimizer_state takes a step before the training begins. It has no
        # backward pass before it, and by that it is told apart.
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> None:
            self._gradients = True
            original(*args, **kwargs)

        torch.Tensor.backward = backward  # type: ignore[method-assign]

    def _before_step(self, *_: Any) -> None:
        self._depth += 1

    def _after_step(self, *_: Any) -> None:
        # Horovod's optimizer is a subclass whose step() calls the one below it, and both are
        # hooked: only the outer one's end is the step's.
        self._depth -= 1
        if self._depth > 0 or not self._gradients:
            return
        self._gradients = False
        self.record.steps += 1
        if self.record.steps == 1:
            self.record.first_step_at = time.time()
        if self.record.steps == self.plan.warmup:
            self._warm_at = self._now()
        if self.record.steps >= self.plan.steps:
            self.record.seconds = self._now() - self._warm_at
            self._path.write_text(json.dumps(asdict(self.record)))

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()


def main() -> None:
    """``python -m benchmarks.probe [-m MODULE | SCRIPT] ARGUMENTS...``."""
    Probe(Plan(**json.loads(os.environ[PLAN_VARIABLE]))).install()
    arguments = sys.argv[1:]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
