"""Read words of a command line into a dataclass, and say what is wrong with them as all errors are said."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

from hvd_trainer.config.checks import COMMON

if TYPE_CHECKING:
    from tyro.constructors import (
        ConstructorRegistry,
        PrimitiveConstructorSpec,
        PrimitiveTypeInfo,
        StructConstructorSpec,
        StructFieldSpec,
        StructTypeInfo,
    )

T = TypeVar("T")
NUMBERS = {"INT": "a whole number", "FLOAT": "a number"}
"""How a message names the types of tyro's help."""


class Help(io.StringIO):
    """Text that is coloured as on the output that it is printed to."""

    encoding = getattr(sys.__stdout__, "encoding", "utf-8")

    def isatty(self) -> bool:
        return sys.__stdout__ is not None and sys.__stdout__.isatty()


def read_words(
    kind: type[T],
    words: Sequence[str],
    *,
    program: str,
    job: str = "",
    common_only: bool = False,
    **how: Any,
) -> T:
    """Return a dataclass with the values that the words give to its fields.

    Args:
        program: what the user typed before the words.
        job: what follows them, for the help: ` -- JOB`.
        common_only: list only the options that are marked COMMON, where any is.
        how: further arguments of `tyro.cli`.

    Raises:
        SystemExit: the words are wrong, which one line on stderr says (code 2), or ask for help (code 0).
    """
    import tyro

    if words and words[0].startswith("--tyro"):  # its completions are for other words than those that are typed
        print(f"error: Unrecognized options: {words[0]}. Type: {program} --help", file=sys.stderr)
        raise SystemExit(2)
    printed, shown = io.StringIO(), Help()
    rules = _help_rules(common_only=common_only)
    try:
        with redirect_stderr(printed), redirect_stdout(shown) if job else nullcontext():
            options: T = tyro.cli(kind, prog=program, args=words, registry=rules, **how)
            return options
    except SystemExit as leaving:
        if shown.getvalue():
            usage, _, rest = shown.getvalue().partition("\n\n")
            print(f"{usage}{job}\n\n{rest.rstrip()}")
        if leaving.code:
            told = ". ".join(part.rstrip(".") for part in _parts(printed.getvalue()))
            print(f"error: {_without_internals(told)}. Type: {program} --help", file=sys.stderr)
        raise


def _help_rules(*, common_only: bool) -> ConstructorRegistry:
    """Return tyro's rules, changed in what help lists."""
    from tyro.constructors import ConstructorRegistry

    registry = ConstructorRegistry()
    _arrange_fields(registry, common_only=common_only)
    _hide_none(registry)
    return registry


def _arrange_fields(registry: ConstructorRegistry, *, common_only: bool) -> None:
    """Let a job's own options come first, and each text be wrapped to help's width, not the source's."""
    from tyro.conf import Suppress, arg
    from tyro.constructors import ConstructorRegistry, StructConstructorSpec

    is_nested_call = False

    def marked(entry: StructFieldSpec, mark: object) -> StructFieldSpec:
        annotated: Any = Annotated[entry.type, mark]
        return replace(entry, type=annotated)

    @registry.struct_rule
    def arrange(info: StructTypeInfo) -> StructConstructorSpec | None:
        nonlocal is_nested_call
        if is_nested_call or not is_dataclass(info.type):
            return None  # and tyro's own rule is taken
        is_nested_call = True
        spec = ConstructorRegistry.get_struct_spec(info)
        is_nested_call = False
        assert isinstance(spec, StructConstructorSpec)
        inherited = getattr(info.type.__base__, "__dataclass_fields__", ())
        entries = sorted(spec.fields, key=lambda entry: entry.name in inherited)
        entries = [replace(entry, helptext=partial(help_text, entry)) for entry in entries]
        silent = arg(help_behavior_hint="")
        entries = [entry if entry.default != () else marked(entry, silent) for entry in entries]
        common = [entry for entry in entries if COMMON in getattr(entry.type, "__metadata__", ())]
        if common and common_only:
            entries = [entry if entry in common else marked(entry, Suppress) for entry in entries]
        return replace(spec, fields=tuple(entries))


def help_text(field: StructFieldSpec) -> str | None:
    """Return the text below a field of options in one line; None if there is none."""
    text = field.helptext() if callable(field.helptext) else field.helptext
    return " ".join((text or "").split()) or None


def _hide_none(registry: ConstructorRegistry) -> None:
    """Let help name an option's values without None, which its text explains."""
    from tyro.constructors import PrimitiveConstructorSpec

    is_nested_call = False

    @registry.primitive_rule
    def without_none(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        nonlocal is_nested_call
        if is_nested_call or type(None) not in get_args(info.type):
            return None  # and tyro's own rule is taken
        is_nested_call = True
        spec = registry.get_primitive_spec(info)
        is_nested_call = False
        assert isinstance(spec, PrimitiveConstructorSpec)
        return replace(spec, metavar=spec.metavar.removeprefix("{None}|").replace("{None,", "{"))


def _without_internals(told: str) -> str:
    """Return tyro's text on a value that is no number, or none of those to choose from, as a sentence."""
    if choice := re.match(
        r"invalid choice '(.*)' for argument '(?:-np/)?(--\S+)'\. Expected one of \((.*)\)", told
    ):
        *others, last = (value.strip("' ") for value in choice[3].rstrip(",").split(","))
        return f"{choice[2]} takes {', '.join(others)} or {last}, and not {choice[1]!r}"
    option = re.match(r"Error parsing (?:-np/)?(--\S+): ", told)
    value = re.search(r"\['(.*?)'\]|(?:with base 10|string to float): '(.*?)'", told)
    kind = re.search(r"Argument helptext: (?:-np INT, )?--\S+ (INT|FLOAT) ", told)
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
