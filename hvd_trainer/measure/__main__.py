"""Run a script on its own engine, unchanged, under its own launcher, and measure it.

torchrun --nproc-per-node 2 -m hvd_trainer.measure plain_ddp.py --epochs 1

A tool says by the environment variable of `Message` what to record.
"""

from __future__ import annotations

import os
import sys

from hvd_trainer.measure.message import Message
from hvd_trainer.measure.script import measure_script
from hvd_trainer.utils.execute import execute


def main() -> None:
    """`python -m hvd_trainer.measure [-m MODULE | SCRIPT] ARGUMENTS...`."""
    message = Message.read(os.environ)
    assert message is not None, "a tool sets it"
    measure_script(message)
    execute(sys.argv[1:])


if __name__ == "__main__":
    main()
