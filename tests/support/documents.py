"""What the documents say: their fenced blocks, commands, options, links and files, as plain text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = tuple(sorted(path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "docs").glob("*.md")))
WITH_COMMANDS = (
    *("README.md", *PAGES, "CONTRIBUTING.md", "benchmarks/README.md", "docker/README.md"),
    *("examples/mnist/README.md", "examples/slurm/README.md", "examples/kubernetes/README.md"),
)
ALL = (*WITH_COMMANDS, "CHANGELOG.md", "SECURITY.md")

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language and its text."""

    language: str
    text: str

    def commands(self) -> list[str]:
        """What a reader types. A block that starts something in the background is one script."""
        if self.language == "console":
            return [line[2:] for line in self.text.splitlines() if line.startswith("$ ")]
        if self.language != "bash":
            return []
        if re.search(r"&$", self.text, re.MULTILINE):
            return [self.text.strip()]
        joined = self.text.replace("\\\n", " ")
        return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


@cache
def text_of(document: str) -> str:
    return (REPOSITORY / document).read_text()


def blocks(document: str) -> list[Block]:
    return [Block(*match.groups()) for match in _FENCE.finditer(text_of(document))]


def commands() -> list[str]:
    """Every command of every document, each once."""
    found = (command for name in WITH_COMMANDS for block in blocks(name) for command in block.commands())
    return list(dict.fromkeys(found))


def inline_code(document: str) -> Iterator[str]:
    """What stands in single backticks, outside fenced blocks."""
    yield from _CODE.findall(_FENCE.sub("", text_of(document)))


def links(document: str) -> list[str]:
    return _LINK.findall(_FENCE.sub("", text_of(document)))


def options_in(text: str) -> set[str]:
    return set(_OPTION.findall(text))


def own_part(line: str) -> tuple[str, list[str]] | None:
    """(our module or script, its arguments) of one command line; None if nothing of ours is started."""
    words = shlex.split(line.removesuffix("&"))
    if words[0] == "sed":  # edits a script, and starts none
        return None
    words = words[: words.index("--")] if "--" in words else words  # what follows is for a job that a tool starts
    words = [part for word in words for part in (("-m", "hvd_trainer") if word == "hvd-trainer" else (word,))]
    for number, word in enumerate(words):
        if word.startswith(("hvd_trainer", "benchmarks")) and words[number - 1] == "-m":
            name, rest = word, words[number + 1 :]
            # A tool has options of its own.
            return (f"{name} {rest[0]}", rest[1:]) if name == "hvd_trainer" else (name, rest)
        if word.endswith(".py"):  # train.py is the reader's
            return (word, words[number + 1 :]) if (REPOSITORY / word).exists() else None
    return None
