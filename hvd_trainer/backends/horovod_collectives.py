"""Collectives by Horovod's background thread."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hvd_trainer.backends.collectives import MAX_ELEMENTS, Collectives, ReduceOp
from hvd_trainer.backends.horovod_start import import_horovod
from hvd_trainer.backends.horovod_waiter import SPIN_S, Waiter
from hvd_trainer.backends.session import Session
from hvd_trainer.utils import accelerator


class HorovodCollectives(Collectives):
    """Collectives by names, by which Horovod matches the ranks' tensors and caches what it has negotiated.

    Attributes:
        process_set: Horovod's set of this rank's replica group, once Horovod has started.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.process_set: Any = None

    @functools.cached_property
    def hvd(self) -> ModuleType:
        return import_horovod()

    @functools.cached_property
    def waiter(self) -> Waiter:
        return Waiter(
            self.hvd,
            self._session.options.startup_timeout_s,
            spin_s=0.0 if accelerator.is_host(self._session.device) else SPIN_S,
            check=lambda: self._session.activity.check(),
        )

    def _all_reduce(self, tensor: Tensor, op: ReduceOp, *, replicas: bool = False) -> Tensor:
        hvd = self.hvd
        ops = {"sum": hvd.Sum, "max": hvd.Max, "min": hvd.Min}
        result = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._keep_alive(result)
        ranks = self.process_set if replicas else hvd.global_process_set
        # With a name that it has seen, Horovod answers from its cache instead of negotiating again.
        name = f"hvd_trainer.{'replicas.' if replicas else ''}{op}.{result.dtype}.{tuple(result.shape)}"
        self.waiter.result(hvd.allreduce_async_(result, name=name, op=ops[op], process_set=ranks))
        return result

    def broadcast_to_replicas(self, pairs: Sequence[tuple[Tensor, int]]) -> None:
        handles = []
        parts = [(part, rank) for tensor, rank in pairs for part in tensor.view(-1).split(MAX_ELEMENTS)]
        for number, (tensor, rank) in enumerate(parts):
            self._keep_alive(tensor)
            # Two operations under way at once must have different names.
            name = f"hvd_trainer.replicas.{number}.{rank}.{tensor.dtype}.{tuple(tensor.shape)}"
            handles.append(self.hvd.broadcast_async_(tensor, rank, name=name, process_set=self.process_set))
        for handle in handles:
            self.waiter.result(handle)

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        self._keep_alive(tensor)
        gathered: Tensor = self.waiter.result(self.hvd.allgather_async(tensor, name="hvd_trainer.gather"))
        return list(gathered.split(len(tensor)))

    def _all_to_all(self, rows: Tensor) -> Tensor:
        sent = rows.contiguous()
        self._keep_alive(sent)
        handle = self.hvd.alltoall_async(sent, name=f"hvd_trainer.all_to_all.{sent.dtype}.{tuple(sent.shape)}")
        received: Tensor = self.waiter.result(handle)[0]
        return received

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        self._keep_alive(tensor)
        # Horovod caches the source rank with the name.
        name = f"hvd_trainer.broadcast.{source}"
        self.waiter.result(self.hvd.broadcast_async_(tensor, root_rank=source, name=name))
