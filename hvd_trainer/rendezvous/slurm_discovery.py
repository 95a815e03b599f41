"""A door: how ranks on several nodes find rank 0 where nothing but the name of their step is known to all.

From that name all ranks have worked out the same few ports. Rank 0 listens at the first that is free, and tells
everybody who comes its step's name and the ticket to its store; the others try all of them. By the name nobody
mistakes another step that came to the same port, or whatever program listens there, for its own:

    rank 0 of 7.0    listens at 20427
    rank 0 of 8.1    finds 20427 taken, listens at 23427
    rank 1 of 8.1    at 20427 hears "7.0 MUNGE:...", goes on; at 23427 hears "8.1 MUNGE:..."

What is told is in a letter by MUNGE, which Slurm itself trusts to tell its users apart: nobody but the same user,
on a host with the cluster's key, can open it, and it says who has sealed it. Without MUNGE it is told openly.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from hvd_trainer.errors import LaunchError
from hvd_trainer.rendezvous import munge
from hvd_trainer.utils.network import listen

ANSWER_S = 2.0
MAX_LINE_BYTES = 4096
CREDENTIAL_TTL_S = 60.0
"""For which one letter is handed out. It is valid for five minutes by the clocks of both hosts."""


class StepDiscovery:
    """The place where rank 0 of a step tells where its store is.

    Args:
        name: the step's, in one line.
        ports: where rank 0 may listen.
        hosts: where it may be, for those who look for it: nodes and their addresses.
    """

    def __init__(self, name: str, ports: Sequence[int], hosts: Mapping[str, str] | None = None) -> None:
        self._name, self._ports, self._hosts = f"hvd_trainer {name}", ports, hosts or {}

    def open(self, address: str, word: str) -> None:
        """Rank 0 tells a word from now on, as long as it lives: who comes late, or again, is welcome.

        Args:
            address: of this machine, where those who come have to knock.
            word: without blanks.

        Raises:
            LaunchError: all the ports are taken.
        """
        for own in self._ports:
            with suppress(OSError):
                listener = listen(address, own)
                threading.Thread(target=self._tell, args=(listener, word), name="door", daemon=True).start()
                return
        raise LaunchError(
            f"The ports {', '.join(map(str, self._ports))} of this machine are in use, and the other ranks look "
            f"for rank 0 nowhere else. Type before srun: export MASTER_ADDR=HOST_OF_RANK_0 MASTER_PORT=29500"
        )

    def _tell(self, listener: socket.socket, word: str) -> None:
        letter, until = "", 0.0
        while True:
            with suppress(OSError), listener.accept()[0] as line:
                if time.monotonic() > until:
                    letter, until = munge.encode(word), time.monotonic() + CREDENTIAL_TTL_S
                # Nobody has to be waited for: so much fits into what the system keeps for a connection.
                line.setblocking(False)
                line.sendall(f"{self._name} {letter}\n".encode())

    def answers(self) -> Iterator[tuple[str, str, str]]:
        """What is told at this step's doors by this user: node, address and word of each.

        Raises:
            LaunchError: it cannot be read here.
        """
        for node, host in self._hosts.items():
            for port in self._ports:
                with suppress(OSError), socket.create_connection((host, port), timeout=ANSWER_S) as line:
                    match = re.fullmatch(rf"{re.escape(self._name)} (\S+)\n", _heard(line))
                    word = munge.decode(match[1]) if match else None
                    if word is not None:
                        yield node, str(line.getpeername()[0]), word


def _heard(line: socket.socket) -> str:
    """The first line that the other side says in time, which may be no rank, and say anything, slowly.

    Raises:
        TimeoutError: it has not come to the line's end.
    """
    said, end = b"", time.monotonic() + ANSWER_S
    while not said.endswith(b"\n") and len(said) < MAX_LINE_BYTES:
        line.settimeout(max(0.001, end - time.monotonic()))
        if not (more := line.recv(MAX_LINE_BYTES)):
            break
        said += more
    return said.decode(errors="replace")
