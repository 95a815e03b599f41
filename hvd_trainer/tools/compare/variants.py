"""The variants of a job: one for each combination of the values of `--vary`.

A job that is built on the Trainer is asked for its class of options; a script is given the words as they are.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from hvd_trainer.config.checks import flag, switch
from hvd_trainer.config.options import TrainerOptions
from hvd_trainer.config.parser import flatten, parse
from hvd_trainer.errors import OptionError
from hvd_trainer.tools.runner.command import option_of
from hvd_trainer.tools.runner.job_kind import is_trainer_job

T = TypeVar("T")

SCRIPT = "job_of_compare"
"""The name under which a job's file is imported."""
NOT_APPLICABLE = "-"
"""The value of an option that changes nothing in a combination, such as the schedule of one stage."""
STAGES_ONLY, PARTS_ONLY = ("schedule", "parts_per_stage"), ("balance",)
"""Options that change nothing where there is one stage, or where the model is in one piece."""
OWN_OPTION = {
    "ranks": "--np 1,2,4",
    "np": "--np 1,2,4",
    "backend": "--backend horovod,ddp",
}
"""Axes of every comparison, which have options of their own."""


@dataclass(frozen=True)
class Axis:
    """An option, or engines or ranks, and the values that it takes."""

    name: str
    values: tuple[str, ...]
    typed: str = ""
    """the option, as its user spells it: `--batch_size`"""

    @property
    def label(self) -> str:
        return self.name.replace("_", " ")

    @property
    def varies(self) -> bool:
        return len(self.values) > 1


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The job with one combination of values."""

    words: tuple[str, ...]
    """the words that follow `python`"""
    identity: Mapping[str, Any]
    """tells it from others in plain JSON, however its options were typed"""
    values: Mapping[str, str]
    """by axis, as typed, or NOT_APPLICABLE"""
    label: str = ""
    """`stages 2, chunks 4`: the values of all options that vary"""
    options: TrainerOptions | None = None
    """None for a script and without `--vary`: then nobody looks into the job"""


class Value(NamedTuple):
    """One value of an axis, as the job takes it."""

    axis: Axis
    text: str
    words: tuple[str, ...]
    """as arguments"""
    parsed: Any


def read_axes(texts: Sequence[str]) -> list[Axis]:
    """Return the axes of `--vary chunks=1,2,4`.

    Raises:
        OptionError: one has no name or no values, comes twice, or has an option of its own.
    """
    axes: list[Axis] = []
    for text in texts:
        typed, _, values = text.partition("=")
        typed = typed.strip().lstrip("-")
        name, listed = typed.replace("-", "_"), [value.strip() for value in values.split(",")]
        if not name or not all(listed):
            raise OptionError(
                f"--vary {text}: type an option of the job and its values with commas between them, such as "
                f"--vary chunks=1,2,4"
            )
        if name in OWN_OPTION:
            raise OptionError(f"--vary {text}: type {OWN_OPTION[name]}")
        if any(axis.name == name for axis in axes):
            raise OptionError(f"--vary {name} is given twice: put all its values into one list")
        axes.append(Axis(name, tuple(dict.fromkeys(listed)), f"--{typed}"))
    return axes


def make_variants(job: Sequence[str], axes: Sequence[Axis]) -> list[Variant]:
    """Return the product of the axes; combinations that make the same options come once.

    Raises:
        OptionError: the job has no such option, or does not take such a value.
    """
    if not axes or not is_trainer_job(job):
        combinations = itertools.product(*(axis.values for axis in axes))
        return [_make_script_variant(job, axes, values) for values in combinations]
    options = JobOptions.find(job)
    values = [[options.read_value(axis, text) for text in axis.values] for axis in axes]
    found: dict[str, Variant] = {}
    for combination in itertools.product(*values):
        variant = options.make_variant(combination)
        found.setdefault(str(variant.identity), variant)
    return list(found.values())


def _make_script_variant(job: Sequence[str], axes: Sequence[Axis], values: Sequence[str]) -> Variant:
    """Return a script with an option of each axis: with its value, or as a switch that is there or not."""
    words, pairs = tuple(job), list(zip(axes, values, strict=True))
    for axis, value in pairs:
        words = _replaced(words, axis, value)
    return Variant(
        words=words,
        identity={"words": list(words)},
        values={axis.name: value for axis, value in pairs},
        label=", ".join(f"{axis.label} {value}" for axis, value in pairs if axis.varies),
    )


def _replaced(words: tuple[str, ...], axis: Axis, value: str) -> tuple[str, ...]:
    """Return the words of a script with another value of an option, at its place, or at the end."""
    is_switch = value in ("true", "false")
    place = next((n for n, word in enumerate(words) if option_of(word) == flag(axis.name)), len(words))
    found = "".join(words[place : place + 1])
    typed = found.partition("=")[0] or axis.typed
    new = ([typed] if value == "true" else []) if is_switch else [typed, value]
    end = place + 1 if is_switch or "=" in found else place + 2
    return (*words[:place], *new, *words[end:])


@dataclass(frozen=True)
class JobOptions:
    """The options of a job that is built on the Trainer."""

    program: tuple[str, ...]
    """`-m` and a module, or a file"""
    arguments: tuple[str, ...]
    kind: type[TrainerOptions]
    typed: TrainerOptions
    """those that its arguments make"""

    @classmethod
    def find(cls, job: Sequence[str]) -> JobOptions:
        """Import the job's module, without running the job, and parse its arguments.

        Raises:
            OptionError: it cannot be imported, has not one class of options, or does not take the arguments.
        """
        count = 2 if job[0] == "-m" else 1
        program, arguments = tuple(job[:count]), tuple(job[count:])
        values = vars(_import(program)).values()
        kinds = {value for value in values if isinstance(value, type) and issubclass(value, TrainerOptions)}
        own = [kind for kind in kinds if not any(issubclass(other, kind) for other in kinds - {kind})]
        if len(own) != 1:
            raise OptionError(
                f"--vary asks {shlex.join(program)} for its options, and it has {len(own)} classes of them. "
                f"Let it have one: hvd_trainer.TrainerOptions, or a class derived from it"
            )
        return cls(program, arguments, own[0], _parse(own[0], arguments, shlex.join(arguments), program))

    def read_value(self, axis: Axis, text: str) -> Value:
        """Return a value as the job takes it.

        Raises:
            OptionError: the job does not, or it has the option already.
        """
        name, known, shown = axis.name, flatten(self.typed), axis.name.replace("_", "-")
        if name not in known:
            near = get_close_matches(shown, [other.replace("_", "-") for other in known], 1)
            hint = f"Did you mean {near[0]}?" if near else "`--help` of the job lists its options"
            raise OptionError(f"--vary {shown}: the job has no option {flag(name)}. {hint}")
        if {flag(name), switch(name, on=False)} & {option_of(word) for word in self.arguments}:
            raise OptionError(f"{flag(name)} is varied, and stands behind -- too: leave one out")
        word = f"{flag(name)}={text}"
        if isinstance(known[name], bool):
            if text not in ("true", "false"):
                raise OptionError(f"{flag(name)} is a switch: type --vary {shown}=true,false, not {text}")
            word = switch(name, on=text == "true")
        what = f"{flag(name)} {text}{_choices(self.kind, name)}"
        parsed = _parse(self.kind, [*self.arguments, word], what, self.program)
        return Value(axis, text, (word,), flatten(parsed)[name])

    def make_variant(self, combination: Sequence[Value]) -> Variant:
        """Return the job with a value of each axis; those that change nothing are left out."""
        parallel = with_values(self.typed, {its.axis.name: its.parsed for its in combination}).parallel
        unused: tuple[str, ...] = ()
        if parallel.stages == 1:
            unused = STAGES_ONLY if parallel.num_devices > 1 else (*STAGES_ONLY, *PARTS_ONLY)
        used = [its for its in combination if its.axis.name not in unused]
        options = with_values(self.typed, {its.axis.name: its.parsed for its in used})
        default = flatten(self.kind())
        changed = {name: value for name, value in flatten(options).items() if value != default[name]}
        return Variant(
            words=(*self.program, *self.arguments, *(word for its in used for word in its.words)),
            identity={
                "job": list(self.program),
                # As it comes back from JSON, which has no tuples.
                "options": json.loads(json.dumps(changed, default=str)),
            },
            values={its.axis.name: its.text if its in used else NOT_APPLICABLE for its in combination},
            label=", ".join(f"{its.axis.label} {its.text}" for its in used if its.axis.varies),
            options=options,
        )


def _parse(kind: type[T], arguments: Sequence[str], what: str, program: Sequence[str]) -> T:
    """Return the options that arguments make.

    Raises:
        OptionError: the job does not take them; the message names `what`.
    """
    try:
        return parse(kind, arguments, outputs=False)
    except SystemExit:
        text = f"The job does not take {what}. Its options: python {shlex.join(program)} --help"
        raise OptionError(text) from None


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


def _choices(kind: type[Any], name: str) -> str:
    """Return ` (there are: fp32, bf16, fp16)` for an option that has a list of values; else nothing."""
    for entry, hint in get_type_hints(kind).items():
        if is_dataclass(hint) and isinstance(hint, type) and (found := _choices(hint, name)):
            return found
        if entry == name and get_origin(hint) is Literal:
            return f" (there are: {', '.join(map(str, get_args(hint)))})"
    return ""


def _import(program: Sequence[str]) -> Any:
    """Import a module, or a file, without running the job.

    Raises:
        OptionError: there is no such module, this is no file of Python, or importing it would start to train.
    """
    name, is_module = shlex.join(program), program[0] == "-m"
    spec = importlib.util.find_spec(program[1]) if is_module else None
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{program[1]}.__main__")
    if not is_module:
        spec = importlib.util.spec_from_file_location(SCRIPT, program[0])
    if spec is None or spec.loader is None:
        raise OptionError(f"-- {name}: {'there is no such module' if is_module else 'this is no file of Python'}")
    nodes = ast.parse(Path(spec.origin or "").read_text()).body
    if not any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in nodes):
        guard = 'if __name__ == "__main__":'
        raise OptionError(
            f"--vary imports {name} to read its options, and that would run it: put run_job(...) under `{guard}`"
        )
    if is_module:
        return importlib.import_module(spec.name)
    sys.modules[SCRIPT] = module = importlib.util.module_from_spec(spec)
    # Modules beside the file are found, as by `python FILE`; later imports of ours must not find them.
    folders = list(sys.path)
    sys.path.insert(0, str(Path(program[0]).resolve().parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = folders
    return module
