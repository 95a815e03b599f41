"""Begin a process of a trial, or one that a script under `run` has started; run the next `sitecustomize`, too.

A trial is kept out of its user's files (`measure/trial_files.py`); what a script starts is put on its engine.
"""

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
# Where the package is not installed, it is where this file is; an older Python cannot read it.
package = str(Path(__file__).parents[3])
sys.path.append(package)
try:
    if "HVD_TRAINER_TRIAL" in os.environ and sys.version_info >= (3, 10):
        from hvd_trainer.measure.trial_files import guard_files

        guard_files(os.environ)
    if "HVD_TRAINER_ENGINE" in os.environ and sys.version_info >= (3, 10):
        from hvd_trainer.launch.launchers import forget_outer_launchers
        from hvd_trainer.tools.run.engines import import_hooks

        forget_outer_launchers(os.environ)
        import_hooks(os.environ["HVD_TRAINER_ENGINE"], None).install()
finally:
    sys.path.remove(package)
