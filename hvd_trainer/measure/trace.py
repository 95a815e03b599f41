"""Trace the first steps of a training, in the format of `trace_format.py`: a job on the Trainer, or a script."""

from __future__ import annotations

import json
import shutil
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.optim.optimizer import Optimizer

from hvd_trainer.config.parser import flatten
from hvd_trainer.measure.listener import Listener, Step
from hvd_trainer.measure.script_facts import exchanged_by, facts_of, models_of
from hvd_trainer.measure.trace_format import (
    FACTS,
    FOLDER,
    ModelParts,
    Models,
    Tensors,
    checksum,
    host_copies,
    sample_checksums,
    stride,
    subsample,
)
from hvd_trainer.observe.callback import RunView
from hvd_trainer.observe.summary import facts
from hvd_trainer.utils.files import atomic_write


class Trace(Listener):
    """Writes what this rank computes in the first optimizer steps."""

    def __init__(self, log: Path, rank: int, size: int, steps: int) -> None:
        self._log, self._folder = log, log / FOLDER / f"rank-{rank}"
        self._rank, self._size, self._steps = rank, size, steps
        self._run: RunView | None = None
        self._optimizer: Optimizer
        self._models: Models = []
        self._at_start: Mapping[str, Tensors] = {}
        self._first, self._count = 0, 0
        self._loader: weakref.ref[object] | None = None
        self._drawn: deque[list[str]] = deque()
        self._used: list[list[str]] = []
        self._gradients: dict[str, Tensor] = {}
        self._rates: list[float] = []

    def on_run(self, run: RunView) -> None:
        """Write the state of a Trainer's model and optimizer, over an earlier trace.

        Raises:
            OSError: the folder cannot be written to.
        """
        self._run, self._optimizer, self._models = run, run.optimizer, [(run.model, str)]
        self._first = run.progress.step
        known = facts(run) | {"options": flatten(run.options)}
        self._begin(self._parts().state(run.optimizer), known, run.backend.replica_group)

    def on_batch(self, batch: Any, loader: object) -> None:
        if self._count >= self._steps:
            return
        if self._loader is None or self._loader() is not loader:
            # What another loader has left was not trained on: it was that of an evaluation.
            self._loader = weakref.ref(loader)
            self._drawn.clear()
        pair = batch if isinstance(batch, tuple | list) and len(batch) == 2 else (batch, None)
        self._drawn.append(sample_checksums((pair[0], pair[1])))

    def on_pass(self) -> None:
        if self._drawn:  # an epoch's last step may have fewer
            self._used.append(self._drawn.popleft())

    def before_update(self, optimizer: Optimizer, *, again: bool) -> None:
        """Copy the gradients as the update takes them: averaged, unscaled and clipped."""
        if self._count >= self._steps:
            return
        if self._run is None and self._count == 0 and not again:
            self._optimizer, self._models = optimizer, models_of(optimizer)
            state = self._parts().state(optimizer)
            # Not the buffers, which the forward pass before has changed.
            self._at_start = {kind: tensors for kind, tensors in state.items() if kind != "buffers"}
        self._optimizer = optimizer
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._gradients = self._parts().gradients()
        # A GradScaler leaves it to a fused optimizer to unscale them.
        if (scale := getattr(optimizer, "grad_scale", None)) is not None:
            self._gradients = {name: gradient / float(scale) for name, gradient in self._gradients.items()}

    def on_step_end(self, step: Step) -> None:
        self._count += 1
        if self._count > self._steps:
            return
        parts = self._parts()
        if self._run is None and self._count == 1:
            known = facts_of(self._optimizer) | {
                "world_size": self._size,  # of the launcher, as many as there are traces
                "parameters": sum(tensor.numel() for tensor in parts.parameters.values()),
                "optimizer": type(self._optimizer).__name__,
                "exchanged_by": exchanged_by(self._optimizer, parts.modules.values()),
            }
            self._begin(self._at_start, known)
            self._at_start = {}
        norm = step.grad_norm
        if norm is None and self._gradients:
            norms = [torch.linalg.vector_norm(gradient) for gradient in self._gradients.values()]
            norm = torch.linalg.vector_norm(torch.stack(norms))
        figures = {
            "samples": [sample for batch in self._used for sample in batch],
            "counts": [len(batch) for batch in self._used],
            "losses": [float(loss) for loss in step.losses],
            "weights": [float(weight) for weight in step.weights],
            "lr": self._rates or [float(step.lr)],
            "grad_norm": None if norm is None else float(norm),
            "skipped": bool(step.skipped),
        }
        self._write("step", figures, gradients=self._gradients, **parts.state(self._optimizer))
        self._gradients, self._rates, self._used = {}, [], []

    def on_epoch_end(self, record: Mapping[str, Any]) -> None:
        self._drawn.clear()
        if 0 < self._count <= self._steps:
            figures = {name: value for name, value in record.items() if name.startswith("val_")}
            self._write("evaluation", {"figures": figures}, buffers=host_copies(self._parts().buffers.items()))

    def _begin(
        self, state: Mapping[str, Tensors], known: Mapping[str, Any], group: Sequence[int] | None = None
    ) -> None:
        """Write the start: the state, what the tensors are, and on rank 0 the facts of the run.

        Args:
            group: the ranks with the same part of the model; None: all.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        self._folder.with_suffix(".jsonl").write_text("")
        parts = self._parts()
        tensors = [*parts.parameters.values(), *parts.buffers.values()]
        self._stride = stride(tensors, (self._steps + 1) * self._size)
        group = range(self._size) if group is None else group
        place = {
            "rank": self._rank,
            "size": self._size,
            "copy": group.index(self._rank),  # of the model
            "copies": len(group),
            "stride": self._stride,
        }
        self._write("start", {**place, **parts.describe(self._optimizer)}, **state)
        if self._rank == 0:
            (self._log / FACTS).write_text(json.dumps(known, indent=1, default=str) + "\n")

    def _parts(self) -> ModelParts:
        return ModelParts.of(self._models, self._optimizer)

    def _write(self, event: str, figures: Mapping[str, Any], **kinds: Tensors) -> None:
        """Write a moment: its figures as a line, with the checksums of its tensors, and a file of their values."""
        step = self._first + (0 if event == "start" else self._count)
        checksums = {kind: {name: checksum(t) for name, t in tensors.items()} for kind, tensors in kinds.items()}
        values = {
            f"{kind}/{name}": subsample(tensor, self._stride)
            for kind, tensors in kinds.items()
            for name, tensor in tensors.items()
        }
        with atomic_write(self._folder / f"{event}-{step}.safetensors") as temporary:
            save_file(values, temporary)
        # Closed after each line, so that a run that fails leaves whole lines.
        with self._folder.with_suffix(".jsonl").open("a") as lines:
            lines.write(json.dumps({"event": event, "step": step, **figures, "checksums": checksums}) + "\n")
