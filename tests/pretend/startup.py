"""Give a process the pretend device, or a fault, before its program begins: by variables of its environment."""

from __future__ import annotations

import os

from pretend.imports import ImportHook

DEVICE, FAULT = "HVD_TRAINER_TEST_PRETEND", "HVD_TRAINER_TEST_FAULT"
"""The order in which streams run (a name in `device.ORDERS`), and a name in `faults.FAULTS`."""


def begin() -> None:
    """Install what the environment asks for; the device as soon as PyTorch is imported."""
    if FAULT in os.environ:
        from pretend import faults

        fault = faults.FAULTS[os.environ[FAULT]]
        ImportHook(fault.module, rewrite=fault.put_into).install()
    if DEVICE in os.environ:
        from pretend import device

        ImportHook("torch", after=lambda _: device.install(os.environ[DEVICE])).install()
