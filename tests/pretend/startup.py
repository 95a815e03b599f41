"""Give a process the pretend device, or a fault, before its program begins: by variables of its environment."""

from __future__ import annotations

import os

from pretend import imports

DEVICE, FAULT = "HVD_TRAINER_TEST_PRETEND", "HVD_TRAINER_TEST_FAULT"
"""The order in which streams run (a name in `device.ORDERS`), and a name in `faults.FAULTS`."""


def begin() -> None:
    """Install what the environment asks for; the device as soon as PyTorch is imported."""
    if FAULT in os.environ:
        from pretend.faults import FAULTS

        fault = FAULTS[os.environ[FAULT]]
        imports.rewrite(fault.module, fault.put_into)
    if DEVICE in os.environ:
        from pretend import device

        imports.after("torch", lambda _: device.install(os.environ[DEVICE]))
