"""The final weights, for whoever uses the model without this package."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

NAME = "model.safetensors"


def export_weights(model: nn.Module, folder: Path | None) -> None:
    """Writes `model.safetensors` with the module's own names (no `module.` prefix), whole or not at all.

    Raises:
        OSError: the folder cannot be written to.
    """
    if folder is None:
        return
    from safetensors.torch import save_model

    temporary = folder / f".{NAME}.{os.getpid()}"
    save_model(model, str(temporary))
    os.replace(temporary, folder / NAME)
