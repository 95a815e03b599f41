"""The errors a user can cause. Each says what was asked, what was found, and what to type."""

from __future__ import annotations

import re


class UserError(Exception):
    """A mistake in the set-up or the options; shown without a traceback by the jobs (exit code 2)."""


class OptionError(UserError):
    """The options contradict each other or the engine: the same on all ranks, so rank 0 alone says it."""


class LaunchError(UserError):
    """The launcher's variables are incomplete or contradict each other or the engine."""


class BackendError(UserError):
    """The engine that was asked for is missing, or cannot do what was asked of it."""


class DataError(UserError):
    """The data set is not there, not whole, or not what it should be."""


class CheckpointError(UserError):
    """A checkpoint cannot be written, or is not one that can be trusted."""


class NonFiniteError(UserError):
    """A loss or a gradient became infinite or not a number."""


class ReplicasDifferError(UserError):
    """The ranks no longer train copies of one model."""


class PreemptedError(UserError):
    """The job was asked to stop by a signal: it has saved, and resumes with --resume auto."""


class PeerError(UserError):
    """This rank stopped only because another one failed or ended, which has the real reason to tell."""


TOKEN = re.compile(r"/[0-9a-f]{32}(?=/)")
"""At the begin of a key in the job's store, which PyTorch's errors name."""


def first_line(error: BaseException) -> str:
    """Return an error's text in one line, without a full stop and a job's token; its type where it has no text."""
    said = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return TOKEN.sub("", said)
