"""Registries: where rank 0 publishes the endpoint of its store, and the other ranks look it up.

There is one for each way that a launcher offers: a file that only this user can read, on one node or if one is
given; else horovodrun's key-value server, torchrun's store, or a store at a given address, which
everyone can read. Each may still have the endpoint of an earlier job: whoever looks one up asks its server.
"""

from __future__ import annotations

import atexit
import os
import stat
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import torch.distributed as dist

from hvd_trainer.errors import LaunchError, first_line
from hvd_trainer.launch.launchers import find_launcher
from hvd_trainer.launch.world import World
from hvd_trainer.utils.files import read_regular

REQUEST_TIMEOUT_S = 30.0
MAX_ENTRY_BYTES = 1 << 12


class HttpRegistry:
    """An entry of horovodrun's key-value server: `PUT` and `GET /scope/key`.

    Raises:
        LaunchError: (all methods) the server does not answer.
    """

    def __init__(self, host: str, port: int, key: str) -> None:
        self._host, self._port = host, port
        self._url = f"http://{host}:{port}/hvd_trainer/{key}"
        # A proxy for the internet does not lead to other nodes.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def publish(self, endpoint: str) -> None:
        self._request(urllib.request.Request(self._url, data=endpoint.encode(), method="PUT"))

    def lookup(self) -> str | None:
        return self._request(urllib.request.Request(self._url))

    def _request(self, request: urllib.request.Request) -> str | None:
        try:
            with self._opener.open(request, timeout=REQUEST_TIMEOUT_S) as response:
                return str(response.read().decode())
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise
        except OSError as error:
            raise LaunchError(
                f"horovodrun's server at {self._host}:{self._port} does not answer ({first_line(error)}). If "
                f"horovodrun ended or HOROVOD_* variables are left from an earlier job, start the job again."
            ) from error


class FileRegistry:
    """A file that only this user can read; its folder is this user's alone, or one that the user has named."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def publish(self, endpoint: str) -> None:
        handle, temporary = tempfile.mkstemp(dir=self._path.parent)
        with os.fdopen(handle, "w") as file:
            file.write(endpoint)
        os.replace(temporary, self._path)
        atexit.register(self._remove, endpoint)

    def lookup(self) -> str | None:
        # NFS says from memory that a file does not exist, until its folder is opened.
        with suppress(FileNotFoundError), os.scandir(self._path.parent):
            return read_regular(self._path, MAX_ENTRY_BYTES).decode(errors="replace")
        return None

    def _remove(self, endpoint: str) -> None:
        """Delete the entry if it still has this process's endpoint."""
        with suppress(OSError, ValueError):
            if self.lookup() == endpoint:
                self._path.unlink()


class StoreRegistry:
    """An entry of a store that all ranks find by themselves, such as torchrun's, which may outlive the ranks."""

    def __init__(self, store: dist.Store, key: str) -> None:
        self._store, self._key = store, f"hvd_trainer/{key}"

    def publish(self, endpoint: str) -> None:
        self._store.set(self._key, endpoint)

    def lookup(self) -> str | None:
        return self._store.get(self._key).decode() if self._store.check([self._key]) else None


EndpointRegistry = HttpRegistry | FileRegistry | StoreRegistry
"""A place that all ranks of one job can see, with an endpoint; None as long as there is none."""


def job_file(world: World, environ: Mapping[str, str], session: str) -> Path | None:
    """Return the same path on all ranks of one job on this node, and another one for each other job.

    None if the launcher does not say which job it is.
    """
    key = _hydra_key() if world.launcher == "mpiexec" else _job_key(environ)
    return private_file(f"{world.launcher}-{key}-{session}") if key else None


def private_file(name: str) -> Path:
    """Return the path of a file in this user's own folder on this node, which is made unless it exists.

    Raises:
        LaunchError: it is not this user's alone.
    """
    folder = Path(tempfile.gettempdir()) / f"hvd_trainer-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(folder)
    return folder / "".join(c if c.isalnum() else "_" for c in name)


def _check_private(folder: Path) -> None:
    """Raise LaunchError unless this user alone can write to a folder, so that its files are this user's."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise LaunchError(
            f"{folder} is not a folder for you alone: another user may have put it there. Type: ls -ld "
            f"{folder}; and remove it, or set TMPDIR to a folder of yours on all ranks."
        )


def _job_key(environ: Mapping[str, str]) -> str:
    """Return the launcher's identification of the job."""
    launcher = find_launcher(environ)
    return "" if launcher is None else "-".join(environ[name] for name in launcher.job if name in environ)


def _hydra_key() -> str:
    """Return an identification of a Hydra job: its one proxy on this node, which is an ancestor of all ranks."""
    for ancestor in psutil.Process().parents():
        if "pmi_proxy" in ancestor.name():
            return f"{ancestor.pid}-{ancestor.create_time()}"
    raise LaunchError(
        "mpiexec set the rank variables, but its hydra_pmi_proxy is not among this process's ancestors, so the "
        "ranks cannot find each other. Pass an address: mpiexec -genv MASTER_ADDR HOST_OF_RANK_0 -genv "
        "MASTER_PORT 29500 ..."
    )
