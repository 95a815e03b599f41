"""A finding: one line of what `doctor` says, and what to type about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hvd_trainer.utils.text import COMMAND

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it is, and what was found."""

    name: str
    status: Status
    found: str
    remedy: str = ""
    """what to type; empty if all is well"""
    figures: Mapping[str, float] = field(default_factory=dict)
    """what was measured, for scripts"""


def ok(name: str, found: str, **figures: float) -> Finding:
    """Nothing to do."""
    return Finding(name, "ok", found, figures=figures)


def warning(name: str, found: str, remedy: str, **figures: float) -> Finding:
    """Training works, but something about it will be slow, or fail in some cases."""
    return Finding(name, "warning", found, remedy, figures)


def error(name: str, found: str, remedy: str, **figures: float) -> Finding:
    """Training, or a part of it that was asked for, fails."""
    return Finding(name, "error", found, remedy, figures)


def late(name: str, limit_s: float) -> Finding:
    """What it was asked of has not answered."""
    remedy = f"{COMMAND} doctor --timeout-s {max(60, round(5 * limit_s))}    (if this machine is slow)"
    return error(name, f"no answer in {limit_s:g} s", remedy)


def count(number: int, word: str) -> str:
    """`1 GPU`, `2 GPUs`."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def size(number: float) -> str:
    """Of so many bytes: `64 MB`, `7.9 GB`."""
    megabytes = number / 2**20
    return f"{megabytes:.0f} MB" if megabytes < 1000 else f"{megabytes / 1024:,.1f} GB"
