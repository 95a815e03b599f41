"""Answer an import with another module, and change a module once it has been imported."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any

from hvd_trainer.errors import UserError


class AbsentModuleError(UserError, ImportError):
    """A module that is not there, and whose importer can be told what to do about it."""


class AliasLoader(Loader):
    """Loads a module by importing another one, which then has both names."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the other module."""
        module = importlib.import_module(self._target)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, which the import system has replaced; it has been executed."""
        module.__spec__ = self._spec


class ImportHooks(MetaPathFinder):
    """Changes what `import` finds in this process, from `install` on.

    Args:
        aliases: the module to import for a name; submodules of the name are submodules of that module.
        single: the same for a name alone, and not for its submodules.
        absent: the error for a name and its submodules.
        after: called with a module of this name when it has been executed, before its importer continues.
        stays: whether they are none of those that `uninstall_all` ends.
    """

    def __init__(
        self,
        *,
        aliases: Mapping[str, str],
        absent: Mapping[str, str],
        single: Mapping[str, str] = MappingProxyType({}),
        after: Mapping[str, Callable[[ModuleType], None]],
        stays: bool = False,
    ) -> None:
        self.stays = stays
        self._aliases, self._single, self._absent, self._after = aliases, single, absent, after
        self._finding: set[str] = set()

    def install(self) -> None:
        """Stand before all other finders, and call the hooks of what is imported already."""
        for name, hook in self._after.items():
            if name in sys.modules:
                hook(sys.modules[name])
        sys.meta_path.insert(0, self)

    def uninstall(self) -> None:
        """Let these hooks change nothing that is imported from now on."""
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]

    @classmethod
    def uninstall_all(cls) -> None:
        """Let no hooks but those that stay change what is imported from now on."""
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, cls) or finder.stays]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of an alias or of a module with a hook; None for all others.

        Raises:
            AbsentModuleError: the name is one of `absent`.
        """
        for name, text in self._absent.items():
            if _is_in(fullname, name):
                raise AbsentModuleError(text)
        for name, other in self._aliases.items():
            if _is_in(fullname, name):
                loader = AliasLoader(other + fullname.removeprefix(name))
                return ModuleSpec(fullname, loader, is_package=True)
        if fullname in self._single:
            return ModuleSpec(fullname, AliasLoader(self._single[fullname]), is_package=True)
        hook = self._after.get(fullname)
        if hook is None or fullname in self._finding:
            return None
        self._finding.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding.discard(fullname)
        if spec is not None and spec.loader is not None:
            _call_after(spec.loader, hook)
        return spec


def _is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _call_after(loader: Loader, hook: Callable[[ModuleType], None]) -> None:
    """Make a loader, which is that of one module only, call a function when it has executed the module."""
    execute = loader.exec_module

    def execute_and_call(module: ModuleType) -> None:
        execute(module)
        hook(module)

    loader.exec_module = execute_and_call  # type: ignore[method-assign]


def wrap(name: str, wrapper: Callable[..., Any], holder: Any, undo: ExitStack | None = None) -> None:
    """Put `wrapper`, whose first argument is the original, in the place of a function of a module or class.

    Also in modules that have imported it from there before, as `torch.distributed.device_mesh` has.

    Args:
        undo: puts the original back when it is closed; None: nothing does.
    """
    original = getattr(holder, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    modules = [module for module in sys.modules.values() if isinstance(module, ModuleType)]
    for place in (holder, *(one for one in modules if one is not holder and vars(one).get(name) is original)):
        setattr(place, name, call)
        if undo is not None:
            undo.callback(setattr, place, name, original)
