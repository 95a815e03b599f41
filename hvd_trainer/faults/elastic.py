"""horovodrun's elastic mode: ranks come and go while the others train.

horovodrun asks a script for the hosts once a second, and keeps a host that had a failing rank out from then on. It
starts and ends processes; what they do about it is their own business:

    hosts came or went      it tells rank 0; all ranks agree, keep their state, and leave the world together
    a rank failed           the exchange with it breaks; the others leave the world by themselves
    then, each process      asks horovodrun for its place in the next world, and is answered when all have asked

With this project's `install-horovod`, no message of it is unpickled.
"""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import MutableMapping
from contextlib import closing
from typing import Any

from hvd_trainer.errors import LaunchError, first_line
from hvd_trainer.launch.world import World, detect, set_world

ADDRESS, PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
ANSWER = ("rank", "size", "local_rank", "local_size")
"""How horovodrun's answer begins."""


class RescaleError(Exception):
    """All ranks have agreed to leave this world for the next one."""


class DismissedError(SystemExit):
    """horovodrun has no place for this process any more: its host is gone, or has fewer slots."""


class HorovodElasticDriver:
    """horovodrun, as one of its elastic ranks sees it.

    Args:
        environ: the environment, which is changed when the world is.

    Attributes:
        hosts_changed: set when hosts have come or gone since the last `next_world`; on rank 0 only.
        past_worlds: how many this process has been in before this one.

    Raises:
        LaunchError: horovodrun does not say where it is.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._environ = environ
        missing = [name for name in (ADDRESS, PORT) if not environ.get(name)]
        if missing:
            raise LaunchError(
                f"HOROVOD_ELASTIC=1 is for ranks of horovodrun's elastic mode, which sets {' and '.join(missing)} "
                f"too, and here {'that is' if len(missing) == 1 else 'these are'} not set. Type: unset "
                f"HOROVOD_ELASTIC, or start all ranks by: horovodrun --host-discovery-script SCRIPT ..."
            )
        self._host, self._port = environ[ADDRESS], environ[PORT]
        self.hosts_changed = threading.Event()
        self.past_worlds = 0
        self._listens = False

    def listen(self) -> None:
        """Lets horovodrun tell this process about hosts; it tells the one that is rank 0.

        Raises:
            LaunchError: horovodrun has ended.
        """
        if self._listens:
            return
        from horovod.runner.elastic.worker import WorkerNotificationManager

        world = detect(self._environ)
        manager = WorkerNotificationManager()
        manager.register_listener(self)
        card = self._environ.get("HOROVOD_GLOO_IFACE")
        try:
            manager.init(self._host, int(self._port), card, world.host, world.local_rank)
        except (OSError, RuntimeError) as error:
            raise LaunchError(
                f"horovodrun at {self._host}:{self._port} does not answer: {first_line(error)}. See what it "
                f"printed: it may have ended; then start the job anew"
            ) from error
        self._listens = True

    def on_hosts_updated(self, timestamp: int, what: Any) -> None:
        """Horovod calls it, in a thread of its own."""
        self.hosts_changed.set()

    def next_world(self) -> World:
        """Asks for this process's place in the next world; returns when all others have asked too, or ended.

        Raises:
            DismissedError: it has none.
            LaunchError: horovodrun has ended, or cannot make a world of what hosts there are.
        """
        world = detect(self._environ)
        self.hosts_changed.clear()  # before it answers: what changes meanwhile must not be missed
        answer = self._ask(f"/rank_and_size/{world.host}:{world.local_rank}")
        found = dict(zip(ANSWER, map(int, answer.split(",")), strict=False))
        if found["rank"] < 0:
            raise DismissedError(0)
        set_world(self._environ, **found)
        self.past_worlds += 1
        return detect(self._environ)

    def _ask(self, path: str) -> str:
        try:
            with closing(http.client.HTTPConnection(self._host, int(self._port))) as connection:
                connection.connect()
                # The answer may take as long as a host takes to come; but horovodrun's machine may go meanwhile.
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
                    if hasattr(socket, name):
                        connection.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
                connection.request("GET", path)
                response = connection.getresponse()
                answer = response.read().decode()
        except (OSError, http.client.HTTPException) as error:
            raise LaunchError(
                f"horovodrun at {self._host}:{self._port} has no place for this process: {first_line(error)}. See "
                f"what it printed: it may have ended, or found no hosts in time (horovodrun --elastic-timeout)"
            ) from error
        if response.status != http.HTTPStatus.OK:
            raise LaunchError(f"horovodrun does not know {path}: it was not started in its elastic mode.")
        return answer
