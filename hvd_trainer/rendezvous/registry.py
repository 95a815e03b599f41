"""Boards: where rank 0 pins the ticket to the store, and the other ranks read it.

One per way that a launcher leaves open: a file where all ranks are on one node, which nobody else reads, or else
horovodrun's key-value server, torchrun's store, or one at an agreed address, which answer everybody who comes by.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import stat
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import psutil
import torch.distributed as dist

from hvd_trainer.errors import LaunchError, first_line
from hvd_trainer.launch.world import World
from hvd_trainer.utils.files import read_regular
from hvd_trainer.utils.network import LOOPBACK, outward_address
from hvd_trainer.utils.process import start_time

CONNECT_S = 5.0
MAX_ENTRY_BYTES = 1 << 12


class EndpointRegistry(Protocol):
    """A place that all ranks of one job can see."""

    def own_address(self) -> str:
        """An address of this machine that the others can reach."""

    def post(self, ticket: str) -> None:
        """Pins the ticket."""

    def read(self) -> str | None:
        """The ticket, or None while there is none."""


class HttpRegistry:
    """horovodrun's own key-value server: `PUT` and `GET /scope/key`.

    Raises:
        LaunchError: (all methods) nobody answers there.
    """

    def __init__(self, host: str, port: int, key: str) -> None:
        self._host, self._port = host, port
        self._url = f"http://{host}:{port}/hvd_trainer/{key}"
        # A proxy that is set for the internet does not lead to the node next door.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def own_address(self) -> str:
        return outward_address(self._host, self._port)

    def post(self, ticket: str) -> None:
        self._ask(urllib.request.Request(self._url, data=ticket.encode(), method="PUT"))

    def read(self) -> str | None:
        return self._ask(urllib.request.Request(self._url))

    def _ask(self, request: urllib.request.Request) -> str | None:
        try:
            with self._opener.open(request, timeout=30) as response:
                return str(response.read().decode())
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise
        except OSError as error:
            raise LaunchError(
                f"horovodrun's server at {self._host}:{self._port} does not answer ({first_line(error)}). If "
                f"horovodrun ended or HOROVOD_* variables are left from an earlier job, start the job anew."
            ) from error


class FileRegistry:
    """A file that only this user can read, for ranks on one node.

    It names the process that wrote it, so that what a killed job left behind is not believed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def own_address(self) -> str:
        return LOOPBACK

    def post(self, ticket: str) -> None:
        note = {"ticket": ticket, "pid": os.getpid(), "started": start_time(os.getpid())}
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._refuse_others()
        handle, temporary = tempfile.mkstemp(dir=self._path.parent)
        with os.fdopen(handle, "w") as file:
            json.dump(note, file)
        os.replace(temporary, self._path)
        atexit.register(self._remove)

    def _remove(self) -> None:
        """Takes the note away, if it is still that of this process."""
        with suppress(OSError, ValueError):
            if json.loads(read_regular(self._path, MAX_ENTRY_BYTES))["pid"] == os.getpid():
                self._path.unlink()

    def read(self) -> str | None:
        with suppress(FileNotFoundError):  # the note, or its process
            self._refuse_others()
            note = json.loads(read_regular(self._path, MAX_ENTRY_BYTES))
            if start_time(note["pid"]) == note["started"]:
                return str(note["ticket"])
        return None

    def _refuse_others(self) -> None:
        """What lies in a folder where only this user writes is this user's."""
        folder = self._path.parent
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise LaunchError(
                f"{folder} is not a folder for you alone: another user may have put it there. Type: ls -ld "
                f"{folder}; and remove it, or set TMPDIR to a folder of yours on all ranks."
            )


class StoreRegistry:
    """A store that all find by themselves.

    torchrun's outlives the ranks: when they are started again, the old ones' notes are there.

    So an address is believed only if somebody listens there. Whether torchrun makes a new store for the new ranks
    depends on its version and on how many nodes there were.
    """

    def __init__(self, store: dist.Store, host: str, port: int, key: str) -> None:
        self._store, self._host, self._port, self._key = store, host, port, f"hvd_trainer/{key}"

    def own_address(self) -> str:
        return outward_address(self._host, self._port)

    def post(self, ticket: str) -> None:
        self._store.set(self._key, ticket)

    def read(self) -> str | None:
        if not self._store.check([self._key]):
            return None
        ticket = self._store.get(self._key).decode()
        host, _, port = ticket.partition("/")[0].rpartition(":")
        with suppress(OSError, ValueError), socket.create_connection((host, int(port)), timeout=CONNECT_S):
            return ticket
        return None


def job_file(world: World, environ: Mapping[str, str], session: str) -> Path:
    """The path that all ranks of one job on this node come to by themselves, and those of no other job."""
    key = _hydra_key() if world.launcher == "mpiexec" else _key(world, environ)
    return private_file(f"{world.launcher}-{key}-{session}")


def private_file(name: str) -> Path:
    """The path of that name in this user's own folder on this node."""
    safe = "".join(c if c.isalnum() else "_" for c in name)
    return Path(tempfile.gettempdir()) / f"hvd_trainer-{os.getuid()}" / safe


def _key(world: World, environ: Mapping[str, str]) -> str:
    """What the launcher calls the job."""
    names = {
        "horovodrun": ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
        "mpirun": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        "srun": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        "torchrun": ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
    }[world.launcher]
    return "-".join(environ[name] for name in names if name in environ)


def _hydra_key() -> str:
    """Hydra numbers no jobs, but one proxy per job and node is the ancestor of all ranks there."""
    for ancestor in psutil.Process().parents():
        if "pmi_proxy" in ancestor.name():
            return f"{ancestor.pid}-{ancestor.create_time()}"
    raise LaunchError(
        "mpiexec set the rank variables, but its hydra_pmi_proxy is not among this process's ancestors, so the "
        "ranks cannot find each other. Pass an address: mpiexec -genv MASTER_ADDR HOST_OF_RANK_0 -genv "
        "MASTER_PORT 29500 ..."
    )
