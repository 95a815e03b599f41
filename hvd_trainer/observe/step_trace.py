"""Trace the first steps: every rank writes checksums and values of all that they compute to the log folder.

    LOG_DIR/trace/rank-0.jsonl      a line for the start, for each step, and for an evaluation that follows a step
    LOG_DIR/trace/rank-0/           the tensors at these moments: start-0, step-1, step-2, ..., evaluation-2

`python -m hvd_trainer parity` compares two such traces. They are for finding mistakes, not for fast training: each
step waits for the device, and all tensors are copied, hashed and written.
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_trainer.backends import Backend, StepResult
from hvd_trainer.data import Batch
from hvd_trainer.observe.callback import Observer, RunView
from hvd_trainer.observe.checksums import checksum, host_copies, sample_checksums, stride, subsample
from hvd_trainer.utils.files import atomic_write
from hvd_trainer.utils.tensors import parameters_of

FOLDER = "trace"
RATES = ("params", "lr", "initial_lr")
"""Entries of a parameter group that are no constant setting: the learning rate is written for each step."""

Tensors = Mapping[str, Tensor]


class StepTrace(Observer):
    """Writes what this rank computes in the first steps of a training.

    Args:
        backend: the engine.
        log_dir: the log folder, on this rank's node.
        steps: how many are traced.
    """

    needs_norm = True

    def __init__(self, backend: Backend, log_dir: str, steps: int) -> None:
        self._steps = steps
        self._folder = Path(log_dir).expanduser() / FOLDER / f"rank-{backend.world.rank}"
        self._first, self._stride = 0, 1
        self._drawn: deque[list[str]] = deque()
        self._gradients: dict[str, Tensor] = {}
        self._rates: list[float] = []
        self._tracing = True
        self._last: int | None = None

    @contextmanager
    def around_training(self, run: RunView) -> Iterator[None]:
        """Trace the first steps that run inside.

        Raises:
            OSError: the folder cannot be written to.
        """
        self._first = run.progress.step
        self._stride = stride(run.model, (self._steps + 1) * run.world.size)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        self._folder.with_suffix(".jsonl").write_text("")
        hook = run.optimizer.register_step_pre_hook(lambda *_: self._copy_gradients(run))
        self._write(run, "start", self._describe(run), **_state_of(run))
        try:
            yield
        finally:
            hook.remove()

    def on_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch, and note the checksums of their samples."""
        self._drawn = deque()
        for batch in batches:
            if self._tracing:
                self._drawn.append(sample_checksums(batch))
            yield batch

    def on_step_end(self, run: RunView, result: StepResult) -> None:
        if not self._tracing:
            return
        # The batches of the next step may have been drawn already. Only an epoch's last step has fewer.
        batches = [self._drawn.popleft() for _ in range(min(run.plan.passes, len(self._drawn)))]
        figures = {
            "epoch": run.progress.epoch + 1,
            "samples": [sample for batch in batches for sample in batch],
            "counts": [len(batch) for batch in batches],
            "losses": [float(loss) for loss in result.losses],
            "lr": self._rates or [run.rate.last],
            "grad_norm": None if result.grad_norm is None else float(result.grad_norm),
            "skipped": bool(result.skipped),
        }
        self._write(run, "step", figures, gradients=self._gradients, **_state_of(run))
        self._gradients, self._rates = {}, []
        self._last = run.progress.step
        self._tracing = self._last - self._first < self._steps

    def on_epoch_end(self, run: RunView, record: dict[str, Any]) -> None:
        if run.progress.step == self._last:
            figures = {name: value for name, value in record.items() if name.startswith("test_")}
            self._write(run, "evaluation", {"figures": figures}, buffers=host_copies(run.model.named_buffers()))

    def _copy_gradients(self, run: RunView) -> None:
        """Copy the gradients as the update takes them: averaged, unscaled and clipped."""
        if self._tracing:
            self._rates = [float(group["lr"]) for group in run.optimizer.param_groups]
            named = run.model.named_parameters()
            self._gradients = host_copies((name, p.grad) for name, p in named if p.grad is not None)

    def _describe(self, run: RunView) -> dict[str, Any]:
        """Return what `parity` must know of this rank and of the model to find causes."""
        model = run.model
        group = run.backend.replica_group
        modules = dict(model.named_modules())
        state = [*model.named_parameters(), *model.named_buffers()]
        return {
            "rank": run.world.rank,
            "size": run.world.size,
            "copy": group.index(run.world.rank),  # of the model
            "copies": len(group),
            "stride": self._stride,
            "shapes": {name: f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for name, t in state},
            "sliced": [name for name, tensor in state if hasattr(tensor, "to_local")],
            "dropout": [name for name, module in modules.items() if draws(module)],
            "batch_norm": [n for n, m in modules.items() if isinstance(m, nn.modules.batchnorm._BatchNorm)],
            "settings": [
                {key: repr(value) for key, value in group.items() if key not in RATES}
                for group in run.optimizer.param_groups
            ],
        }

    def _write(self, run: RunView, event: str, figures: Mapping[str, Any], **kinds: Tensors) -> None:
        # Imported here, since most runs trace nothing and the import takes time.
        from safetensors.torch import save_file

        step = run.progress.step
        checksums = {kind: {name: checksum(t) for name, t in its.items()} for kind, its in kinds.items()}
        values = {
            f"{kind}/{name}": subsample(tensor, self._stride)
            for kind, its in kinds.items()
            for name, tensor in its.items()
        }
        with atomic_write(self._folder / f"{event}-{step}.safetensors") as temporary:
            save_file(values, temporary)
        # Closed after each line, so that a run that fails leaves whole lines.
        with self._folder.with_suffix(".jsonl").open("a") as lines:
            lines.write(json.dumps({"event": event, "step": step, **figures, "checksums": checksums}) + "\n")


def _state_of(run: RunView) -> dict[str, dict[str, Tensor]]:
    """Return host copies of parameters, optimizer state and buffers, by name."""
    return {
        "parameters": host_copies(run.model.named_parameters()),
        "optimizer": host_copies(_optimizer_state(run.model, run.optimizer)),
        "buffers": host_copies(run.model.named_buffers()),
    }


def _optimizer_state(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the optimizer's state of each parameter, by names such as `fc1.weight/exp_avg`."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for number, parameter in enumerate(parameters_of(optimizer)):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor | int | float):
                tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
                yield f"{names.get(parameter, f'parameter {number}')}/{key}", tensor


def draws(module: nn.Module) -> bool:
    """Return whether a module drops out: a dropout layer, or one with dropout inside, such as attention."""
    own = module.p if isinstance(module, nn.modules.dropout._DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(own, float) and own > 0
