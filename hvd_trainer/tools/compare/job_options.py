"""The options of a job that is built on the Trainer: found in its module, parsed, and changed."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from hvd_trainer.config.options import TrainerOptions
from hvd_trainer.config.parser import flatten, parse
from hvd_trainer.errors import OptionError

T = TypeVar("T")

SCRIPT = "job_of_compare"
"""The name under which a job's file is imported."""


@dataclass(frozen=True)
class JobOptions:
    """A job's class of options, and the arguments that the job is typed with."""

    program: tuple[str, ...]
    """`-m` and a module, or a file"""
    arguments: tuple[str, ...]
    kind: type[TrainerOptions]

    @classmethod
    def find(cls, job: Sequence[str]) -> JobOptions:
        """Import the job's module, without running the job.

        Raises:
            OptionError: there is no such module, importing it would run the job, or it has no class of options, or
                several.
        """
        program = tuple(job[: 2 if job[0] == "-m" else 1])
        name = shlex.join(program)
        module = _import(program, name)
        kinds = {
            value
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, TrainerOptions)
        }
        own = [kind for kind in kinds if not any(issubclass(other, kind) for other in kinds - {kind})]
        if len(own) != 1:
            raise OptionError(
                f"--vary asks {name} for its options, and it has {len(own)} classes of them. Let it have one: "
                f"hvd_trainer.TrainerOptions, or a class derived from it"
            )
        return cls(program, tuple(job[len(program) :]), own[0])

    def parse(self, further: Sequence[str] = (), what: str = "") -> TrainerOptions:
        """Return the options that the job's arguments and further ones make.

        Args:
            what: is named if the job refuses them; the job's arguments by default.

        Raises:
            OptionError: the job does not take them.
        """
        try:
            return parse(self.kind, [*self.arguments, *further], outputs=False)
        except SystemExit:
            raise OptionError(
                f"The job does not take {what or shlex.join(self.arguments)}. Its options: python "
                f"{shlex.join(self.program)} --help"
            ) from None

    def changed(self, options: TrainerOptions) -> dict[str, Any]:
        """Return the options that are not the job's default, as they come back from JSON, which has no tuples."""
        default = flatten(self.kind())
        others = {name: value for name, value in flatten(options).items() if value != default[name]}
        plain: dict[str, Any] = json.loads(json.dumps(others, default=str))
        return plain


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


def choices(kind: type[Any], name: str) -> str:
    """Return ` (there are: fp32, bf16, fp16)` for an option that has a list of values; else nothing."""
    hints = get_type_hints(kind)
    for entry in fields(kind):
        hint = hints[entry.name]
        if is_dataclass(hint) and isinstance(hint, type):
            if found := choices(hint, name):
                return found
        elif entry.name == name and get_origin(hint) is Literal:
            return f" (there are: {', '.join(map(str, get_args(hint)))})"
    return ""


def _import(program: Sequence[str], name: str) -> Any:
    """Import a module, or a file, without running the job.

    Raises:
        OptionError: there is no such module, this is no file of Python, or importing it would start to train.
    """
    if program[0] == "-m":
        spec = importlib.util.find_spec(program[1])
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{program[1]}.__main__")
    else:
        spec = importlib.util.spec_from_file_location(SCRIPT, program[0])
    if spec is None or spec.loader is None:
        what = "there is no such module" if program[0] == "-m" else "this is no file of Python"
        raise OptionError(f"-- {name}: {what}")
    nodes = ast.parse(Path(spec.origin or "").read_text()).body
    if not any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in nodes):
        guard = 'if __name__ == "__main__":'
        raise OptionError(
            f"--vary imports {name} to read its options, and that would run it: put run_job(...) under `{guard}`"
        )
    if program[0] == "-m":
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
