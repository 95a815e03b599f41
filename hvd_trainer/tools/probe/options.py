"""The options of a probe, which a tool hands to the ranks of a script by an environment variable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

VARIABLE = "HVD_TRAINER_PROBE"
NO_STEPS = "no-steps"
"""The file in the log folder that says why a script has ended without a step that counts."""
SITE = Path(__file__).with_name("site")
"""The folder of the `sitecustomize` that Python processes begin with where it is in PYTHONPATH."""


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """The options of a probe: what to record of a script, and where to write it."""

    log_dir: str
    """the log folder, on this rank's node"""
    max_steps: int | None = None
    """optimizer steps after which the script ends; None: its own end"""
    hold: tuple[int, int] | None = None
    """hold this rank after so many optimizer steps, so that it can be killed there: (rank, steps)"""
    leave_out: tuple[Literal["exchange", "data"], ...] = ()
    """run without the exchange of gradients, or without fetching data: the first batch comes again and again"""
    trace_steps: int | None = None
    """optimizer steps whose samples, gradients and weights are written, for `parity`; None: none"""
    sample_stacks: bool = False
    """keep in the log folder at which lines of code a rank's time goes"""

    def variables(self) -> dict[str, str]:
        """Return the environment variable by which the ranks find these options."""
        return {VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> ProbeOptions | None:
        """Return the options that a tool has set; None if no tool has started this process."""
        text = environ.get(VARIABLE)
        return None if text is None else msgspec.json.decode(text, type=cls)
