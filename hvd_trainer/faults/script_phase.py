"""Which phase a rank is in that does not say so, by the folder of the code that it runs."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from types import FrameType

from hvd_trainer.faults.activity import EXCHANGE

PHASES = {
    "/torch/distributed/": EXCHANGE,
    "/horovod/": EXCHANGE,
    "/hvd_trainer/hvd/": EXCHANGE,
    # DDP waits for the other ranks at the end of backward, in C++.
    "/torch/autograd/": EXCHANGE,
    "/torch/utils/data/": "data",
    "/torch/optim/": "step",
    "/torch/nn/": "forward",
}
"""Elsewhere it runs the user's code."""
USERS_CODE = "callback"


def raised_in_exchange(error: BaseException) -> bool:
    """Return whether an exception may be the consequence of another rank's failure, by its traceback."""
    return phase_of(frame for frame, _ in traceback.walk_tb(error.__traceback__)) == EXCHANGE


def phase_of(frames: Iterable[FrameType]) -> str:
    """Return the phase by the innermost frame, the last one, whose code's folder tells."""
    phase = USERS_CODE
    for frame in frames:
        file = frame.f_code.co_filename
        phase = next((phase for folder, phase in PHASES.items() if folder in file), phase)
    return phase
