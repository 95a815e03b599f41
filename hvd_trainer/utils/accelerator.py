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
"""The accelerators that ranks train on, with the library by which torch.distributed exchanges their tensors. On
ROCm, `nccl` is RCCL."""


def kind() -> str | None:
    """Return the type of this machine's accelerator, such as `cuda`; None without a supported one."""
    found = torch.accelerator.current_accelerator()
    if found is None or found.type not in COLLECTIVES or count(found.type) == 0:
        return None
    return found.type


def unsupported() -> str | None:
    """Return the type of an accelerator that is here and that ranks cannot train on, such as `mps`."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type in COLLECTIVES else found.type


def built_for() -> str:
    """Return which accelerators this PyTorch was built for, such as `CUDA 13.2`."""
    version = torch.version
    found = {"CUDA": version.cuda, "ROCm": version.hip, "XPU": getattr(version, "xpu", None)}
    return ", ".join(f"{name} {its}" for name, its in found.items() if its) or "CUDA none"


def count(type_: str | None) -> int:
    """Return how many devices of a type this process sees; 0 for None."""
    return 0 if type_ is None else int(torch.get_device_module(type_).device_count())


def names() -> list[str]:
    """Return the product name of each device that this process sees."""
    found = kind()
    return [name(torch.device(found, number)) for number in range(count(found)) if found]


def is_host(device: torch.device) -> bool:
    """Return True if operations on the device are done when their call returns."""
    return device.type == "cpu"


def name(device: torch.device) -> str:
    """Return the product name of a device, or `CPU`."""
    return "CPU" if is_host(device) else str(_module(device).get_device_name(device))


def slot(device: torch.device) -> str | None:
    """Return the PCI address of a device, `domain:bus:device` in hex; None for the CPU.

    Slices of one card (MIG) share it, and NCCL tells devices apart by it. Where PyTorch does not know it, the
    device's UUID.
    """
    if is_host(device):
        return None
    found = _module(device).get_device_properties(device)
    if not hasattr(found, "pci_bus_id"):
        return str(found.uuid)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}"


def collectives(device: torch.device) -> str:
    """Return the torch.distributed backend for tensors of a device: `gloo`, `nccl` or `xccl`."""
    return COLLECTIVES.get(device.type, "gloo")


def process_group_backend(device: torch.device) -> str:
    """Return the backend of a group that exchanges CPU tensors by Gloo and a device's own by its library."""
    return "gloo" if is_host(device) else f"cpu:gloo,{device.type}:{collectives(device)}"


def set_current(device: torch.device) -> None:
    """Make the device the one that this thread's work goes to; nothing on the CPU."""
    if not is_host(device):
        _module(device).set_device(device)


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that it was asked for."""
    if not is_host(device):
        _module(device).synchronize(device)


# Streams and events.


def event(device: torch.device, *, timing: bool = False) -> Any:
    """Return a new event of an accelerator, with `record`, `query`, `synchronize` and `elapsed_time` (ms)."""
    return _module(device).Event(enable_timing=timing)


def new_stream(device: torch.device) -> Any:
    """Return a new stream of an accelerator: a queue beside the default one."""
    return _module(device).Stream(device)


def current_stream(device: torch.device) -> Any:
    """Return the stream that this thread's work on an accelerator goes to."""
    return _module(device).current_stream(device)


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Send this thread's work to a stream, inside the context."""
    context: AbstractContextManager[Any] = torch.get_device_module(stream.device).stream(stream)
    return context


@contextmanager
def apart(device: torch.device) -> Iterator[Any]:
    """Send this thread's work to a stream of its own, inside the context, which is given; what comes after waits.

    Where an engine hooks into gradients, they are added up on the stream that was there then. To capture that, the
    graph must be captured on the same stream; until then PyTorch would warn that the passes are on another one.
    """
    # Older versions of PyTorch do not warn.
    getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", lambda _: None)(False)
    stream = new_stream(device)
    stream.wait_stream(current_stream(device))
    with on_stream(stream):
        yield stream
    current_stream(device).wait_stream(stream)


# How it computes.


def can_capture(device: torch.device) -> bool:
    """Return True if what a device is asked for can be captured as a graph, and launched at once from then on."""
    return device.type == "cuda"


def capture(run: Callable[[], None], stream: Any) -> Callable[[], None]:
    """Capture what a function asks the current device for, without doing it; return what launches all of it.

    It is captured on the given stream, and launched on that which is current then.

    The addresses of tensors are part of it: what it reads must stay where it is, and what it has made is
    overwritten by each launch. Other threads, such as a loader's, may use the device meanwhile.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        run()
    replay: Callable[[], None] = graph.replay
    return replay


def has_cudnn(device: torch.device) -> bool:
    """Return True if convolutions are cuDNN's, or its like's on AMD's GPUs."""
    return device.type == "cuda" and bool(torch.backends.cudnn.is_available())


@contextmanager
def fast_kernels(*, tf32: bool, cudnn_benchmark: bool) -> Iterator[None]:
    """Set for the whole process, inside the context, how kernels are chosen; nothing where both are False.

    Args:
        tf32: multiply float32 matrices with 10 bits of mantissa. (Convolutions do so by default.)
        cudnn_benchmark: try cuDNN's ways to compute a convolution, once for each shape, and keep the quickest.
    """
    benchmark = torch.backends.cudnn.benchmark
    with warnings.catch_warnings():
        # The newer `matmul.fp32_precision` makes torch.compile fail where it still reads this one.
        warnings.filterwarnings("ignore", "Please use the new API settings to control TF32", UserWarning)
        precision = torch.get_float32_matmul_precision() if tf32 else None
        if tf32:
            torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = benchmark or cudnn_benchmark
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
        if precision is not None:
            torch.set_float32_matmul_precision(precision)


# Memory, in bytes.


def pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an empty tensor in page-locked host memory, between which and an accelerator copies hold nobody up.

    PyTorch rounds its bytes up to a power of two. What is freed it keeps, and hands out again once the copies from
    it are done.
    """
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)


def free_bytes(device: torch.device) -> int:
    """Return how much memory of an accelerator nobody has taken."""
    return int(_module(device).mem_get_info(device)[0])


def allocated_bytes(device: torch.device) -> int:
    """Return how much memory this process's tensors take on an accelerator."""
    return int(_module(device).memory_allocated(device))


def reset_peak(device: torch.device) -> None:
    """Begin to measure `peak_bytes` anew."""
    _module(device).reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Return the most that this process's tensors have taken on an accelerator since `reset_peak`."""
    return int(_module(device).max_memory_allocated(device))


# Random numbers.


def rng_state(device: torch.device) -> torch.Tensor:
    """Return the state of an accelerator's generator of random numbers."""
    state: torch.Tensor = _module(device).get_rng_state(device)
    return state


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    """Restore what `rng_state` returned."""
    _module(device).set_rng_state(state, device)


def seed(number: int, device: torch.device) -> None:
    """Seed the generator of this accelerator, and of no other one."""
    module = _module(device)
    module.init()  # its generators are made with its first context
    index = module.current_device() if device.index is None else device.index
    module.default_generators[index].manual_seed(number)


def _module(device: torch.device) -> Any:
    """Return PyTorch's module for a type of device: `torch.cuda` and `torch.xpu` have the same functions."""
    return torch.get_device_module(device.type)
