"""One change to Horovod's source: an exact text, found exactly once, becomes another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hvd_trainer.errors import UserError


class PatchError(UserError):
    """Horovod's source is not the one that the changes were written for."""


@dataclass(frozen=True)
class Replacement:
    """`old` becomes `new` in one file; `old` must be there exactly once."""

    path: str
    old: str
    new: str
    reason: str

    def apply(self, source: Path) -> None:
        file = source / self.path
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        if (found := text.count(self.old)) != 1:
            raise PatchError(
                f"cannot change {self.path} of Horovod's source ({self.reason}):\n"
                f"  the text to replace was found {found} times instead of once: {self.old!r}\n"
                "  This tool builds Horovod 0.28.1 from its published source package only."
            )
        file.write_text(text.replace(self.old, self.new), encoding="utf-8")
