"""Derive the command line and the YAML form of a job from its dataclasses of options.

Nested dataclasses become groups in `--help`, option names stay flat (`--batch-size`), and `--config FILE` reads
the same names from YAML, which the command line overrides.
"""

from __future__ import annotations

import argparse
import inspect
import io
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import asdict, fields, is_dataclass, replace
from datetime import date
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import yaml

from hvd_trainer.config.checks import default_of, flag, switch
from hvd_trainer.config.command_line import read_words
from hvd_trainer.errors import OptionError

T = TypeVar("T")

MAX_YAML_BYTES = 100_000
_typed: set[type] = set()
"""Kinds of options that this process has read from its own command line."""


def parse(kind: type[T], args: Sequence[str] | None = None, *, outputs: bool = True) -> T:
    """Fill a dataclass from the command line and, with `--config FILE`, from YAML.

    Args:
        kind: a dataclass; all fields need defaults. Fields that are dataclasses become groups.
        args: the command line without the program's name; `sys.argv[1:]` if None.
        outputs: print help and errors (rank 0 alone does, or each message would come once per rank).

    Raises:
        OptionError: the YAML file is missing or names an unknown option.
        SystemExit: the command line is wrong (code 2) or asked for help (code 0).
    """
    if args is None:
        _typed.add(kind)
    args = list(sys.argv[1:] if args is None else args)
    config, args = _take_config(args)
    if config is not None:
        args = _arguments_from_yaml(Path(config), kind) + args
    # tyro's own switch, console_outputs, does not reach its messages about values.
    discarded = io.StringIO()
    with (
        nullcontext() if outputs else redirect_stderr(discarded),
        nullcontext() if outputs else redirect_stdout(discarded),
    ):
        return _parse_typed(kind, args)


def are_typed(options: object) -> bool:
    """Return whether this process has read options of this kind from its command line, which takes --config."""
    return type(options) in _typed


def _parse_typed(kind: type[T], args: list[str]) -> T:
    from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes

    asks_for_help, asks_for_all = not {"-h", "--help"}.isdisjoint(args), "--help-all" in args
    more = f"{_program()} --help-all lists all options. " if asks_for_help and not asks_for_all else ""
    return read_words(
        kind,
        ["--help"] if asks_for_all else args,
        program=_program(),
        description=f"{_summary(kind)}{more}--config FILE takes options from YAML (epochs: 3); the command line "
        f"wins. Every run with --log-dir writes such a file, config.yaml.",
        config=(OmitArgPrefixes, OmitSubcommandPrefixes),
        common_only=bool(more),
    )


def _summary(kind: type) -> str:
    """Return the docstring of a class of options as a paragraph; nothing for the one that `dataclass` makes up."""
    text = inspect.getdoc(kind) or ""
    return "" if text.startswith(f"{kind.__name__}(") else f"{text}\n\n"


def _program() -> str:
    """Return what the user typed to start this job."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"python -m {spec.name}" if spec is not None else f"python {sys.argv[0]}"


def flatten(options: Any) -> dict[str, Any]:
    """Return the values of all options by their flat names, as YAML and the command line write them."""
    flat: dict[str, Any] = {}
    for name, value in asdict(options).items():
        flat |= value if is_dataclass(getattr(options, name)) else {name: value}
    return flat


def with_values(options: T, values: Mapping[str, Any]) -> T:
    """Return the same options with other values, by their flat names, in whichever group they are."""
    changes: dict[str, Any] = {}
    for entry in fields(options):  # type: ignore[arg-type]  # T is a dataclass
        value = getattr(options, entry.name)
        if is_dataclass(value):
            changes[entry.name] = with_values(value, values)
        elif entry.name in values:
            changes[entry.name] = values[entry.name]
    return replace(options, **changes)  # type: ignore[type-var]  # T is a dataclass


def with_defaults(options: T, names: Collection[str]) -> T:
    """Return the same options with the defaults of some, by their flat names."""
    changes: dict[str, Any] = {}
    for entry in fields(options):  # type: ignore[arg-type]  # T is a dataclass
        value = getattr(options, entry.name)
        if entry.name in names:
            changes[entry.name] = default_of(type(options), entry.name)
        elif is_dataclass(value):
            changes[entry.name] = with_defaults(value, names)
    return replace(options, **changes)  # type: ignore[type-var]  # T is a dataclass


def _take_config(args: list[str]) -> tuple[str | None, list[str]]:
    taker = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    taker.add_argument("--config", nargs="?", const="")
    taken, rest = taker.parse_known_args(args)
    if taken.config == "":
        raise OptionError("--config needs a file: --config config.yaml")
    return taken.config, rest


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the options in a file for `--config`, by their flat names.

    Raises:
        OptionError: the file is missing, too large, or not a mapping of names to plain values.
    """
    try:
        # Opened and read rather than tested: a shell's <(...) is a pipe.
        with path.open("rb") as file:
            text = file.read(MAX_YAML_BYTES + 1)
        if len(text) > MAX_YAML_BYTES:
            raise ValueError(f"it has more than {MAX_YAML_BYTES:,} bytes")
        content = yaml.load(text, _OptionLoader) or {}
    except RecursionError as error:
        raise OptionError(f"--config {path} cannot be read: it is nested too deeply") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise OptionError(f"--config {path} cannot be read: {error}") from error
    except (LookupError, AttributeError, TypeError) as error:  # from PyYAML: such as `!!bool maybe`
        raise OptionError(f"--config {path} cannot be read: a value is not what its tag says ({error})") from error
    if not isinstance(content, dict):
        raise OptionError(f"--config {path} should hold lines such as `epochs: 3`.")
    for key, value in content.items():
        if not all(map(_is_plain, value if isinstance(value, list) else [value])):
            raise OptionError(f"--config {path}: {key!r:.40} should be one value, or a list of values: [2, 3]")
    return {str(key).replace("-", "_"): value for key, value in content.items()}


def _is_plain(value: Any) -> bool:
    if isinstance(value, int):
        return value.bit_length() < 64
    return value is None or isinstance(value, float | str | date)


class _OptionLoader(yaml.SafeLoader):
    """Read plain values, without aliases and repeated names.

    Aliases expand a short file to a text of any length; of two values for one option the last would win unnoticed.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias (*name): type the value itself")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = Counter(key.value.replace("-", "_") for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for name, count in names.most_common(1):
            if count > 1:
                raise yaml.YAMLError(f"it has {name!r:.40} {count} times")
        return super().construct_mapping(node, deep)


def _arguments_from_yaml(path: Path, kind: type[Any]) -> list[str]:
    known = flatten(kind())
    arguments = []
    for name, value in read_yaml(path).items():
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f" Did you mean {near[0]}?" if near else f" There are: {', '.join(sorted(known))}."
            raise OptionError(f"--config {path}: there is no option {name!r}.{hint}")
        arguments += as_arguments(name, value)
    return arguments


def as_arguments(name: str, value: Any) -> list[str]:
    """Return an option and its value in YAML as arguments; with `=`, because a value may begin with a dash."""
    if isinstance(value, bool):
        return [switch(name, value)]
    if isinstance(value, list):
        return [flag(name), *map(str, value)]
    return [f"{flag(name)}={value}"]
