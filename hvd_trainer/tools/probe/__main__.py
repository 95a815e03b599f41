"""Run a script under its own launcher, unchanged, and record its steps.

torchrun --nproc-per-node 2 -m hvd_trainer.tools.probe plain_ddp.py --epochs 1

A tool says by the environment variable of `ProbeOptions` where.
"""

from __future__ import annotations

import os
import sys

from hvd_trainer.tools.probe.execute import execute
from hvd_trainer.tools.probe.install import install_probe
from hvd_trainer.tools.probe.options import ProbeOptions


def main() -> None:
    """`python -m hvd_trainer.tools.probe [-m MODULE | SCRIPT] ARGUMENTS...`."""
    options = ProbeOptions.read(os.environ)
    assert options is not None, "a tool sets them"
    install_probe(options)
    execute(sys.argv[1:])


if __name__ == "__main__":
    main()
