"""The table of rules, rules.yaml, and what its rows say."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One row, whose fields rules.yaml explains: calls of Horovod, and what they become."""

    names: str
    why: str
    test: str
    result: str = "{x}"
    lines: tuple[str, ...] = ()
    signature: str = ""
    special: bool = False
    shows: str = ""


class Table(msgspec.Struct, frozen=True):
    """The file."""

    rules: list[Rule]
    by_hand: dict[str, str]
    tokens: dict[str, str]
    hooks: list[str]


TABLE = msgspec.yaml.decode(Path(__file__).with_name("rules.yaml").read_bytes(), type=Table)
BY_NAME = {name: rule for rule in TABLE.rules for name in rule.names.split()}
BY_HAND = {name: advice for names, advice in TABLE.by_hand.items() for name in names.split()}
OTHERWISE = "torch.distributed has nothing of this name: write what the script needs of it"
