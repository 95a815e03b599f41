"""Stand in for the top-level package `horovod` in scripts that run on torch.distributed."""

from __future__ import annotations

from importlib.machinery import PathFinder

__version__ = "0.28.1"
"""The version of Horovod whose API this is."""
_installed = PathFinder.find_spec("horovod")
__path__ = list(_installed.submodule_search_locations or ()) if _installed is not None else []
"""A package, so that it has submodules: `hvd_trainer.tools.run` answers for those with operations. The others are
those of the Horovod that is installed, if there is one, such as `horovod.runner`."""
