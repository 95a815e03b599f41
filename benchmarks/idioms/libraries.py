"""The libraries: their modules here, their packages, and the options that their documentation names for a row.

A way is what a note of the table says, and its module looks for the option's name in it.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from importlib.metadata import version

PLAIN = ""
"""The way in which the first example of a library's documentation does it."""
_UNUSED = (PLAIN, "`find_unused_parameters=True`")
_PERSISTENT = ("`persistent_workers=True`", PLAIN)
_AGAIN = (PLAIN, "wrapped again")


@dataclass(frozen=True)
class Library:
    """A column of the table.

    Attributes:
        module: by_NAME here.
        package: that is imported.
        distribution: whose version the table has.
        ways: by row, in the order in which they are tried; other rows have the plain one.
        lacks: rows for which the library has no place.
    """

    name: str
    module: str
    package: str
    distribution: str
    ways: dict[str, tuple[str, ...]] = field(default_factory=dict)
    lacks: frozenset[str] = frozenset()

    @property
    def is_here(self) -> bool:
        """Whether it is installed."""
        return importlib.util.find_spec(self.package) is not None

    @property
    def version(self) -> str:
        """Of the installed distribution."""
        return version(self.distribution)

    def ways_of(self, row: str) -> tuple[str, ...]:
        """Return in which ways a row is tried."""
        return self.ways.get(row, (PLAIN,))


_OURS = {
    "5c": (PLAIN, "`fit(weight=)`"),
    **dict.fromkeys(("6c", "6d"), (PLAIN, "`shards_by_rank = True`")),
}
LIBRARIES = (
    Library(
        "PyTorch DDP",
        "by_pytorch",
        "torch",
        "torch",
        {
            **dict.fromkeys(("1a", "1b", "3a", "3b"), _AGAIN),
            **dict.fromkeys(("2a", "2b"), _UNUSED),
            "4": (PLAIN, "`DDP(loss)`"),
            "9": (PLAIN, "the rest on all ranks, as in PyTorch's ImageNet example"),
            "11b": _PERSISTENT,
        },
        frozenset({"16"}),
    ),
    Library(
        "Lightning",
        "by_lightning",
        "pytorch_lightning",
        "pytorch-lightning",
        {
            **dict.fromkeys(("1a", "1b"), (PLAIN, "`BaseFinetuning`")),
            **dict.fromkeys(("2a", "2b", "3b"), _UNUSED),
            **dict.fromkeys(("9", "S2"), (PLAIN, "`log(sync_dist=True)`")),
            "11b": _PERSISTENT,
            "14": (PLAIN, "a new Trainer"),
            "S1": (PLAIN, '`interval="step"`'),
            "16": (PLAIN, "`OnExceptionCheckpoint`"),
        },
    ),
    Library(
        "Accelerate",
        "by_accelerate",
        "accelerate",
        "accelerate",
        {
            **dict.fromkeys(("1a", "1b", "3a", "3b"), (PLAIN, "prepared again")),
            **dict.fromkeys(("2a", "2b"), _UNUSED),
            "4": (PLAIN, "`prepare(loss)`"),
            **dict.fromkeys(("5a", "5c"), (PLAIN, "loss by items, as its page on accumulation shows")),
            **dict.fromkeys(("6c", "6d"), (PLAIN, "without `prepare(loader)`")),
            "11b": _PERSISTENT,
            "L2": (PLAIN, "`even_batches=False`"),
            "S1": (PLAIN, "`split_batches=True`"),
        },
        frozenset({"16"}),
    ),
    Library(
        "Ignite",
        "by_ignite",
        "ignite",
        "pytorch-ignite",
        {
            **dict.fromkeys(("1a", "1b", "3a", "3b"), _AGAIN),
            **dict.fromkeys(("2a", "2b"), _UNUSED),
            "4": (PLAIN, "`auto_model(loss)`"),
            "11b": _PERSISTENT,
        },
        frozenset({"16"}),
    ),
    Library("hvd_trainer, DDP", "by_ours", "hvd_trainer", "hvd_trainer", _OURS),
    Library("hvd_trainer, Horovod", "by_ours", "horovod", "horovod", _OURS),
)
BY_NAME = {library.name: library for library in LIBRARIES}
