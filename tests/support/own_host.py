"""Give each rank a host name of its own, so that several can share a GPU, and exchange over loopback.

NCCL refuses two ranks on one GPU where their hosts have one name, and so do we. A rank's name is that of a UTS
namespace; where nobody may make one, NCCL and Python are told another. Processes of tests begin with `enter`.
"""

from __future__ import annotations

import ctypes
import os
import socket

WANTED = "HVD_TRAINER_TEST_OWN_HOSTS"
VARIABLES = {WANTED: "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0"}
CLONE_NEWUTS = 0x04000000


def enter() -> None:
    """Make this process the only rank of its host, where that is wanted; do nothing in one that is no rank."""
    if not {WANTED, "RANK"} <= os.environ.keys():
        return
    name = f"n{os.environ['RANK']}"
    os.environ.update(NCCL_HOSTID=name, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    if ctypes.CDLL(None).unshare(CLONE_NEWUTS) == 0:
        socket.sethostname(name)
    else:
        socket.gethostname = lambda: name
