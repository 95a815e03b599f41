"""A door: how ranks on several nodes find rank 0 where nothing but the name of their step is known to all.

From that name all ranks have worked out the same few ports. Rank 0 listens at the first that is free, and tells
everybody who comes its step's name and the port of its store; the others try all of them. By the name nobody
mistakes another step that came to the same port, or whatever program listens there, for its own:

    rank 0 of 7.0    listens at 20427
    rank 0 of 8.1    finds 20427 taken, listens at 23427
    rank 1 of 8.1    at 20427 hears "7.0 40123", goes on; at 23427 hears "8.1 40777"
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

from hvd_trainer.errors import LaunchError

ANSWER_S = 2.0
LONGEST_LINE = 200
QUEUE = 4096
"""Ranks that may come at the same moment; Linux takes as many as it is set to."""


class Door:
    """The place where rank 0 of a step tells the port of its store.

    Args:
        name: the step's, in one line.
        ports: where rank 0 may listen.
        hosts: where it may be, for those who look for it.
    """

    def __init__(self, name: str, ports: Sequence[int], hosts: Sequence[str] = ()) -> None:
        self._name, self._ports, self._hosts = f"hvd_trainer {name}", ports, hosts

    def open(self, port: int) -> None:
        """Rank 0 tells its port from now on, as long as it lives: who comes late, or again, is welcome.

        Raises:
            LaunchError: all the ports are taken.
        """
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        for own in self._ports:
            with suppress(OSError):
                listener = socket.create_server(("", own), family=family, dualstack_ipv6=both, backlog=QUEUE)
                threading.Thread(target=self._tell, args=(listener, port), name="door", daemon=True).start()
                return
        raise LaunchError(
            f"The ports {', '.join(map(str, self._ports))} of this machine are in use, and the other ranks look "
            f"for rank 0 nowhere else. Type before srun: export MASTER_ADDR=HOST_OF_RANK_0 MASTER_PORT=29500"
        )

    def _tell(self, listener: socket.socket, port: int) -> None:
        while True:
            with suppress(OSError), listener.accept()[0] as line:
                line.sendall(f"{self._name} {port}\n".encode())

    def read(self) -> str | None:
        """The address of rank 0's store; None if nobody of its step answers yet."""
        for host in self._hosts:
            for port in self._ports:
                with suppress(OSError), socket.create_connection((host, port), timeout=ANSWER_S) as line:
                    match = re.fullmatch(rf"{re.escape(self._name)} ([0-9]{{1,5}})\n", _heard(line))
                    if match is not None:
                        return f"{host}:{match[1]}"
        return None


def _heard(line: socket.socket) -> str:
    """The first line that the other side says, which may be no rank, and say anything."""
    with line.makefile("rb") as said:
        return said.readline(LONGEST_LINE).decode(errors="replace")
