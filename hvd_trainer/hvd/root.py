"""What `import horovod` finds where this package answers for it."""

from __future__ import annotations

__version__ = "0.28.1"
"""The version of Horovod whose API this is."""
__path__: list[str] = []
"""A package, whose submodules are found by `hvd_trainer.tools.run`."""
