"""Put a Python process that a script has started on the script's engine; then run the next `sitecustomize`."""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

HERE = str(Path(__file__).parent)


def run_next() -> None:
    """Run the `sitecustomize` that this one hides: a distribution or an environment may have one."""
    folders = [folder for folder in sys.path if folder != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", folders)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


run_next()
if "HVD_TRAINER_ENGINE" in os.environ and importlib.util.find_spec("hvd_trainer") is not None:
    from hvd_trainer.launch.launchers import forget_outer_launchers
    from hvd_trainer.tools.run.engines import import_hooks

    forget_outer_launchers(os.environ)
    import_hooks(os.environ["HVD_TRAINER_ENGINE"], None).install()
