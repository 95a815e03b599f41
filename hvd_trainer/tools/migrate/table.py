"""The table of rules, rules.yaml, and what its rows say."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One row: calls of Horovod, and what they become."""

    names: str
    """of the calls, apart by blanks"""
    result: str = "{x}"
    """the expression that stands for the call; of a `special` rule in words"""
    why: str
    test: str
    """a case of tests/support/migrate_cases.py, which fails without this row"""
    lines: tuple[str, ...] = ()
    """statements before the one with the call"""
    signature: str = ""
    """names of the arguments, in their order"""
    special: bool = False
    """whether it takes more than a template"""
    shows: str = ""
    """what differs first, in the words of `parity`, where this rule changes numbers"""


class Table(msgspec.Struct, frozen=True):
    """The file."""

    rules: list[Rule]
    by_hand: dict[str, str]
    """what has no counterpart, by the first part of its name, and what to do instead"""
    hooks: dict[str, str]
    """functions for register_comm_hook"""


TABLE = msgspec.yaml.decode(Path(__file__).with_name("rules.yaml").read_bytes(), type=Table)
BY_NAME = {name: rule for rule in TABLE.rules for name in rule.names.split()}
OTHERWISE = "write it with torch.distributed"
NOT_PLAIN = "its place, its arguments or the use of its gradient are more than a rule can follow: "
