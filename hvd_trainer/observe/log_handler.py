"""Print the records of the logger `hvd_trainer`, where nothing else has been set up to handle them."""

from __future__ import annotations

import logging
import os
import sys

from hvd_trainer.launch.world import may_be_first

LOGGER = "hvd_trainer"


class RankHandler(logging.Handler):
    """Print rank 0's information to stdout, and warnings and errors of every rank to stderr.

    A record is one write of its bare message, so that lines of several ranks do not mix. The rank is looked up at
    each record: in Horovod's elastic mode another process may become rank 0.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        try:
            if record.levelno >= logging.WARNING:
                stream = sys.stderr
            elif may_be_first(os.environ):
                stream = sys.stdout
            else:
                return
            stream.write(f"{self.format(record)}\n")
            stream.flush()
        except BrokenPipeError:
            pass  # what has read the output has ended, as `head` does, and the training continues
        except Exception:
            self.handleError(record)


def install_handler() -> None:
    """Let the logger `hvd_trainer` print, unless the program has given it, or the root logger, a handler."""
    logger = logging.getLogger(LOGGER)
    if not logger.hasHandlers():
        logger.addHandler(RankHandler())
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
