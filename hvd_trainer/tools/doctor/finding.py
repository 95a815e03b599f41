"""Define a finding: one line of the report, and what to type about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hvd_trainer.utils.text import COMMAND

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """The result of one check: its subject, its status, and what was found."""

    name: str
    status: Status
    found: str
    remedy: str = ""
    """what to type; empty if the status is ok"""
    figures: Mapping[str, float] = field(default_factory=dict)
    """measurements, for scripts"""


def ok(name: str, found: str, **figures: float) -> Finding:
    """Build a finding that needs no action."""
    return Finding(name, "ok", found, figures=figures)


def warning(name: str, found: str, remedy: str, **figures: float) -> Finding:
    """Build a finding with which training works, but slowly or not in all cases."""
    return Finding(name, "warning", found, remedy, figures)


def error(name: str, found: str, remedy: str, **figures: float) -> Finding:
    """Build a finding with which training, or a part of it that was requested, fails."""
    return Finding(name, "error", found, remedy, figures)


def no_answer(name: str, limit_s: float) -> Finding:
    """Build the error of a check that had no answer in `limit_s` seconds."""
    remedy = f"{COMMAND} doctor --timeout-s {max(60, round(5 * limit_s))}    (if this machine is slow)"
    return error(name, f"no answer in {limit_s:g} s", remedy)


def size(number: float) -> str:
    """Format a number of bytes: `64 MB`, `7.9 GB`."""
    megabytes = number / 2**20
    return f"{megabytes:.0f} MB" if megabytes < 1000 else f"{megabytes / 1024:,.1f} GB"
