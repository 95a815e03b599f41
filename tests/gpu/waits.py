"""`python waits.py DEVICE MODULE ...`: run a job and print a line for each time that the host waits for the GPU.

On a CPU: for each number that is read from a tensor, which on a GPU would wait.
"""

from __future__ import annotations

import runpy
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hvd_trainer

PACKAGE = f"{Path(hvd_trainer.__file__).parent}/"


def say_where() -> None:
    """Print the innermost line of ours."""
    ours = [frame for frame in traceback.extract_stack() if frame.filename.startswith(PACKAGE)]
    at = f"{ours[-1].filename.removeprefix(PACKAGE)}:{ours[-1].lineno}" if ours else "elsewhere"
    print(f"waits at {at}", flush=True)


def on_warning(message: Any, *rest: Any, **more: Any) -> None:
    if "synchronizing" in str(message):
        say_where()


class Reads(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            say_where()
        return function(*args, **(kwargs or {}))


def main() -> None:
    device, module, *argv = sys.argv[1:]
    sys.argv = [module, *argv]
    if device == "cpu":
        with Reads():
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    warnings.simplefilter("always")
    warnings.showwarning = on_warning
    torch.cuda.set_sync_debug_mode("warn")
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
