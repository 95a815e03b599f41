"""horovodrun's elastic mode: ranks come and go while the others train.

horovodrun asks a script for the hosts once per second, and excludes a host for good once a rank failed there. It
starts and ends processes; the rest is done by the ranks:

    hosts came or went      horovodrun notifies rank 0; all ranks agree on a step, keep their state and disconnect
    a rank failed           the collective with it breaks; each of the others disconnects on its own
    then, each process      requests its place in the next world; horovodrun answers when all have asked

With the Horovod that `install-horovod` builds, no message of horovodrun is unpickled.
"""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable, MutableMapping
from contextlib import closing

from hvd_trainer.errors import LaunchError, first_line
from hvd_trainer.launch.world import World, detect, set_world

ADDRESS, PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
ANSWER_FIELDS = ("rank", "size", "local_rank", "local_size")
"""The first numbers of horovodrun's answer."""


class RescaleError(Exception):
    """All ranks have agreed to leave this world for the next one."""


class DismissedError(SystemExit):
    """horovodrun has no place for this process any more: its host is gone, or has fewer slots."""


class HorovodElasticDriver:
    """A client of horovodrun in its elastic mode, for one of its ranks.

    Attributes:
        hosts_changed: set when hosts have come or gone since the last `next_world`; on rank 0 only.
        listeners: called with the same news, by a thread of Horovod's: a time stamp, and 1 for hosts that have
            gone, 2 for such that have come, 3 for both.
        past_worlds: how many worlds this process has been in before this one.

    Raises:
        LaunchError: horovodrun's address is not in the environment.
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
        self.listeners: set[Callable[[int, int], object]] = set()
        self.past_worlds = 0
        self._is_listening = False

    def listen(self) -> None:
        """Subscribe to horovodrun's messages about hosts, which it sends to rank 0.

        Raises:
            LaunchError: horovodrun has ended.
        """
        if self._is_listening:
            return
        from horovod.runner.elastic.worker import WorkerNotificationManager

        world = detect(self._environ)
        manager = WorkerNotificationManager()
        manager.register_listener(self)
        interface = self._environ.get("HOROVOD_GLOO_IFACE")
        try:
            manager.init(self._host, int(self._port), interface, world.host, world.local_rank)
        except (OSError, RuntimeError) as error:
            raise LaunchError(
                f"horovodrun at {self._host}:{self._port} does not answer: {first_line(error)}. See what it "
                f"printed: it may have ended; then start the job again"
            ) from error
        self._is_listening = True

    def on_hosts_updated(self, timestamp: int, update: int) -> None:
        """Note that hosts have changed; Horovod calls it in a thread of its own."""
        self.hosts_changed.set()
        for listener in list(self.listeners):
            listener(timestamp, update)

    def next_world(self) -> World:
        """Request this process's place in the next world; return when all processes have asked, or ended.

        Raises:
            DismissedError: it has none.
            LaunchError: horovodrun has ended, or has too few hosts for a world.
        """
        world = detect(self._environ)
        self.hosts_changed.clear()  # before the answer, so that a change after it is not missed
        answer = self._get(f"/rank_and_size/{world.host}:{world.local_rank}")
        place = dict(zip(ANSWER_FIELDS, map(int, answer.split(",")), strict=False))
        if place["rank"] < 0:
            raise DismissedError(0)
        set_world(self._environ, **place)
        self.past_worlds += 1
        return detect(self._environ)

    def _get(self, path: str) -> str:
        try:
            with closing(http.client.HTTPConnection(self._host, int(self._port))) as connection:
                connection.connect()
                # There is no time limit, since the answer may wait for a new host; keep-alive probes notice if
                # horovodrun's machine is gone.
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
                connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
                connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
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
