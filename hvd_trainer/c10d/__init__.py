"""Horovod as a backend of torch.distributed.

    import hvd_trainer.c10d

    dist.init_process_group("horovod")

The import registers the backend and, for launchers that do not set PyTorch's variables (horovodrun, mpirun, srun),
how `env://` finds the ranks; Horovod is imported when the backend is chosen. Newer versions of PyTorch (2.15) find
the backend by this package's entry point, without the import.

`HorovodProcessGroup` says which operations are Horovod's, and which are Gloo's.
"""

from __future__ import annotations

import torch.distributed as dist

from hvd_trainer.c10d import rendezvous
from hvd_trainer.c10d.process_group import create_process_group
from hvd_trainer.utils import accelerator

NAME = "horovod"


def register() -> None:
    """Make `torch.distributed` know the backend "horovod", and the launchers of this package."""
    kind = accelerator.kind()
    devices = ["cpu", kind] if kind else ["cpu"]
    dist.Backend.register_backend(NAME, create_process_group, extended_api=True, devices=devices)
    rendezvous.register()


register()
