"""Let Horovod's exchanges fail on stand-ins for a GPU and NCCL (gpu_stand_in/), and print the answers.

python gpu_failures_job.py KERNELS EXCHANGE_LIBRARY: what kernels do, as in device.cc, which is preloaded.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)  # for EXCHANGE_LIBRARY, which calls Horovod's C++

import horovod.torch as hvd  # noqa: E402

TENSORS, LIMIT_S = 3, 60
WAIT_FOR_ANOTHER_RANK = 1


def main(kernels: int, library: str) -> None:
    signal.alarm(LIMIT_S)
    device, exchange = ctypes.CDLL(None), ctypes.CDLL(library)
    hvd.init()
    device.let_kernels(kernels)
    for number in range(TENSORS):
        exchange.hand_in(number)
    if kernels == WAIT_FOR_ANOTHER_RANK:
        while device.count_exchanges() < TENSORS:
            time.sleep(0.01)
        hvd.shutdown()
    for number in range(TENSORS):
        answer = ctypes.create_string_buffer(500)
        while not answer.value:
            time.sleep(0.01)
            exchange.answer_to(number, answer, ctypes.c_size_t(len(answer)))
        print(answer.value.decode())
    hvd.shutdown()
    print(device.count_questions_too_late(), "questions to a communicator that was gone")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
