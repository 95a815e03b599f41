"""How ranks exchange the pretend device's tensors: torch.distributed's backend `pccl`, and Horovod."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any

from pretend.imports import ImportHook

OPERATIONS = ("allreduce", "grouped_allreduce", "broadcast", "reducescatter", "grouped_reducescatter")
"""Of Horovod, with outputs that the caller has allocated."""


def register(library: Any) -> None:
    """Let torch.distributed, hvd_trainer and Horovod know the device."""
    import torch.distributed as dist

    from hvd_trainer.utils import accelerator
    from pretend.device import BACKEND, GROUP_TIMEOUT, NAME

    def create(store: Any, rank: int, size: int, timeout: timedelta = GROUP_TIMEOUT) -> Any:
        return library.make_group(dist.ProcessGroupGloo(store, rank, size, GROUP_TIMEOUT), rank, size)

    class ProcessGroupPCCL:
        """Makes a group as `ProcessGroupNCCL` does."""

        class Options:
            _timeout = GROUP_TIMEOUT

        def __new__(cls, store: Any, rank: int, size: int, options: Any = None) -> Any:
            return create(store, rank, size)

    dist.Backend.register_backend(BACKEND, create, devices=[NAME])
    dist.ProcessGroupPCCL = ProcessGroupPCCL  # type: ignore[attr-defined]
    accelerator.COLLECTIVES[NAME] = BACKEND
    accelerator.HOROVOD.add(NAME)
    ImportHook("horovod.torch.mpi_ops", after=_connect_horovod(library)).install()


def _connect_horovod(library: Any) -> Callable[[ModuleType], None]:
    """Return what lets Horovod's functions take the device's tensors.

    A Horovod for GPUs waits for an event before it reads a tensor. This one was built for CPUs, so here the host waits,
    without being counted, and gives it a view of the memory. What is behind the call of a real one, its order of
    streams, is not shown by this.
    """

    def connect(ops: ModuleType) -> None:
        results: dict[int, Callable[[], Any]] = {}
        replaced: dict[str, Any] = {}

        def replace(name: str, function: Any) -> None:
            replaced[name] = getattr(ops, name)
            setattr(ops, name, function)
            # Other modules of Horovod have imported it already, if this process was forked from one with Horovod.
            for module in [its for key, its in sys.modules.items() if key.startswith("horovod.torch")]:
                for key, value in list(vars(module).items()):
                    if value is replaced[name]:
                        setattr(module, key, function)

        def in_place(real: Any) -> Any:
            def call(tensors: Any, outputs: Any, *rest: Any) -> int:
                if (device := _device_of(tensors)) is None:
                    return int(real(tensors, outputs, *rest))
                library.wait_for_current_stream(device.index)
                handle: int = real(_view(library, tensors), _view(library, outputs), *rest)
                ops._handle_map[handle] = (tensors, outputs)
                return handle

            return call

        def gather(tensor: Any, output: Any, *rest: Any) -> int:
            if (device := _device_of(tensor)) is None:
                return int(replaced["_allgather_async"](tensor, output, *rest))
            library.wait_for_current_stream(device.index)
            on_host = output.cpu()
            handle: int = replaced["_allgather_async"](library.host_view(tensor), on_host, *rest)
            results[handle] = lambda: on_host.to(device)
            return handle

        def all_to_all(tensor: Any, splits: Any, output: Any, received: Any, *rest: Any) -> int:
            if (device := _device_of(tensor)) is None:
                return int(replaced["_alltoall_async"](tensor, splits, output, received, *rest))
            library.wait_for_current_stream(device.index)
            on_host = output.cpu()
            view = library.host_view(tensor)
            handle: int = replaced["_alltoall_async"](view, splits, on_host, received, *rest)
            results[handle] = lambda: (on_host.to(device), received)
            return handle

        def synchronize(handle: int) -> Any:
            result = replaced["synchronize"](handle)
            return results.pop(handle)() if handle in results else result

        for name in OPERATIONS:
            replace(f"_{name}_async", in_place(getattr(ops, f"_{name}_async")))
        replace("_allgather_async", gather)
        replace("_alltoall_async", all_to_all)
        replace("synchronize", synchronize)
        replace("nccl_built", lambda: 1)
        replace("cuda_built", lambda: True)

    return connect


def _device_of(tensors: Any) -> Any:
    """Return the device of tensors of the pretend device; None for the host's."""
    from pretend.device import NAME

    first = tensors[0] if isinstance(tensors, list | tuple) else tensors
    return first.device if first.device.type == NAME else None


def _view(library: Any, tensors: Any) -> Any:
    if isinstance(tensors, list | tuple):
        return [library.host_view(tensor) for tensor in tensors]
    return library.host_view(tensors)
