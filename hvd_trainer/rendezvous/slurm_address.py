"""The ranks of a Slurm step on several nodes meet on its first host, at a port computed from the step's number."""

from __future__ import annotations

import socket
import subprocess
from contextlib import suppress

from hvd_trainer.errors import LaunchError
from hvd_trainer.launch.slurm import read_step, slurm_job
from hvd_trainer.rendezvous.fixed_address import meet_at
from hvd_trainer.rendezvous.join import RendezvousSettings
from hvd_trainer.rendezvous.shared_stores import JobStore


def join_step(settings: RendezvousSettings) -> JobStore:
    """Join the ranks of the step that srun started.

    Raises:
        LaunchError: the address is not known, its port is in use, or nobody answers there in time.
    """
    step = read_step(settings.environ)
    # Another step whose port is the same has another name: its ranks never take this one's rank 0 for theirs.
    name = f"{step.job}.{step.number} start {slurm_job(settings.environ).restart_count} {settings.session}"
    return meet_at(node_address(step.master_address), step.master_port, settings, name)


def node_address(node: str) -> str:
    """Return the address of a node: its name if that resolves, else the address that Slurm has for it.

    Raises:
        LaunchError: neither resolves.
    """
    with suppress(OSError):
        socket.getaddrinfo(node, None)
        return node
    with suppress(OSError, subprocess.SubprocessError):
        command = ["scontrol", "--oneliner", "show", "node", node]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
        fields = dict(field.partition("=")[::2] for field in shown.split())
        socket.getaddrinfo(fields.get("NodeAddr", ""), None)
        return fields["NodeAddr"]
    raise LaunchError(
        f"The address of {node}, where rank 0 runs, is known neither to this machine nor to Slurm. Type before "
        f"srun: export MASTER_ADDR=ADDRESS_OF_RANK_0 MASTER_PORT=29500"
    )
