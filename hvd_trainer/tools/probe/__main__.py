"""Run a script under its own launcher, unchanged, and record its steps.

torchrun --nproc-per-node 2 -m hvd_trainer.tools.probe LOG_DIR plain_ddp.py --epochs 1
"""

from __future__ import annotations

import sys

from hvd_trainer.tools.probe.execute import execute
from hvd_trainer.tools.probe.install import install_probe
from hvd_trainer.tools.probe.options import ProbeOptions


def main() -> None:
    """`python -m hvd_trainer.tools.probe LOG_DIR [-m MODULE | SCRIPT] ARGUMENTS...`."""
    log, *script = sys.argv[1:]
    install_probe(ProbeOptions(log_dir=log))
    execute(script)


if __name__ == "__main__":
    main()
