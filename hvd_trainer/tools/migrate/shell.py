"""Rewrite the commands of shell scripts and READMEs: `horovodrun -np 4 python train.py` by torchrun."""

from __future__ import annotations

import re

GAP = r"(?:[ \t]|\\\n)+"
COMMAND = re.compile(
    rf"horovodrun(?P<options>(?:{GAP}(?:(?:-np|--num-proc|-H|--hosts)(?:=|{GAP})\S+|--gloo|--mpi|--verbose))*)"
    rf"{GAP}(?:\S*/)?python3?{GAP}(?P<program>[^-\s]|-m\b)"
)


def migrate_commands(text: str) -> tuple[str, list[int]]:
    """Return a file with its commands by torchrun, and the lines of those that are left."""

    def replace(command: re.Match[str]) -> str:
        options = re.sub(r"\\\n|=", " ", command["options"]).split()
        given = dict(zip(options, [*options[1:], ""], strict=True))
        size = given.get("-np") or given.get("--num-proc")
        hosts = given.get("-H") or given.get("--hosts") or "localhost"
        if size is None or not all(it.split(":")[0] == "localhost" for it in hosts.split(",")):
            return command[0]
        return f"torchrun --nproc-per-node {size} {command['program']}"

    after = COMMAND.sub(replace, text)
    left = [number for number, line in enumerate(text.splitlines(), 1) if re.search(r"\bhorovodrun\s+-", line)]
    kept = [line for line in after.splitlines() if re.search(r"\bhorovodrun\s+-", line)]
    lines = text.splitlines()
    return after, [number for number in left if lines[number - 1] in kept]
