"""One process, with nothing to exchange: the reference that both engines must equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_trainer.backends.base import Backend
from hvd_trainer.backends.collectives import Collectives, ReduceOp
from hvd_trainer.errors import LaunchError


class LocalCollectives(Collectives):
    """Collectives of one rank."""

    def _all_reduce(self, tensor: Tensor, op: ReduceOp, *, replicas: bool = False) -> Tensor:
        return tensor.clone()

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def _all_to_all(self, rows: Tensor) -> Tensor:
        return rows

    def broadcast_to_replicas(self, pairs: Sequence[tuple[Tensor, int]]) -> None:
        pass

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        pass


class SingleBackend(Backend):
    """Train in one process, on one device."""

    name = "single"
    collectives_class = LocalCollectives

    @property
    def version(self) -> str:
        return f"PyTorch {torch.__version__}"

    def _load(self) -> None:
        if self.world.size > 1:
            raise LaunchError(
                f"{self.world.launcher} started {self.world.size} processes, but --backend {self.name} trains in "
                f"one. Leave the launcher out, or use --backend horovod or --backend ddp"
            )

    def _start(self) -> None:
        pass

    def _connect_model(self, model: nn.Module) -> nn.Module:
        return model

    def _connect_stage(self, stage: nn.Module, passes: int) -> None:
        pass

    def _finish_exchange(self, optimizer: Optimizer) -> None:
        pass
