"""Use Horovod without hvd_trainer, and kill one of four ranks, again and again.

Prints how each of the others ended: 0 if Horovod told it that the exchange had failed, and it could leave; else
the signal that ended it, SIGALRM if it was left waiting. They are forked once Horovod is imported, which takes
longest.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from contextlib import suppress

import horovod.torch as hvd
import torch
from horovod.runner.common.util.hosts import SlotInfo, get_host_assignments, parse_hosts
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousServer

RANKS, TENSORS = 4, 200
"""So many tensors that a rank is always between two of them."""
LIMIT_S, GLOO_LIMIT_S = 60, 300


def exchange(slot: SlotInfo, port: int, begun: int, *, waits: bool) -> None:
    """Exchange tensors until that fails, and wait for the results, or ask for further ones all the time."""
    os.environ |= create_slot_env_vars(slot)
    os.environ |= {name: str(value) for name, value in create_run_env_vars("127.0.0.1", ["lo"], port).items()}
    # As our backend has it, and each tensor by itself.
    os.environ |= {"HOROVOD_WAKE_ON_ENQUEUE": "1", "HOROVOD_CYCLE_TIME": "20", "HOROVOD_FUSION_THRESHOLD": "0"}
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(GLOO_LIMIT_S)
    torch.set_num_threads(1)
    hvd.init()
    os.write(begun, b"!")
    with suppress(hvd.HorovodInternalError):
        for i in itertools.count():
            if not waits:
                hvd.allreduce_async_(torch.ones(2), name=str(i), op=hvd.Sum)
                continue
            handles = [hvd.allreduce_async_(torch.ones(2), name=str(k), op=hvd.Sum) for k in range(TENSORS)]
            for handle in handles:
                while not hvd.poll(handle):
                    time.sleep(1e-4)
                hvd.synchronize(handle)
    hvd.shutdown()


def main(times: int) -> None:
    for repetition in range(times):
        server = RendezvousServer(0)
        slots = get_host_assignments(parse_hosts(f"localhost:{RANKS}"), RANKS)
        port = server.start()
        server.init(slots)
        reader, writer = os.pipe()
        ranks = []
        for slot in slots:
            pid = os.fork()
            if pid == 0:
                signal.alarm(LIMIT_S)
                try:
                    exchange(slot, port, writer, waits=repetition % 2 == 0)
                    os._exit(0)
                finally:
                    os._exit(1)
            ranks.append(pid)
        for _ in ranks:
            os.read(reader, 1)
        time.sleep(random.uniform(0, 0.3))
        os.kill(ranks.pop(random.randrange(RANKS)), signal.SIGKILL)
        print(*(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks), flush=True)
        server.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]))
