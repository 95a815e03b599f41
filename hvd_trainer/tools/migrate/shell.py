"""Rewrite the commands of shell scripts and READMEs: `horovodrun -np 4 python train.py` by torchrun."""

from __future__ import annotations

import re

GAP = r"(?:[ \t]|\\\n)+"
COMMAND = re.compile(
    rf"horovodrun(?:{GAP}(?:(?:-H|--hosts)(?:=|{GAP})localhost:\d+|--gloo|--mpi|--verbose))*"
    rf"{GAP}(?:-np|--num-proc)(?:=|{GAP})(?P<size>\S+)"
    rf"(?:{GAP}(?:(?:-H|--hosts)(?:=|{GAP})localhost:\d+|--gloo|--mpi|--verbose))*"
    rf"{GAP}(?:\S*/)?python3?{GAP}(?P<program>[^-\s]|-m\b)"
)


def migrate_commands(text: str) -> tuple[str, list[int]]:
    """Return a file with its commands by torchrun, and the lines of those that are left."""
    after = COMMAND.sub(r"torchrun --nproc-per-node \g<size> \g<program>", text)
    left = [line for line in after.splitlines() if re.search(r"\bhorovodrun\s+-", line)]
    return after, [number for number, line in enumerate(text.splitlines(), 1) if line in left]
