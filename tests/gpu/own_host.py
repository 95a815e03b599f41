"""`python own_host.py NAME SCRIPT ...`, or `NAME -m MODULE ...`: Python in which this host is called NAME.

NCCL refuses two ranks on one GPU where their hosts have one name, and so do we. In a UTS namespace of its own a
rank's host has another name; where nobody may make one, NCCL and Python are told another. Two ranks then share a
GPU, and exchange over the loopback interface.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import socket
import sys
from pathlib import Path

CLONE_NEWUTS = 0x04000000


def main() -> None:
    name, *argv = sys.argv[1:]
    os.environ["NCCL_HOSTID"] = name
    if ctypes.CDLL(None).unshare(CLONE_NEWUTS) == 0:
        socket.sethostname(name)
        os.execv(sys.executable, [sys.executable, *argv])
    socket.gethostname = lambda: name
    module = argv[0] == "-m"
    sys.argv = argv[1:] if module else argv
    sys.path[0] = os.getcwd() if module else str(Path(argv[0]).resolve().parent)
    if module:
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
