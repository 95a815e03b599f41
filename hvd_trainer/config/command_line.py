"""Read words of a command line into a dataclass, and say what is wrong with them as all errors are said."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from typing import Any, TypeVar

T = TypeVar("T")
NUMBERS = {"INT": "a whole number", "FLOAT": "a number"}
"""How a message names the types of tyro's help."""


def read_words(kind: type[T], words: Sequence[str], *, program: str, **how: Any) -> T:
    """Return a dataclass with the values that the words give to its fields.

    Args:
        program: what the user typed before the words.
        how: further arguments of `tyro.cli`.

    Raises:
        SystemExit: the words are wrong, which one line on stderr says (code 2), or ask for help (code 0).
    """
    import tyro

    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            options: T = tyro.cli(kind, prog=program, args=words, **how)
            return options
    except SystemExit as leaving:
        if leaving.code:
            told = ". ".join(part.rstrip(".") for part in _parts(printed.getvalue()))
            print(f"error: {_without_internals(told)}. Type: {program} --help", file=sys.stderr)
        raise


def _without_internals(told: str) -> str:
    """Return tyro's text on a value that is no number as a sentence; others as they are."""
    option = re.match(r"Error parsing (--\S+): ", told)
    value = re.search(r"\['(.*?)'\]|(?:with base 10|string to float): '(.*?)'", told)
    kind = re.search(r"Argument helptext: --\S+ (?:\{None\}\|)?(INT|FLOAT) ", told)
    if not (option and value and kind):
        return told
    return f"{option[1]} takes {NUMBERS[kind[1]]}, and not {value[1] or value[2]!r}"


def _parts(box: str) -> Iterator[str]:
    """Yield the texts between the rules of a box that tyro has printed, without its title and its line on help."""
    part: list[str] = []
    # Where stdout is a terminal, it is coloured.
    for row in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()[1:]:
        text = row.strip(" │")
        if {*text} == {"-"} or {*text} == {"─"}:
            if part:
                yield " ".join(part)
            part = []
        elif text:
            part.append(text)
