"""What one rank records of some steps: its operators, its phases, and what its engine does by itself."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from hvd_trainer.backends import Backend
from hvd_trainer.backends.base import Span
from hvd_trainer.config.profile_plan import ProfilePlan
from hvd_trainer.observe.phases import Clock, Phases
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.process import set_variables

LOG_LEVEL = "KINETO_LOG_LEVEL"
SILENT = "6"
"""Above ERROR: where PyTorch can do CUDA and the machine cannot, the profiler would report that as an error."""
MAX_TRACE_BYTES = 2**28
"""Of a rank's trace as PyTorch writes it: to bring it to the common clock takes several times as much memory."""


class Recorder:
    """Call `warm_up`, one step later `start`, and some steps later `stop`; or `drop`, at any time."""

    def __init__(self, backend: Backend, plan: ProfilePlan) -> None:
        self._backend = backend
        activities = [ProfilerActivity.CPU]
        if not accelerator.is_host(backend.device):
            activities.append(getattr(ProfilerActivity, backend.device.type.upper()))
        self._profiler = profile(
            activities=activities,
            record_shapes=plan.shapes,
            profile_memory=plan.memory,
            with_stack=plan.stacks,
        )
        self._clock = Clock(backend.device)
        self.phases = Phases(self._clock)
        self.engine: list[Span] = []
        self._open = ExitStack()

    def warm_up(self) -> None:
        """Let the profiler set itself up, which may take seconds, before the first recorded step."""
        silent = {} if LOG_LEVEL in os.environ else {LOG_LEVEL: SILENT}
        with set_variables(silent):
            self._profiler.prepare_trace()
        self._open.callback(self._leave_warm_up)

    def _leave_warm_up(self) -> None:
        self._profiler.start_trace()
        self._profiler.stop_trace()

    def start(self) -> None:
        """Start recording, on all ranks at once. A collective."""
        self._open.pop_all()
        self._profiler.start_trace()
        self._open.callback(self._profiler.stop_trace)
        self.engine = self._open.enter_context(self._backend.timeline())
        listeners = self._backend.activity.listeners
        self._backend.collectives.barrier()
        self._clock.settle()
        self.phases.begin()
        listeners.append(self.phases.enter)
        self._open.callback(listeners.remove, self.phases.enter)

    def stop(self) -> None:
        """Stop recording.

        Raises:
            RuntimeError, OSError, ValueError: the profiler or the engine cannot say what it has recorded.
        """
        self._clock.settle()
        self._open.close()

    def drop(self) -> None:
        """Stop whatever is recording and discard it; suppress errors, which would hide why the training has
        ended.
        """
        with suppress(Exception):
            self._open.close()

    def read(self) -> dict[str, Any]:
        """Return PyTorch's own trace.

        Raises:
            OSError: the disk is full.
            ValueError: it is too large.
        """
        with tempfile.TemporaryDirectory(prefix="hvd_trainer-profile-") as folder:
            file = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(file))
            size = file.stat().st_size
            if size > MAX_TRACE_BYTES:
                raise ValueError(
                    f"its trace has {size / 2**20:,.0f} MB, and more than {MAX_TRACE_BYTES / 2**20:,.0f} cannot "
                    f"be read back. Take fewer steps, or less of each"
                )
            trace: dict[str, Any] = json.loads(file.read_text(errors="replace"), strict=False)
        return trace
