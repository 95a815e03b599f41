"""How ranks exchange the pretend device's tensors: torch.distributed's backend `pccl`, and Horovod."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any

from pretend.imports import ImportHook

OUTPUTS = {
    **dict.fromkeys(("allreduce", "grouped_allreduce", "broadcast", "reducescatter", "grouped_reducescatter"), 1),
    **dict.fromkeys(("allgather", "grouped_allgather"), 1),
    "alltoall": 2,
}
"""Horovod's operations, and which of their arguments are the outputs."""


def register(library: Any) -> None:
    """Let torch.distributed, hvd_trainer and Horovod know the device."""
    import torch.distributed as dist

    from hvd_trainer.utils import accelerator
    from pretend.device import BACKEND, GROUP_TIMEOUT, NAME

    def create(store: Any, rank: int, size: int, timeout: timedelta = GROUP_TIMEOUT) -> Any:
        return library.make_group(dist.ProcessGroupGloo(store, rank, size, GROUP_TIMEOUT), rank, size)

    dist.Backend.register_backend(BACKEND, create, devices=[NAME])
    accelerator.COLLECTIVES[NAME] = BACKEND
    accelerator.HOROVOD.add(NAME)
    ImportHook("horovod.torch.mpi_ops", after=_connect_horovod(library)).install()


def _connect_horovod(library: Any) -> Callable[[ModuleType], None]:
    """Return what lets Horovod's functions take the device's tensors.

    As with NCCL and asynchronous completion, an exchange begins when the current stream has come to it, and its
    result is there in the order of the default stream. Here the host waits for the first, without being counted:
    this Horovod was built for CPUs, and is given copies. A real one's own streams are not shown.
    """
    import torch

    from pretend.device import NAME

    def connect(ops: ModuleType) -> None:
        real: dict[str, Any] = {}
        received: dict[int, list[tuple[Any, Any]]] = {}

        def replace(name: str, function: Any) -> None:
            real[name] = getattr(ops, name)
            setattr(ops, name, function)
            # Other modules of Horovod have imported it already where a process is forked from one with Horovod.
            for module in [its for key, its in sys.modules.items() if key.startswith("horovod.torch")]:
                for key in [key for key, value in vars(module).items() if value is real[name]]:
                    setattr(module, key, function)

        def exchange(name: str, position: int) -> Any:
            """Wrap a function whose argument of this position are its outputs."""

            def call(*arguments: Any) -> int:
                tensors, outputs = arguments[0], arguments[position]
                if not _is_on_device(tensors):
                    return int(real[name](*arguments))
                sent = _map(library.read, tensors)
                in_place = position == 1 and outputs is tensors
                made = sent if in_place else _map(lambda its: torch.empty(its.shape, dtype=its.dtype), outputs)
                rest = [*arguments[1:position], made, *arguments[position + 1 :]]
                handle: int = real[name](sent, *rest)
                ops._handle_map[handle] = (*ops._handle_map[handle][:-1], _result(arguments, position))
                received[handle] = list(zip(_list(made), _list(outputs), strict=True))
                return handle

            return call

        def synchronize(handle: int) -> Any:
            result = real["synchronize"](handle)
            for values, output in received.pop(handle, ()):
                library.write(values, output if output.shape == values.shape else output.resize_(values.shape))
            return result

        # By these names hvd_trainer asks which types Horovod has.
        for name, function in list(vars(ops.mpi_lib).items()):
            setattr(ops.mpi_lib, name.replace("_async_torch_", f"_async_torch_{NAME}_"), function)
        for name, position in OUTPUTS.items():
            replace(f"_{name}_async", exchange(f"_{name}_async", position))
        replace("synchronize", synchronize)
        replace("nccl_built", lambda: 1)
        replace("cuda_built", lambda: True)

    return connect


def _result(arguments: Any, position: int) -> Any:
    """Return what `synchronize` returns for a call's arguments: of alltoall also how many rows were received."""
    outputs = arguments[position]
    if position > 1:
        return outputs, arguments[position + 1]
    return tuple(outputs) if isinstance(outputs, list) else outputs


def _is_on_device(tensors: Any) -> bool:
    from pretend.device import NAME

    return bool(_list(tensors)[0].device.type == NAME)


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _map(function: Callable[[Any], Any], tensors: Any) -> Any:
    return [function(tensor) for tensor in tensors] if isinstance(tensors, list | tuple) else function(tensors)
