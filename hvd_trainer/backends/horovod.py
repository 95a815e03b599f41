"""Horovod, under any launcher, on Gloo or NCCL.

Gradients go by the public calls that `hvd.DistributedOptimizer` makes itself: dense ones in DDP's buckets
(compress, `hvd.allreduce_async_`, wait, decompress), sparse ones by `hvd.allgather_async` of their indices and
values. That wrapper would send each gradient as a message of its own, add in another order than DDP, and wait
without a limit for a rank that is gone, or that has no sparse gradient where others have one. The user's own
optimizer makes the update. So it keeps its state, its schedulers and its `zero_grad(set_to_none=True)`, which the
wrapper would drop, detach and refuse.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hvd_trainer.backends import process_group
from hvd_trainer.backends.base import Backend
from hvd_trainer.backends.buckets import BucketReducer, Reducer, sparse_parameters
from hvd_trainer.backends.compiled import compile_in_buckets
from hvd_trainer.backends.horovod_collectives import HorovodCollectives
from hvd_trainer.backends.horovod_operations import tell_monitor
from hvd_trainer.backends.horovod_reducer import HorovodBucketExchange, HorovodSparseReducer
from hvd_trainer.backends.horovod_start import (
    MIN_PATCH_SET_BFLOAT16,
    MIN_PATCH_SET_ELASTIC,
    Meeting,
    import_horovod,
    patch_set,
    start_horovod,
    stop_horovod,
    tuning,
)
from hvd_trainer.backends.unused_parameters import unused_everywhere
from hvd_trainer.errors import BackendError
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.text import INSTALL_HOROVOD

GRADIENT_TYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


class HorovodBackend(Backend):
    """Average gradients by Horovod's background thread while backward runs."""

    name = "horovod"
    collectives_class = HorovodCollectives
    collectives: HorovodCollectives

    @property
    def _hvd(self) -> ModuleType:
        return self.collectives.hvd

    @property
    def version(self) -> str:
        import horovod

        library = "NCCL" if self.uses_nccl else "MPI" if self._uses_mpi else "Gloo"
        return f"Horovod {horovod.__version__} on {library}, PyTorch {torch.__version__}"

    @property
    def uses_nccl(self) -> bool:
        return self.device.type in accelerator.HOROVOD and bool(self._hvd.nccl_built())

    @property
    def _uses_mpi(self) -> bool:
        return self.options.transport == "mpi"

    # Starting and ending.

    def _load(self) -> None:
        import_horovod()

    def _start(self) -> None:
        hvd, session = self._hvd, self.session
        self._refuse_cpu_build()
        if session.driver is not None and patch_set() < MIN_PATCH_SET_ELASTIC:
            raise BackendError(
                f"In horovodrun's elastic mode this Horovod would let ranks wait for those that are gone. Type on "
                f"all hosts: {INSTALL_HOROVOD}"
            )
        sets = [hvd.ProcessSet(ranks) for ranks in self.replica_groups] if len(self.replica_groups) > 1 else []
        start_horovod(
            hvd,
            functools.partial(hvd.init, process_sets=sets),
            Meeting.of(session),
            timeout_s=self.options.startup_timeout_s,
            settings=self._tuning() | (self._mpi_variables() if self._uses_mpi else {}),
            interface=None if self.options.network_interface else session.environ.get("HOROVOD_GLOO_IFACE"),
            on_mpi=self._uses_mpi,
        )
        own_sets = (group for group in sets if self.world.rank in group.ranks)
        self.collectives.process_set = next(own_sets, hvd.global_process_set)
        tell_monitor(hvd.mpi_ops)

    def _mpi_variables(self) -> dict[str, str]:
        """Return the variables that make Horovod use MPI, from which it learns this world.

        Raises:
            BackendError: it was built without MPI, or the launcher is another than mpirun.
        """
        built = bool(self._hvd.mpi_built())
        if not built or self.world.launcher != "mpirun":
            install = "" if built else f"{INSTALL_HOROVOD} --mpi; "
            raise BackendError(
                f"--transport mpi needs a Horovod built with MPI (here: {'yes' if built else 'no'}) and mpirun "
                f"(here: {self.world.launcher}). Type: {install}mpirun -np {self.world.size} python ... "
                f"--backend horovod --transport mpi"
            )
        return {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}

    def _refuse_cpu_build(self) -> None:
        """Raise BackendError if this Horovod can exchange no tensor of this rank's GPU.

        Its background thread would end at the first one, and its ranks wait for ever.
        """
        if accelerator.is_host(self.device):
            return
        if self.device.type not in accelerator.HOROVOD:
            raise BackendError(f"Horovod exchanges no tensors of {self.device.type}. Type: --backend ddp")
        if not (self._hvd.cuda_built() or self._hvd.rocm_built()):
            raise BackendError(
                f"This Horovod was built for CPUs, and this rank trains on {accelerator.name(self.device)}. Type: "
                f"{INSTALL_HOROVOD} --gpu nccl; or train with --backend ddp, or with --device cpu"
            )

    def _tuning(self) -> dict[str, str]:
        """Return settings that make Horovod quick on this device, except those that the user's environment has."""
        environ = self.session.environ
        settings = tuning(environ, on_nccl=self.uses_nccl)
        if self.uses_nccl and self.session.driver is not None and "HOROVOD_NCCL_ABORT" not in environ:
            # Else Horovod would wait on the GPU for a dead rank. With it, it polls NCCL for errors all the time,
            # which takes a core: so only where this rank can continue in another world.
            settings["HOROVOD_NCCL_ABORT"] = "1"
        return settings

    def abort_collectives(self) -> None:
        super().abort_collectives()
        if self.uses_nccl:
            stop_horovod(self._hvd)

    def stop(self, wait: bool) -> None:
        if wait and self._hvd.is_initialized():
            self.collectives.barrier()
        stop_horovod(self._hvd)
        self._disconnect()
        process_group.stop(wait=wait, on_accelerator=self.uses_nccl)

    # Training.

    def compile(self, model: nn.Module, mode: str, *, exchange: bool) -> None:
        if exchange and self.world.size > 1:
            compile_in_buckets(model, mode, int(self.options.bucket_mb * 2**20))
        else:
            super().compile(model, mode, exchange=exchange)

    def _check_model(self, model: nn.Module) -> None:
        """Check that this Horovod can exchange the gradients' types.

        Raises:
            BackendError: Horovod has no such type, or this one was built without bfloat16.
        """
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.dtype not in GRADIENT_TYPES:
                kind = str(parameter.dtype).removeprefix("torch.")
                raise BackendError(
                    f"Horovod exchanges no {kind}, and {name} is of that type. Type --backend ddp; or keep "
                    f"complex numbers as pairs of real ones (torch.view_as_complex)."
                )
        formats = {tensor.dtype for tensor in (*model.parameters(), *model.buffers())}
        if torch.bfloat16 not in formats and self.options.compression != "bf16":
            return
        if patch_set() < MIN_PATCH_SET_BFLOAT16:
            raise BackendError(
                f"This Horovod has no bfloat16. Type: {INSTALL_HOROVOD}, or train without it: --backend ddp"
            )

    def _compression(self) -> Any:
        return getattr(self._hvd.Compression, self.options.compression)

    def _connect_model(self, model: nn.Module) -> nn.Module:
        if self.world.size > 1:
            self._reducer = self._make_reducer(model)
        return model

    def _make_reducer(self, model: nn.Module) -> Reducer:
        sparse, find_unused = sparse_parameters(model), self.options.find_unused_parameters
        dense = self._make_bucket_reducer(
            model, self._hvd.global_process_set, exclude=sparse.values(), find_unused_parameters=find_unused
        )
        if not sparse:
            return dense
        agree = functools.partial(self.collectives.all_reduce, op="max")
        agree_if_needed = agree if find_unused else None
        return HorovodSparseReducer(self._hvd, self.collectives.waiter, sparse, dense, agree_if_needed)

    def _make_bucket_reducer(self, module: nn.Module, process_set: Any, **how: Any) -> BucketReducer:
        return BucketReducer(
            module,
            HorovodBucketExchange(self._hvd, self.collectives.waiter, self._compression(), process_set),
            num_ranks=process_set.size(),
            limit_bytes=int(self.options.bucket_mb * 2**20),
            **how,
        )

    def _connect_stage(self, stage: nn.Module, passes: int) -> None:
        self._check_model(stage)
        self._reducer = self._make_bucket_reducer(stage, self.collectives.process_set, passes=passes)

    def _finish_exchange(self, optimizer: Optimizer) -> None:
        may_be_unused = self.options.find_unused_parameters
        if not may_be_unused:
            self.check_unused(optimizer)  # on one rank, too, which exchanges nothing
        if self._reducer is None:
            return
        unused = []
        if may_be_unused:
            unused = unused_everywhere(optimizer, lambda flags: self.collectives.all_reduce(flags, "max"))
        self._reducer.finish()
        for parameter in unused:
            parameter.grad = None
