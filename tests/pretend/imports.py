"""Change a module when it is imported: its source before it runs, or what it contains after that."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ImportHook(MetaPathFinder):
    """Stands before all other finders, for one module.

    Args:
        name: the module.
        rewrite: returns the source to run, given the module's own.
        after: called with the module when it has run, before its importer goes on; at once if that was before.
    """

    def __init__(
        self,
        name: str,
        *,
        rewrite: Callable[[str], str] | None = None,
        after: Callable[[ModuleType], None] | None = None,
    ) -> None:
        self._name, self._rewrite, self._after = name, rewrite, after

    def install(self) -> None:
        sys.meta_path.insert(0, self)
        if self._name in sys.modules:
            assert self._rewrite is None, f"{self._name} was imported before it could be changed"
            assert self._after is not None
            self._after(sys.modules[self._name])

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        loader: Any = spec and spec.loader
        if self._rewrite is not None:
            rewrite, file = self._rewrite, loader.get_filename(name)
            loader.get_code = lambda _: compile(rewrite(loader.get_source(name)), file, "exec")
        if self._after is not None:
            execute, after = loader.exec_module, self._after

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                after(module)

            loader.exec_module = execute_and_call
        return spec
