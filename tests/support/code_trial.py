"""A trial that is put together from functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hvd_trainer.measure.start import Start


class CodeTrial(NamedTuple):
    """A `Trial` of the runner, such as one that executes Python code."""

    label: str
    identity: Mapping[str, Any]
    start: Callable[[Path], Start]
    read: Callable[[Path], Mapping[str, Any] | None]
