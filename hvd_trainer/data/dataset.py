"""A data set that fits in memory: one tensor of inputs, one of targets, indexed a batch at a time."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.utils.data import Dataset

from hvd_trainer.errors import DataError


class TensorData(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and targets as whole tensors; the fast path of the trainer.

    Args:
        inputs: shape (num_samples, ...), in its compact form (uint8 pixels).
        targets: shape (num_samples, ...).
        transform: makes the model's input of a whole batch of `inputs`, on the training device. One that draws
            no random numbers may say so by an attribute `deterministic = True`; others cost 60 us more.
        name: what the banner calls it.

    Raises:
        DataError: the two have different lengths, or none.
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        transform: Callable[[Tensor], Tensor] | None = None,
        name: str = "tensors",
    ) -> None:
        if len(inputs) != len(targets):
            raise DataError(f"{name}: {len(inputs)} inputs and {len(targets)} targets; give one target per input.")
        if len(inputs) == 0:
            raise DataError(f"{name}: the data set is empty.")
        self.inputs, self.targets, self.transform, self.name = inputs, targets, transform, name

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.take(self.inputs[index : index + 1], self.targets[index : index + 1])
        return inputs[0], targets[0]

    def take(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """One batch as the model wants it."""
        return (self.transform(inputs) if self.transform else inputs), targets


class Normalise:
    """uint8 pixels to floats: `(pixel / 255 - mean) / std`, in this order, as torchvision's transforms do."""

    deterministic = True

    def __init__(self, mean: float, std: float) -> None:
        self.mean, self.std = mean, std

    def __call__(self, pixels: Tensor) -> Tensor:
        return pixels.float().div_(255).sub_(self.mean).div_(self.std)
