"""`python tests/gpu`: needs PyTorch and this package, installed or not."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent

if __name__ == "__main__":
    # Instead of this folder, whose modules are those of the package `gpu`.
    sys.path[:1] = [str(TESTS), str(TESTS / "support"), str(TESTS.parent)]
    from gpu.run import main

    sys.exit(main(sys.argv[1:]))
