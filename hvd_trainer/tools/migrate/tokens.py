"""Find what is Horovod's, or of its launchers, in what a file has become: names, strings and variables."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Collection, Iterator

from hvd_trainer.tools.migrate.table import TABLE

NAME = re.compile(r"hvd|horovod|mpi4py|sparkdl|Horovod[A-Z]\w*")
"""Names of Horovod's, and of what starts or replaces it."""
BESIDE = {tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.COMMENT}
TEXTS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def advice_on(text: str) -> Iterator[tuple[str, str]]:
    """Yield what of a text is Horovod's, each with what to do by hand."""
    seen: list[tuple[int, int]] = []
    for pattern, advice in TABLE.tokens.items():
        for match in re.finditer(pattern, text):
            if not any(begin < match.end() and match.start() < end for begin, end in seen):
                seen.append(match.span())
                yield match[0].strip(), advice


def tokens_of(code: str, defined: Collection[str]) -> list[tuple[int, str, str]]:
    """Return what is Horovod's in a Python file, but for comments and sentences: line, what, and advice.

    Args:
        defined: names that these files give to something of their own.
    """
    is_kept, rows = "hvd_trainer" in code, list[tuple[int, str, str]]()
    tokens = [*tokenize.generate_tokens(io.StringIO(code).readline)] if re.search(HINT, code) else []
    for number, token in enumerate(tokens):
        if token.type == tokenize.NAME and NAME.fullmatch(token.string) and token.string not in defined:
            around = [tokens[at].string if at < len(tokens) else "" for at in (number - 2, number - 1, number + 1)]
            is_attribute = around[1] == "." and token.string.islower()
            is_module = around[2] == "." and around[0] != "hvd_trainer"
            if is_module if is_attribute else not (is_kept and token.string == "hvd"):
                advice = next((advice for _, advice in advice_on(token.string)), TABLE.tokens[r"\bhorovod\b"])
                rows.append((token.start[0], token.string, advice))
        elif token.type in TEXTS:
            is_alone = tokens[number - 1].type in BESIDE and tokens[number + 1].type in BESIDE
            inner = token.string.strip("rbfuRBFU\"'")
            is_option = inner.startswith("-")  # of the script's own
            for what, advice in () if is_alone or is_option else advice_on(inner):
                if " " not in inner or not re.fullmatch(r"(?i)horovod(\.\w+)*", what):
                    line = token.start[0] + token.string[: token.string.index(what)].count("\n")
                    rows.append((line, what, advice))
    return rows


def named_in(code: str) -> set[int]:
    """Return the lines of the comments and strings of a Python file that name Horovod."""
    tokens = tokenize.generate_tokens(io.StringIO(code).readline) if re.search("(?i)horovod", code) else ()
    texts = (token for token in tokens if token.type in {tokenize.COMMENT, *TEXTS})
    parts = ((token.start[0] + at, part) for token in texts for at, part in enumerate(token.string.split("\n")))
    return {line for line, part in parts if "horovod" in part.lower()}


HINT = re.compile(r"(?i)horovod|hvd|mpi|sparkdl|pmi")
