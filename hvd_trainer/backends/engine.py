"""The interface by which a `Session` starts and stops an engine: the Trainer's, `hvd`, or a script's own."""

from __future__ import annotations


class Engine:
    """An engine, as its session sees it. This one does nothing: for a session without an engine.

    Attributes:
        pins_device: whether the rank's device becomes the current one before the start. Not for `hvd.init`: it
            would make a context on a GPU before the script has chosen its own.
        keeps_timeouts: as in `Session.prepare_nccl`.
    """

    pins_device = True
    keeps_timeouts = False

    @property
    def uses_nccl(self) -> bool:
        """Whether it moves GPU tensors by NCCL or Intel's XCCL, which want one rank per GPU, from its start on."""
        return False

    def start(self) -> None:
        """Start among the ranks that have met, and are monitored."""

    def stop(self, wait: bool) -> None:
        """Stop; again, or before a start, do nothing.

        Args:
            wait: for the other ranks; not after an error.
        """

    def abort_collectives(self) -> None:
        """Give up what is exchanged with a rank that is gone; called by another thread."""
