"""How ranks exchange the pretend device's tensors: torch.distributed's backend `pccl`, and Horovod."""

from __future__ import annotations

import os
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from hvd_trainer.utils import accelerator
from pretend import imports
from pretend.device import NAME

BACKEND = "pccl"
GROUP_TIMEOUT = timedelta(days=1)
"""Kernels of an exchange wait for ever for a rank that is gone; see process_group.cpp."""


def register(library: Any) -> None:
    """Let torch.distributed, hvd_trainer and Horovod know the device."""

    def create(asked: Any, _: Any) -> Any:
        gloo = dist.ProcessGroupGloo(asked.store, asked.group_rank, asked.group_size, GROUP_TIMEOUT)
        local = int(os.environ.get("LOCAL_RANK", asked.group_rank)) % library.device_count()
        device = asked.process_group.bound_device_id or torch.device(NAME, local)
        return library.make_group(gloo, asked.group_rank, asked.group_size, asked.timeout, device)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=[NAME])
    accelerator.COLLECTIVES[NAME] = BACKEND
    accelerator.HOROVOD.add(NAME)
    imports.after("horovod.torch.mpi_ops", lambda ops: _connect_horovod(ops, library))


def _connect_horovod(ops: ModuleType, library: Any) -> None:
    """Give Horovod's C++ functions for the device's tensors, beside those for the host's.

    As with NCCL and asynchronous completion, an exchange begins when the current stream has come to it, and its
    result is there in the order of the default stream. Here the host waits for the first, without being counted:
    this Horovod was built for CPUs, and is given copies. A real one's own streams are not shown.
    """
    mpi_lib = ops.mpi_lib
    outputs: dict[int, list[tuple[Any, Any]]] = {}
    """By exchange: its tensors on the device, each with its copy on the host."""

    def for_device(function: Any) -> Any:
        def call(sent: Any, *others: Any) -> int:
            copies: dict[int, tuple[Any, Any]] = {}

            def on_host(value: Any) -> Any:
                if isinstance(value, list | tuple):
                    return [on_host(each) for each in value]
                if not isinstance(value, torch.Tensor) or value.device.type != NAME:
                    return value
                if id(value) not in copies:  # it may be input and output
                    copies[id(value)] = value, library.read(value)
                return copies[id(value)][1]

            given = on_host(sent)
            lists = (value if isinstance(value, list | tuple) else [value] for value in others)
            written = [id(each) for values in lists for each in values]
            handle = int(function(given, *map(on_host, others)))
            outputs[handle] = [copies[number] for number in written if number in copies]
            return handle

        return call

    def wait_and_clear(handle: int, wait: Any = mpi_lib.horovod_torch_wait_and_clear) -> None:
        wait(handle)
        for tensor, values in outputs.pop(handle, ()):
            library.write(values, tensor if tensor.shape == values.shape else tensor.resize_(values.shape))

    mpi_lib.horovod_torch_wait_and_clear = wait_and_clear
    for name in [name for name in vars(mpi_lib) if "_async_torch_" in name]:
        own = for_device(getattr(mpi_lib, name))
        setattr(mpi_lib, name.replace("_async_torch_", f"_async_torch_{NAME}_"), own)
    built = ops._basics.MPI_LIB_CTYPES
    built.horovod_nccl_built, built.horovod_cuda_built = lambda: 1, lambda: True
