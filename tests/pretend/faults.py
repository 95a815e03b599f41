"""Faults to put into the product, one at a time: each must make the rule fail that is named with it.

They stand in faults.diff: a line with what is wrong, the rule, and the file of the package; then the lines that
are taken out and put in. A fault is put into the source of a module when a rank imports it; no file is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[2] / "hvd_trainer"
TABLE = Path(__file__).with_suffix(".diff")


class Fault(NamedTuple):
    """One mistake: the text `old` stands in the file once, and `new` takes its place."""

    what: str
    rule: str
    file: str
    old: str
    new: str

    @property
    def module(self) -> str:
        return f"hvd_trainer.{self.file.removesuffix('.py').replace('/', '.')}"

    def put_into(self, source: str) -> str:
        """Return a module's source with the mistake."""
        assert source.count(self.old) == 1, (
            f"{self.file}: {self.old!r} stands there {source.count(self.old)} times"
        )
        return source.replace(self.old, self.new)


def _read() -> Iterator[Fault]:
    for block in TABLE.read_text().split("@@ ")[1:]:
        head, *lines = block.splitlines()
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] != sign) for sign in "+-")
        yield Fault(*head.split(" | "), old, new)


FAULTS = {fault.what: fault for fault in _read()}
