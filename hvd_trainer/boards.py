"""Boards: where rank 0 pins the address of the store, and the other ranks read it.

One per way that a launcher leaves open: horovodrun's key-value server, or a file where all ranks are on one node.
"""

from __future__ import annotations

import json
import os
import socket
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
from hvd_trainer.launch import World
from hvd_trainer.network import LOOPBACK, outward_address

CONNECT_S = 5.0


class Board(Protocol):
    """A place that all ranks of one job can see."""

    def own_address(self) -> str:
        """An address of this machine that the others can reach."""

    def post(self, address: str) -> None:
        """Pins the address."""

    def read(self) -> str | None:
        """The address, or None while there is none."""


class HttpBoard:
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

    def post(self, address: str) -> None:
        self._ask(urllib.request.Request(self._url, data=address.encode(), method="PUT"))

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


class FileBoard:
    """A file that only this user can read, for ranks on one node.

    It names the process that wrote it, so that what a killed job left behind is not believed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def own_address(self) -> str:
        return LOOPBACK

    def post(self, address: str) -> None:
        note = {"address": address, "pid": os.getpid(), "started": psutil.Process().create_time()}
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._path.parent.stat().st_uid != os.getuid():
            raise LaunchError(f"{self._path.parent} belongs to another user; set TMPDIR to a folder of yours.")
        handle, temporary = tempfile.mkstemp(dir=self._path.parent)
        with os.fdopen(handle, "w") as file:
            json.dump(note, file)
        os.replace(temporary, self._path)

    def read(self) -> str | None:
        with suppress(FileNotFoundError, psutil.NoSuchProcess):
            note = json.loads(self._path.read_text())
            if self._path.stat().st_uid == os.getuid():
                process = psutil.Process(note["pid"])
                if process.create_time() == note["started"]:
                    return str(note["address"])
        return None


class StoreBoard:
    """torchrun's own store, which outlives the ranks: when they are started again, the old ones' notes are there.

    So an address is believed only if somebody listens there. Whether torchrun makes a new store for the new ranks
    depends on its version and on how many nodes there were.
    """

    def __init__(self, store: dist.Store, host: str, port: int, key: str) -> None:
        self._store, self._host, self._port, self._key = store, host, port, f"hvd_trainer/{key}"

    def own_address(self) -> str:
        return outward_address(self._host, self._port)

    def post(self, address: str) -> None:
        self._store.set(self._key, address)

    def read(self) -> str | None:
        if not self._store.check([self._key]):
            return None
        address = self._store.get(self._key).decode()
        host, _, port = address.rpartition(":")
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=CONNECT_S):
            return address
        return None


def job_file(world: World, environ: Mapping[str, str], session: str) -> Path:
    """The path that all ranks of one job on this node come to by themselves, and those of no other job."""
    key = _hydra_key() if world.launcher == "mpiexec" else _scheduler_key(world, environ)
    safe = "".join(c if c.isalnum() else "_" for c in f"{world.launcher}-{key}-{session}")
    return Path(tempfile.gettempdir()) / f"hvd_trainer-{os.getuid()}" / safe


def _scheduler_key(world: World, environ: Mapping[str, str]) -> str:
    names = {
        "mpirun": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        "srun": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
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
