"""`python -m hvd_trainer <command>`."""

import sys

from hvd_trainer.cli import main

if __name__ == "__main__":
    sys.exit(main())
