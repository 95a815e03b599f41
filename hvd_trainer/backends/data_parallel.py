"""`torch.nn.DataParallel`: one process with all GPUs that it sees. What DDP replaced, to compare with."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from hvd_trainer.backends.single import SingleBackend
from hvd_trainer.errors import BackendError
from hvd_trainer.utils import accelerator

ITSELF = "DataParallel does it in its own way; leave it out, or use --backend ddp"


class DataParallelBackend(SingleBackend):
    """Gives each GPU a copy of the model in every step, and a share of the batch."""

    name = "data-parallel"
    only_for_others = {
        **SingleBackend.only_for_others,
        **dict.fromkeys(("sync_batch_norm", "find_unused_parameters"), ITSELF),
    }

    @property
    def version(self) -> str:
        return f"PyTorch {torch.__version__} DataParallel on {self.copies} GPUs"

    @property
    def copies(self) -> int:
        return accelerator.count(accelerator.kind())

    def _start(self) -> None:
        if accelerator.is_host(self.device) or self.copies < 2:
            raise BackendError(
                f"--backend data-parallel needs two GPUs or more in one process, and this one has "
                f"{'none' if accelerator.is_host(self.device) else self.copies}. Type: --backend single"
            )

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, *, exchange: bool = True
    ) -> tuple[nn.Module, Optimizer]:
        model, optimizer = super().prepare(model, optimizer)
        return nn.DataParallel(model), optimizer
