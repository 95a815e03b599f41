"""The engine of `--backend auto`: decided here for jobs on the Trainer, for `run` and for the tools."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.machinery import PathFinder

from hvd_trainer.launch.world import find_world

AUTO = "auto"


def choose_engine(backend: str, environ: Mapping[str, str]) -> str:
    """Return the engine that `--backend` names; for auto, the usual one of what has started this process.

    Raises:
        LaunchError: as `detect`.
    """
    return usual_engine(find_world(environ).launcher)[0] if backend == AUTO else backend


def usual_engine(launcher: str) -> tuple[str, str]:
    """Return the engine that is taken under a launcher by default, and why, for the start-up summary."""
    if launcher != "horovodrun":
        return "ddp", "the default except under horovodrun"
    # Nothing else is asked: under `run`, a hook for imports may stand for the package.
    if PathFinder.find_spec("horovod") is None:
        return "ddp", "the default where Horovod is not installed"
    return "horovod", "the default under horovodrun"
