"""Run a training script that is not built on the Trainer, and record the times of its optimizer's steps.

    torchrun --nproc-per-node 2 -m hvd_trainer.tools.runner.step_probe LOG_DIR plain_ddp.py --epochs 1

The script is run unchanged: PyTorch's global optimizer hooks see each step of any
optimizer in the process. The file has the format of `step_timer.py`, with all of a step's time in its last part.
"""

from __future__ import annotations

import atexit
import functools
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hvd_trainer.launch.world import detect
from hvd_trainer.observe.memory import MB, peak_bytes
from hvd_trainer.observe.phases import OTHER, PARTS, Clock
from hvd_trainer.observe.step_timer import FOLDER


class Probe:
    """Records when each optimizer step that follows a backward pass has ended.

    Args:
        log: where to write.
        rank: of this process.
    """

    def __init__(self, log: Path, rank: int) -> None:
        self._file = log / FOLDER / f"rank-{rank}.npz"
        self._device = torch.device("cpu")
        self._clock = Clock(self._device)
        self._began_at, self._first_step_at = time.time(), 0.0
        self._ends: list[Any] = []
        self._rates: list[float] = []
        self._cpu = [time.process_time()]
        self._parameters = 0
        self._depth, self._gradients = 0, False

    def install(self) -> None:
        """Add hooks to every optimizer that this process will make, and to `Tensor.backward`."""
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        original: Any = torch.Tensor.backward

        # Horovod's broadcast_optimizer_state takes a step before the training begins. It has no backward pass
        # before it, and by that it is told apart.
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> None:
            self._gradients = True
            original(*args, **kwargs)

        torch.Tensor.backward = backward  # type: ignore[method-assign]

    def _before_step(self, *_: Any) -> None:
        self._depth += 1

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        # Horovod's optimizer is a subclass whose step() calls the one below it, and both are hooked: only the
        # outer one's end is the step's.
        self._depth -= 1
        if self._depth > 0 or not self._gradients:
            return
        self._gradients = False
        if not self._ends:
            self._begin(optimizer)
        self._ends.append(self._clock.mark())
        self._rates.append(float(optimizer.param_groups[0]["lr"]))
        self._cpu.append(time.process_time())

    def _begin(self, optimizer: Optimizer) -> None:
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        self._parameters = sum(tensor.numel() for tensor in tensors)
        self._device = tensors[0].device
        self._clock = Clock(self._device)
        self._clock.settle()
        self._first_step_at = time.time()
        # Now, so that it is called before what the script's own libraries do at the end, which may fail.
        atexit.register(self._write)

    def _write(self) -> None:
        self._clock.settle()
        count = len(self._ends)
        seconds = np.zeros((count, len(PARTS)))
        pairs = zip(self._ends, self._ends[1:], strict=False)
        seconds[1:, OTHER] = [self._clock.seconds(start, end) for start, end in pairs]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(
            self._file,
            parts=np.array(PARTS),
            seconds=seconds,
            step=np.arange(1, count + 1),
            lr=np.array(self._rates),
            cpu_s=np.diff(self._cpu),
            parameters=self._parameters,
            peak_memory_mb=peak_bytes(self._device) / MB,
            began_at=self._began_at,
            first_step_at=self._first_step_at,
        )


def main() -> None:
    """`python -m hvd_trainer.tools.runner.step_probe LOG_DIR [-m MODULE | SCRIPT] ARGUMENTS...`."""
    log, *script = sys.argv[1:]
    Probe(Path(log), detect(os.environ).rank).install()
    if script[0] == "-m":
        sys.argv = script[1:]
        runpy.run_module(script[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = script
        # As `python SCRIPT` does.
        sys.path.insert(0, str(Path(script[0]).resolve().parent))
        runpy.run_path(script[0], run_name="__main__")


if __name__ == "__main__":
    main()
