"""Write weights as safetensors, for programs that use a model without this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor, nn

from hvd_trainer.utils.files import atomic_write

NAME = "model.safetensors"


def export_weights(model: nn.Module, folder: Path | None) -> None:
    """Write `model.safetensors` with the module's own names (no `module.` prefix), atomically.

    Of tensors that the bare module shares, one is written. Ranks without a folder write nothing.

    Raises:
        OSError: the folder cannot be written to.
    """
    from safetensors.torch import save_model

    if folder is not None:
        _replace(folder / NAME, lambda file: save_model(model, file))


def export_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write the tensors of a state dict to a file, atomically; tensors that share memory are each written.

    Raises:
        OSError: the file cannot be written.
    """
    from safetensors.torch import save_file

    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    _replace(file, lambda temporary: save_file(plain, temporary))


def _replace(file: Path, write: Callable[[str], None]) -> None:
    from safetensors import SafetensorError

    with atomic_write(file) as temporary:
        try:
            write(str(temporary))
        except SafetensorError as error:
            raise OSError(str(error)) from error
