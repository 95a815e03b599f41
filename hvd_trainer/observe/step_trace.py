"""Record what the first steps compute: checksums and values of all tensors, per rank, in the log folder.

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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_trainer.backends import StepResult
from hvd_trainer.data import Batch
from hvd_trainer.observe.callback import Observer
from hvd_trainer.observe.checksums import checksum, host_copies, sample_checksums, stride, subsample
from hvd_trainer.utils.files import replacing
from hvd_trainer.utils.tensors import parameters_of

if TYPE_CHECKING:
    from hvd_trainer.training.trainer import Trainer

FOLDER = "trace"
RATES = ("params", "lr", "initial_lr")
"""What an optimizer's settings are without: the learning rate is kept for each step."""

Tensors = Mapping[str, Tensor]


class StepTrace(Observer):
    """Record what this rank computes in the first steps of a training.

    Args:
        trainer: whose training it is.
        log_dir: the log folder, on this rank's node.
        steps: how many are kept.
    """

    needs_norm = True

    def __init__(self, trainer: Trainer, log_dir: str, steps: int) -> None:
        self._trainer, self._steps = trainer, steps
        self._folder = Path(log_dir).expanduser() / FOLDER / f"rank-{trainer.world.rank}"
        self._drawn: deque[list[str]] = deque()
        self._gradients: dict[str, Tensor] = {}
        self._rates: list[float] = []
        self._watching = True
        self._last: int | None = None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Inside, steps are kept as they come.

        Raises:
            OSError: the folder cannot be written to.
        """
        trainer = self._trainer
        self._first = trainer.progress.step
        self._stride = stride(trainer.model, (self._steps + 1) * trainer.world.size)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        hook = trainer.optimizer.register_step_pre_hook(self._before_update)
        # Line by line, so that a run that fails has told of what came before.
        with self._folder.with_suffix(".jsonl").open("w", buffering=1) as self._lines:
            self._keep("start", self._situation(), **self._state())
            try:
                yield
            finally:
                hook.remove()

    def seen(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """This rank's batches of an epoch, whose samples are taken down as they come."""
        self._drawn = deque()
        for batch in batches:
            if self._watching:
                self._drawn.append(sample_checksums(batch))
            yield batch

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if not self._watching:
            return
        # The next window may have been fetched already. Only the last one of an epoch has fewer batches.
        batches = [self._drawn.popleft() for _ in range(min(trainer.plan.passes, len(self._drawn)))]
        figures = {
            "epoch": trainer.progress.epoch + 1,
            "samples": [sample for batch in batches for sample in batch],
            "counts": [len(batch) for batch in batches],
            "losses": [float(loss) for loss in result.losses],
            "lr": self._rates or [trainer.rate.last],
            "grad_norm": None if result.grad_norm is None else float(result.grad_norm),
            "skipped": bool(result.skipped),
        }
        self._keep("step", figures, gradients=self._gradients, **self._state())
        self._gradients, self._rates = {}, []
        self._last = trainer.progress.step
        self._watching = self._last - self._first < self._steps

    def on_epoch_end(self, trainer: Trainer, record: dict[str, Any]) -> None:
        if trainer.progress.step == self._last:
            figures = {name: value for name, value in record.items() if name.startswith("test_")}
            self._keep("evaluation", {"figures": figures}, buffers=host_copies(trainer.model.named_buffers()))

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        """Copy the gradients as the update takes them: averaged, unscaled and clipped."""
        if self._watching:
            self._rates = [float(group["lr"]) for group in optimizer.param_groups]
            named = self._trainer.model.named_parameters()
            self._gradients = host_copies((name, p.grad) for name, p in named if p.grad is not None)

    def _situation(self) -> dict[str, Any]:
        """Return what the comparison must know of this rank and of the model to find causes."""
        trainer, model = self._trainer, self._trainer.model
        column = trainer.backend.column
        modules = dict(model.named_modules())
        state = [*model.named_parameters(), *model.named_buffers()]
        return {
            "rank": trainer.world.rank,
            "size": trainer.world.size,
            "copy": column.index(trainer.world.rank),  # of the model
            "copies": len(column),
            "stride": self._stride,
            "shapes": {name: f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for name, t in state},
            "sliced": [name for name, tensor in state if hasattr(tensor, "to_local")],
            "dropout": [name for name, module in modules.items() if draws(module)],
            "batch_norm": [n for n, m in modules.items() if isinstance(m, nn.modules.batchnorm._BatchNorm)],
            "settings": [
                {key: repr(value) for key, value in group.items() if key not in RATES}
                for group in trainer.optimizer.param_groups
            ],
        }

    def _state(self) -> dict[str, dict[str, Tensor]]:
        model = self._trainer.model
        return {
            "parameters": host_copies(model.named_parameters()),
            "optimizer": host_copies(self._of_optimizer()),
            "buffers": host_copies(model.named_buffers()),
        }

    def _of_optimizer(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the optimizer's state of each parameter, by names such as `fc1.weight/exp_avg`."""
        optimizer = self._trainer.optimizer
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._trainer.model.named_parameters()}
        for number, parameter in enumerate(parameters_of(optimizer)):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor | int | float):
                    tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
                    yield f"{names.get(parameter, f'parameter {number}')}/{key}", tensor

    def _keep(self, event: str, figures: Mapping[str, Any], **kinds: Tensors) -> None:
        # Needed here only, and not quick to import.
        from safetensors.torch import save_file

        step = self._trainer.progress.step
        checksums = {kind: {name: checksum(t) for name, t in its.items()} for kind, its in kinds.items()}
        values = {
            f"{kind}/{name}": subsample(tensor, self._stride)
            for kind, its in kinds.items()
            for name, tensor in its.items()
        }
        with replacing(self._folder / f"{event}-{step}.safetensors") as temporary:
            save_file(values, temporary)
        self._lines.write(json.dumps({"event": event, "step": step, **figures, "checksums": checksums}) + "\n")


def draws(module: nn.Module) -> bool:
    """Return whether a module applies dropout: as a layer, or inside, as attention and recurrent layers do."""
    own = module.p if isinstance(module, nn.modules.dropout._DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(own, float) and own > 0
