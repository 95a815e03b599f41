"""`torch.nn.DataParallel`, the predecessor of DDP: one process with all GPUs that it sees; to compare with."""

from __future__ import annotations

import torch
from torch import nn

from hvd_trainer.backends.single import SingleBackend
from hvd_trainer.errors import BackendError
from hvd_trainer.utils import accelerator


class DataParallelBackend(SingleBackend):
    """Give each GPU a copy of the model and a share of the batch, in every step."""

    name = "data-parallel"

    @property
    def version(self) -> str:
        return f"PyTorch {torch.__version__} DataParallel on {self.num_replicas} GPUs"

    @property
    def num_replicas(self) -> int:
        return accelerator.count(accelerator.kind())

    def _start(self) -> None:
        if accelerator.is_host(self.device) or self.num_replicas < 2:
            raise BackendError(
                f"--backend data-parallel needs two GPUs or more in one process, and this one has "
                f"{'none' if accelerator.is_host(self.device) else self.num_replicas}. Type: --backend single"
            )

    def _connect_model(self, model: nn.Module) -> nn.Module:
        return nn.DataParallel(model)
