"""Write weights as safetensors, for programs that use a model without this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from hvd_trainer.utils.files import atomic_write

NAME = "model.safetensors"


def export_weights(model: nn.Module, folder: Path | None) -> None:
    """Write `model.safetensors` with the module's own names (no `module.` prefix), atomically.

    Of tensors that the bare module shares, one is written, and nothing that is no tensor. Ranks without a folder
    write nothing.

    Raises:
        OSError: the folder cannot be written to.
    """
    from safetensors.torch import save_model

    if folder is not None:
        tensors = _tensors_in(model.state_dict())
        # Extra state may be anything; of a module, `save_model` takes the state only.
        of_tensors: Any = SimpleNamespace(state_dict=tensors.copy)
        _replace(folder / NAME, lambda file: save_model(of_tensors, file))


def export_tensors(tensors: Mapping[str, Any], file: Path, metadata: dict[str, str] | None = None) -> None:
    """Write the tensors of a state dict to a file, atomically; those that share memory are each written.

    Args:
        metadata: what the file says of itself.

    Raises:
        OSError: the file cannot be written.
    """
    from safetensors.torch import save_file

    plain = {name: tensor.contiguous() for name, tensor in _tensors_in(tensors).items()}
    _replace(file, lambda temporary: save_file(plain, temporary, metadata))


def _tensors_in(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _replace(file: Path, write: Callable[[str], None]) -> None:
    from safetensors import SafetensorError

    with atomic_write(file) as temporary:
        try:
            write(str(temporary))
        except SafetensorError as error:
            raise OSError(str(error)) from error
