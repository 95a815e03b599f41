"""Write the reference of all options, docs/options.md, from their dataclasses and from the table of conflicts.

python docs/options_page.py writes the file; tests/unit/project/test_docs.py fails if it is out of date.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

from hvd_trainer.config.checks import COMMON, describe, flag
from hvd_trainer.config.command_line import help_text
from hvd_trainer.config.options import TrainerOptions
from hvd_trainer.config.parser import flatten
from hvd_trainer.config.rules import CONFLICTS
from hvd_trainer.jobs.options import ImdbOptions, MnistOptions

JOBS: dict[str, type[TrainerOptions]] = {"hvd_trainer.mnist": MnistOptions, "hvd_trainer.imdb": ImdbOptions}
"""By the module that is started; what a job adds to `TrainerOptions` gets a section."""
INTRODUCTION = """\
# Options

`--help-all` lists every option of a job, and `--help` those in **bold**. Type `--quiet` for a switch, and
`--no-quiet` to turn it off. In a YAML file for `--config FILE` an option has the same name without dashes in front
(`batch_size: 64`). The command line wins over the file. Every run with `--log-dir` writes such a file,
`config.yaml`. Values out of range, and options that do not go together, are refused before anything starts, all at
once.

<!-- Written by `python docs/options_page.py`: change the dataclasses and not this page. -->"""
SWITCH = Annotated[bool, COMMON]
CUT_BY = "--stages, --chunks or --devices-per-rank"


def page() -> str:
    """Return the page."""
    shared = {group.name for group in fields(TrainerOptions)}
    sections = [INTRODUCTION, *_groups(TrainerOptions(), shared, "##")]
    for module, kind in JOBS.items():
        options = kind()
        sections.append(
            f"## `python -m {module}`\n\n{_in_code(inspect.getdoc(kind) or '')}{_other_defaults(options)}"
        )
        sections += _groups(options, {group.name for group in fields(kind)} - shared, "###")
    sections.append("## What does not go together\n\nWords in capitals stand for what was typed.")
    for subject, conflicts in CONFLICTS.items():
        lines = (f"- {_without_values(conflict.text)}." for conflict in conflicts)
        sections.append(f"### {subject}\n\n" + "\n".join(lines))
    return "\n\n".join(sections) + "\n"


def _groups(options: TrainerOptions, names: Iterable[str], heading: str) -> Iterator[str]:
    """Yield a section for each of these groups, and one for those that are single options."""
    single = []
    for name in (field.name for field in fields(options) if field.name in names):
        group = getattr(options, name)
        if is_dataclass(group):
            text = _in_code(inspect.getdoc(type(group)) or "")
            rows = _rows(group, [field.name for field in fields(group)])
            yield f"{heading} {name.capitalize()}\n\n{text}\n\n{_table(rows)}"
        else:
            single.append(name)
    if single:
        yield f"{heading} Others\n\n{_table(_rows(options, single))}"


def _rows(group: Any, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield option and explanation of each field; the explanation ends with its type, range and default."""
    kind = type(group)
    hints = get_type_hints(kind, include_extras=True)
    spec = ConstructorRegistry.get_struct_spec(StructTypeInfo.make(kind, group, in_union_context=False))
    assert isinstance(spec, StructConstructorSpec)
    texts = {field.name: help_text(field) or "" for field in spec.fields}
    for name in names:
        option = f"`{flag(name)}`"
        values = "switch" if hints[name] is bool or hints[name] == SWITCH else describe(hints[name], "`{}`")
        default = f"; default `{getattr(group, name)}`" if getattr(group, name) != () else ""
        yield (
            f"**{option}**" if COMMON in getattr(hints[name], "__metadata__", ()) else option,
            f"{_in_code(texts[name])}<br>*{values}{default}*",
        )


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    lines = [("Option", "Explanation"), ("---", "---"), *rows]
    text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f'<div class="options" markdown>\n\n{text}\n\n</div>'


def _other_defaults(options: TrainerOptions) -> str:
    usual = flatten(TrainerOptions())
    others = [
        f"`{flag(name)} {value}`" for name, value in flatten(options).items() if value != usual.get(name, value)
    ]
    return f" Its own defaults: {', '.join(others)}." if others else ""


def _without_values(text: str) -> str:
    """Return the text of a conflict with `CHUNKS` where it has `{parallel.chunks}`."""
    text = text.replace("{parallel.cut_by}", CUT_BY)
    return _in_code(re.sub(r"\{\w+\.(\w+)\}", lambda place: place[1].upper(), text))


def _in_code(text: str) -> str:
    """Return the text with backticks around each option, and around a choice, a number or a place behind it."""
    value = "|".join(map(re.escape, sorted(_choices(TrainerOptions()), reverse=True)))
    return re.sub(rf"(?<![\w`-])(--[a-z][\w-]*( ({value}|[A-Z_]+|\d+)\b)?)", r"`\1`", text)


def _choices(options: TrainerOptions) -> set[str]:
    groups = (type(getattr(options, group.name)) for group in fields(options))
    hints = [hint for group in groups for hint in get_type_hints(group).values()]
    hints += [inner for hint in hints for inner in get_args(hint)]
    return {choice for hint in hints if get_origin(hint) is Literal for choice in get_args(hint)}


if __name__ == "__main__":
    (Path(__file__).parent / "options.md").write_text(page())
