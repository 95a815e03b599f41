"""Read the switches of this process that slow every step, such as anomaly detection."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch.nn.parallel import DistributedDataParallel

from hvd_trainer.measure.script_facts import objects_of
from hvd_trainer.measure.stack_record import Switches

VARIABLES: Mapping[str, tuple[str, ...]] = {
    "CUDA_LAUNCH_BLOCKING": ("1",),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1",),
    "TORCH_NCCL_BLOCKING_WAIT": ("1",),
    "NCCL_DEBUG": ("TRACE",),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL",),
    "HOROVOD_LOG_LEVEL": ("TRACE", "DEBUG"),
}
"""Environment variables that slow every step, and their values that do."""


class SwitchReader:
    """Finds parameters and wrapped models among all objects, which takes a while; any thread may look and read."""

    def __init__(self) -> None:
        self._looks, self._anomalies = 0, 0
        self._elements, self._doubles = 0, 0
        self._searching: WeakSet[Any] = WeakSet()
        self._unused = False
        for one in objects_of(DistributedDataParallel, torch.nn.Parameter):
            if isinstance(one, DistributedDataParallel):
                if one.find_unused_parameters and not one.static_graph:
                    self._searching.add(one)
            elif type(one) is torch.nn.Parameter and one.requires_grad:
                self._elements += one.numel()
                self._doubles += one.numel() if one.dtype == torch.float64 else 0

    def look(self) -> None:
        """Take note of what is on at this moment."""
        self._looks += 1
        self._anomalies += torch.is_anomaly_enabled()

    def read(self) -> Switches:
        """Return what is known."""
        for model in self._searching:
            # Of the first steps and of one in a hundred.
            self._unused |= bool(model._get_ddp_logging_data().get("unused_parameter_size", 0))
        environ = {name: os.environ.get(name, "") for name in VARIABLES}
        return Switches(
            anomaly=self._anomalies / max(self._looks, 1),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            threads=torch.get_num_threads(),
            float64=self._doubles / max(self._elements, 1),
            needless_search=len(self._searching) > 0 and not self._unused,
            variables={name: value for name, value in environ.items() if value.upper() in VARIABLES[name]},
        )
