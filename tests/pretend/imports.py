"""Change a module when it is imported: its source before it runs, or what it contains after that."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any


def rewrite(name: str, change: Callable[[str], str]) -> None:
    """Let a module, which nobody has imported yet, run what `change` makes of its source."""
    assert name not in sys.modules, f"{name} was imported before it could be changed"
    get_code = SourceFileLoader.get_code

    def get_changed_code(loader: Any, module: str) -> Any:
        if module != name:
            return get_code(loader, module)
        return compile(change(loader.get_source(name)), loader.path, "exec")

    SourceFileLoader.get_code = get_changed_code  # type: ignore[method-assign]


def after(name: str, call: Callable[[ModuleType], None]) -> None:
    """Call a function with a module when it has run, before its importer continues; at once if that was before."""
    if name in sys.modules:
        call(sys.modules[name])
        return
    execute = SourceFileLoader.exec_module

    def execute_and_call(loader: Any, module: ModuleType) -> None:
        execute(loader, module)
        if module.__name__ == name:
            call(module)

    SourceFileLoader.exec_module = execute_and_call  # type: ignore[method-assign]
