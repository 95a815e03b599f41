"""What a tool asks a job to do and to record. The tool hands it to all ranks by an environment variable.

A job on the Trainer (`measure/trainer.py`) and any other script (`measure/script.py`) obey the same message.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

VARIABLE = "HVD_TRAINER_MEASURE"
OWNER = "HVD_TRAINER_MEASURE_OWNER"
"""The variable with the process that the message is for: all that it starts inherits the message, too."""
BACKEND = "HVD_TRAINER_BACKEND"
"""The variable with the engine that was typed for `run`, for a job on the Trainer that is typed with none."""
NO_STEPS = "no-steps"
"""The file in the log folder that says why a script has ended without a step that counts."""
SITE = Path(__file__).with_name("site")
"""The folder of the `sitecustomize` that Python processes begin with where it is in PYTHONPATH."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """A tool's message to a job: what to record, and where to write it."""

    log_dir: str
    """the folder of the recordings, on this rank's node"""
    engine: str | None = None
    """the engine of a job on the Trainer, whatever it is typed with; None: its own"""
    max_steps: int | None = None
    """optimizer steps after which the job ends; None: its own end"""
    endless: bool = False
    """a job on the Trainer makes these steps however few epochs it has; another script ends with its data"""
    stop_at: tuple[int, ...] = ()
    """a rank, and after how many optimizer steps it stops (SIGSTOP), each time until a tool lets it continue"""
    exchange: bool = True
    """exchange gradients; without it each rank trains a model of its own"""
    trace_steps: int | None = None
    """optimizer steps whose samples, gradients and weights are written, for `parity`; None: none"""
    sample_stacks: bool = False
    """keep in the log folder at which lines of code a rank's time goes"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """further options of a job on the Trainer, by their names in YAML"""

    def variables(self) -> dict[str, str]:
        """Return the environment variable by which the ranks find this message."""
        return {VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def read(cls, environ: MutableMapping[str, str]) -> Message | None:
        """Return the message for this process; None if no tool has started it, or if it is for the rank above.

        The first process that reads it has it, and no rank of a further launcher below: a tool knows of its own
        ranks only, and waited for those that did not obey.
        """
        if VARIABLE not in environ or environ.setdefault(OWNER, str(os.getpid())) != str(os.getpid()):
            return None
        return msgspec.json.decode(environ[VARIABLE], type=cls)
