"""Register the pretend device as `torch.pretend`, with the names that `torch.cuda` has."""

from __future__ import annotations

import atexit
import importlib.util
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from pretend import build

NAME = "pretend"
END_S = 0.2
"""For kernels that still run at the end of the process: they may not use what Python takes down."""
ORDERS = {
    "as queued": (0, 0, False),
    "blocking": (0, 0, True),
    "late side streams": (0, 1500, False),
    "late default stream": (400, 0, False),
    "very late side streams": (0, 60_000, False),
    "very late default stream": (5_000, 0, False),
}
"""How long tasks of the default stream and of others wait before they run, in us, and whether the host waits for
each. What is not waited for shows where it is late."""
_library: Any = None


def library() -> Any:
    """Return the library's module."""
    assert _library is not None, "install() has not been called"
    return _library


def run_in_order(name: str) -> None:
    """Let streams run so from now on."""
    library().run_in_order(*ORDERS[name])


def hold(index: int) -> Any:
    """Stop the current stream of a device until `reach` of what is returned is called."""
    return library().hold(index)


def on_host_wait(call: Callable[[str], None]) -> None:
    """From now on call this with the reason each time that the host waits for the device."""
    library().on_host_wait(call)


def num_late_writes() -> int:
    """Return how often memory was written after it had been freed."""
    return int(library().late_writes())


def install(order: str = "as queued") -> None:
    """Let this process's PyTorch have the device, its collectives, and hvd_trainer train on it; once."""
    global _library
    if _library is not None:
        return
    import torch

    from pretend import collectives, kernels

    spec: Any = importlib.util.spec_from_file_location(build.NAME, build.build())
    _library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(_library)
    importlib.import_module("torch._meta_registrations")  # shapes of many operators are written in Python
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module(_library))
    torch.utils.generate_methods_for_privateuse1_backend()
    _swap_what_moves()
    kernels.register()
    collectives.register(_library)
    atexit.register(_end)
    run_in_order(order)


def _swap_what_moves() -> None:
    """Let modules move by exchanging what two tensors refer to: PyTorch has no `tensor.data =` here.

    `load_state_dict` would do so, too, which fails for parameters that DDP's hooks refer to.
    """
    import torch

    apply = torch.nn.Module._apply

    def apply_by_swapping(module: Any, function: Any, recurse: bool = True) -> Any:
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return apply(module, function, recurse)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    torch.nn.Module._apply = apply_by_swapping  # type: ignore[method-assign]


def _end() -> None:
    _library.stop_streams()
    time.sleep(END_S)


def _module(lib: Any) -> ModuleType:
    """Return what stands for `torch.cuda`: most of it is what PyTorch has for any accelerator."""
    import torch
    from torch.accelerator import _get_device_index

    def index(device: Any = None) -> int:
        return _get_device_index(device, optional=True)

    def properties(device: Any = None) -> SimpleNamespace:
        address = {"pci_domain_id": 0, "pci_bus_id": 1 + index(device), "pci_device_id": 0}
        return SimpleNamespace(name="pretend GPU", **address)

    generators = [lib.generator(number) for number in range(lib.device_count())]
    module: Any = ModuleType(f"torch.{NAME}")
    vars(module).update(
        is_available=lambda: True,
        is_initialized=lib.is_initialized,
        init=lambda: None,
        _lazy_init=lambda: None,
        _is_in_bad_fork=lambda: False,
        device_count=lib.device_count,
        current_device=torch.accelerator.current_device_index,
        set_device=torch.accelerator.set_device_index,
        device=lambda device: torch.accelerator.device_index(index(device)),
        get_device_name=lambda device=None: "pretend GPU",
        get_device_properties=properties,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        synchronize=torch.accelerator.synchronize,
        Stream=torch.Stream,
        Event=torch.Event,
        current_stream=torch.accelerator.current_stream,
        set_stream=torch.accelerator.set_stream,
        stream=lambda stream: stream,  # it is its own context
        default_generators=generators,
        manual_seed=lambda seed: generators[index()].manual_seed(seed),
        manual_seed_all=lambda seed: [generator.manual_seed(seed) for generator in generators],
        get_rng_state=lambda device=None: generators[index(device)].get_state(),
        set_rng_state=lambda state, device=None: generators[index(device)].set_state(state),
    )
    return module
