"""The accelerator of this machine: NVIDIA's and AMD's GPUs (both `cuda` in PyTorch) and Intel's (`xpu`).

The only module that names a kind of accelerator; everything above asks it about a `torch.device`. Importing it and
counting devices creates no context on a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

COLLECTIVES = {"cuda": "nccl", "xpu": "xccl"}
"""The accelerators that ranks train on, and the torch.distributed backend for their tensors. On ROCm, `nccl` is
RCCL."""
HOROVOD = {"cuda"}
"""The accelerators whose tensors Horovod can exchange, if it was built for them."""
CPU = torch.device("cpu")


def kind() -> str | None:
    """Return the type of this machine's accelerator, such as `cuda`; None without a supported one."""
    device = torch.accelerator.current_accelerator()
    if device is None or device.type not in COLLECTIVES or count(device.type) == 0:
        return None
    return device.type


def unsupported() -> str | None:
    """Return the type of an accelerator that is here and that ranks cannot train on, such as `mps`."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None or device.type in COLLECTIVES else device.type


def count(type_: str | None) -> int:
    """Return how many devices of a type this process sees; 0 for None."""
    return 0 if type_ is None else torch.accelerator.device_count()


def names() -> list[str]:
    """Return the product name of each device that this process sees."""
    type_ = kind()
    return [name(torch.device(type_, number)) for number in range(count(type_)) if type_]


def is_host(device: torch.device) -> bool:
    """Return True if operations on the device are finished when their call returns."""
    return device.type == "cpu"


def name(device: torch.device) -> str:
    """Return the product name of a device, or `CPU`."""
    return "CPU" if is_host(device) else str(torch.get_device_module(device).get_device_name(device))


def slot(device: torch.device) -> str | None:
    """Return the PCI address of a device, `domain:bus:device` in hex; None for the CPU.

    Slices of one card (MIG) share it, and NCCL tells devices apart by it. Where PyTorch does not know it, the
    device's UUID.
    """
    if is_host(device):
        return None
    properties = torch.get_device_module(device).get_device_properties(device)
    if not hasattr(properties, "pci_bus_id"):
        return str(properties.uuid)
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}"


def collectives(device: torch.device) -> str:
    """Return the torch.distributed backend for tensors of a device: `gloo`, `nccl` or `xccl`."""
    return COLLECTIVES.get(device.type, "gloo")


def process_group_backend(device: torch.device) -> str:
    """Return the backend of a group that exchanges CPU tensors by Gloo and a device's own by its library."""
    return "gloo" if is_host(device) else f"cpu:gloo,{device.type}:{collectives(device)}"


def set_current(device: torch.device) -> None:
    """Make the device the current one of this thread; nothing on the CPU."""
    if not is_host(device):
        torch.accelerator.set_device_index(device)


def is_initialized() -> bool:
    """Return whether this process has chosen a device, or used one."""
    current = torch.accelerator.current_accelerator()
    if current is None or current.type not in COLLECTIVES:
        return False
    return bool(torch.get_device_module(current).is_initialized())


def in_use() -> torch.device | None:
    """Return a device on which this process has a context: this thread's current one, if it is one; else None."""
    current = torch.accelerator.current_accelerator()
    if current is None or not is_initialized():
        return None  # before anything counts the devices, which takes a while
    own = torch.accelerator.current_device_index()
    has_context: Callable[[int], bool] = torch._C._cuda_hasPrimaryContext if current.type == "cuda" else own.__eq__
    numbers = sorted(range(count(current.type)), key=lambda number: number != own)
    return next((torch.device(current.type, number) for number in numbers if has_context(number)), None)


def blocking_event(device: torch.device) -> Any:
    """Return an event of a device, for which a thread waits asleep where the device knows how to wake it."""
    if device.type == "cuda":
        return torch.cuda.Event(blocking=True)
    return torch.Event(device)


def record(event: Any, device: torch.device) -> None:
    """Let an event be reached when the current stream of its device comes to here."""
    event.record(torch.get_device_module(device).current_stream(device))


class Point:
    """A point in the current stream of a device, for which other streams can wait.

    PyTorch sets the thread's device again after it has recorded, awaited or freed an event, and CUDA makes a
    context there. In a thread that has chosen none, that is GPU 0: so each is done on the event's own device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with on_device(device):
            self._event = torch.Event(device)
            self._event.record(torch.accelerator.current_stream(device))

    def is_reached(self) -> bool:
        """Return whether the device has come to here."""
        return bool(self._event.query())

    def block(self) -> None:
        """Let the current stream of the device wait for this point."""
        with on_device(self._device):
            torch.accelerator.current_stream(self._device).wait_event(self._event)

    def __del__(self) -> None:
        with on_device(self._device):
            del self._event


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished all work that was queued on it."""
    if not is_host(device):
        torch.accelerator.synchronize(device)


def copy_to(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Copy a tensor to a device, unless it is there: on an accelerator later, and on the host before this returns.

    A copy to the host that nobody waits for would be read before it has arrived.
    """
    return tensor.to(device, dtype, non_blocking=not is_host(device))


# Streams.


def follow_default_stream(tensor: torch.Tensor) -> None:
    """Let the current stream of a tensor's device wait for the default one, and use the tensor after that."""
    current = torch.accelerator.current_stream(tensor.device)
    if current.stream_id != 0:
        current.wait_stream(torch.Stream(0, current.device_index, current.device_type))
        tensor.record_stream(current)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a device is this thread's current one; it makes no context of CUDA at its end."""
    return torch.accelerator.device_index(device.index)


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Send this thread's work to a stream of any device, inside the context.

    At its end a stream's own context sets the thread's device again, which makes a context of CUDA on it.
    """
    with torch.accelerator.device_index(stream.device_index), stream:
        yield


# How it computes.


@contextmanager
def tf32() -> Iterator[None]:
    """Multiply float32 matrices with 10 bits of mantissa inside the context, in the whole process.

    Convolutions do so by default.
    """
    with warnings.catch_warnings():
        # Not the newer `matmul.fp32_precision`: once it is set, torch.compile fails where it reads this one.
        warnings.filterwarnings("ignore", "Please use the new API settings to control TF32", UserWarning)
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


# Memory and random numbers.


def pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialized tensor in page-locked host memory, which an accelerator copies asynchronously.

    PyTorch rounds its size up to a power of two, and caches freed memory for reuse after pending copies from it.
    """
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)


def seed(number: int, device: torch.device) -> None:
    """Seed the random number generator of this accelerator only."""
    module = torch.get_device_module(device)
    module.init()  # creates its generators, with its first context
    index = module.current_device() if device.index is None else device.index
    module.default_generators[index].manual_seed(number)
