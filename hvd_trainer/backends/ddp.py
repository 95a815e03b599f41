"""Native torch.distributed: DistributedDataParallel over NCCL on GPUs, over Gloo on CPUs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hvd_trainer.backends import process_group
from hvd_trainer.backends.base import Backend, ReplicaGrouping
from hvd_trainer.backends.buckets import BucketReducer
from hvd_trainer.backends.ddp_collectives import DDPBucketExchange, DDPCollectives
from hvd_trainer.backends.ddp_layout import FinalLayout
from hvd_trainer.backends.session import Session
from hvd_trainer.errors import BackendError, OptionError
from hvd_trainer.faults.activity import COLLECTIVE
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.tensors import tensors_in

# torch 2.15 renamed the option; the old name still works there, with a warning in every rank.
BUFFERS_IN_FORWARD = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


SET_BY_OPTIONS = {
    *("module", "device_ids", "init_sync", "process_group", "device_mesh", "bucket_cap_mb"),
    *("find_unused_parameters", "broadcast_buffers", "forward_sync_buffers"),
}
"""Arguments of `DistributedDataParallel` that the engine sets."""


def check_ddp_kwargs(ddp_kwargs: Mapping[str, Any]) -> None:
    """Check further arguments of `DistributedDataParallel`.

    Raises:
        OptionError: it does not take one of them, or the engine sets it.
    """
    accepted = inspect.signature(DistributedDataParallel).parameters.keys() - SET_BY_OPTIONS
    if refused := sorted(ddp_kwargs.keys() - accepted):
        raise OptionError(
            f"ddp_kwargs has {', '.join(refused)}, which DistributedDataParallel does not take, or which the "
            f"engine sets by its options. It may have: {', '.join(sorted(accepted))}"
        )


class DDPBackend(Backend):
    """Average gradients in DDP's buckets while backward runs.

    Args:
        session, grouping: as for `Backend`.
        ddp_kwargs: further arguments of `DistributedDataParallel`.
    """

    name = "ddp"
    collectives_class = DDPCollectives
    collectives: DDPCollectives
    takes_ddp_kwargs = True

    def __init__(
        self,
        session: Session,
        *,
        grouping: ReplicaGrouping | None = None,
        ddp_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(session, grouping=grouping)
        self._ddp: DistributedDataParallel | None = None
        self._ddp_kwargs = dict(ddp_kwargs or {})
        self._hook: RemovableHandle | None = None

    @property
    def version(self) -> str:
        return f"PyTorch {torch.__version__} DDP on {self.transport}"

    @property
    def transport(self) -> str:
        """The library that moves the bytes: gloo, nccl or xccl."""
        if self.options.transport != "auto":
            return self.options.transport
        return accelerator.collectives(self.device)

    @property
    def uses_nccl(self) -> bool:
        return self.transport != "gloo"

    def _start(self) -> None:
        self._check_transport()
        self.collectives.process_group = process_group.start(self.session, self.transport)
        if len(self.replica_groups) > 1:
            self.collectives.replica_process_group = process_group.new_group(self.session, self.replica_groups)

    def _check_transport(self) -> None:
        """Raise BackendError if this rank's device or this PyTorch cannot use the transport."""
        fits = accelerator.collectives(self.device)
        if self.transport not in ("gloo", fits):
            seen = "this rank has none" if fits == "gloo" else f"that of this rank takes {fits}"
            raise BackendError(
                f"--transport {self.transport} needs a GPU per rank, and {seen}. Leave it out, or use "
                f"--transport gloo"
            )
        several = len([device for device in self.session.devices if not accelerator.is_host(device)])
        if self.uses_nccl and several > 1 and self.world.size > 1:
            raise BackendError(
                f"--devices-per-rank {several} is for one rank on {self.transport.upper()}, whose groups exchange "
                f"tensors of one GPU, and there are {self.world.size} ranks. Type --transport gloo, or give each "
                f"rank a GPU: --stages {several}"
            )
        if self.transport != "gloo" and not dist.is_backend_available(self.transport):
            raise BackendError(f"This PyTorch was built without {self.transport.upper()}. Type: --transport gloo")

    def stop(self, wait: bool) -> None:
        if wait and process_group.is_started():
            # A rank that closed its connections while another still reduces would make that one fail.
            self.collectives.barrier()
        self._disconnect()
        self.collectives.process_group = self.collectives.replica_process_group = None
        process_group.stop(wait=wait, on_accelerator=self.uses_nccl)

    def _check_model(self, model: nn.Module) -> None:
        if not any(p.requires_grad for p in model.parameters()):
            raise BackendError("The model has no parameter that requires a gradient: there is nothing to train.")

    def _connect_stage(self, stage: nn.Module, passes: int) -> None:
        self._reducer = BucketReducer(
            stage,
            DDPBucketExchange(self.collectives.replicas, self.options.compression),
            num_ranks=len(self.replica_group),
            limit_bytes=int(self.options.bucket_mb * 2**20),
            passes=passes,
        )

    def _connect_model(self, model: nn.Module) -> nn.Module:
        # Buffers: see Backend.synchronize_buffers.
        kwargs: dict[str, Any] = {BUFFERS_IN_FORWARD: False, "gradient_as_bucket_view": True, **self._ddp_kwargs}
        ddp = FinalLayout(
            model,
            # Batches are on the device already; with `device_ids` each forward would check that.
            device_ids=None,
            process_group=self.collectives.process_group,
            init_sync=False,  # `prepare` has made the models equal
            bucket_cap_mb=self.options.bucket_mb,
            find_unused_parameters=self.options.find_unused_parameters,
            **kwargs,
        )
        self._compress(ddp)
        self._ddp = ddp
        # DDP waits for the other ranks at the end of backward, which is when the first layer has its gradient.
        first = next(p for p in model.parameters() if p.requires_grad)
        self._hook = first.register_post_accumulate_grad_hook(lambda _: self.activity.enter(COLLECTIVE))
        return ddp

    def _disconnect(self) -> None:
        super()._disconnect()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        # The reducer's hooks, and the threads of its group, end when they are freed; and the caller may still hold
        # the DDP module, which holds them.
        if self._ddp is not None:
            del self._ddp.reducer, self._ddp.logger, self._ddp.process_group
            self._ddp = None

    def _expect_backward(self, train_model: nn.Module, outputs: Any) -> None:
        # As DDP does at the end of its forward, which had another reducer.
        if isinstance(train_model, DistributedDataParallel):
            finds = train_model.find_unused_parameters
            train_model.reducer.prepare_for_backward(list(tensors_in(outputs)) if finds else [])

    def _compress(self, ddp: DistributedDataParallel) -> None:
        if self.options.compression == "none":
            return
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        if self.options.compression == "powersgd":
            state: Any = powerSGD_hook.PowerSGDState(self.collectives.process_group, start_powerSGD_iter=10)
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            return
        hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        ddp.register_comm_hook(self.collectives.process_group, hooks[self.options.compression])

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        context = super().gradient_sync(model, enabled)
        # FSDP2's modules are recognised by their method, because importing their class takes a second.
        if callable(set_sync := getattr(model, "set_requires_gradient_sync", None)):
            set_sync(enabled)
        return context if enabled or not isinstance(model, DistributedDataParallel) else model.no_sync()

    def group_of(self, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        if groups != self.replica_groups:
            return super().group_of(groups)
        # Another one takes memory of the device, and nothing would order the exchanges of the two.
        whole: Any = dist.group.WORLD
        group: dist.ProcessGroup = self.collectives.replicas or whole
        return group

    def _finish_exchange(self, optimizer: Optimizer) -> None:
        if not self.options.find_unused_parameters:
            self.check_unused(optimizer)
        if self._reducer is not None:
            self._reducer.finish()
