"""A loss that is a module: moved to the device like the model, and trained with it where it has parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hvd_trainer.backends import Backend
from hvd_trainer.optim.weights import LossFunction, mean_loss


class ModelAndLoss(nn.Module):
    """A model and a loss with parameters as one module, so that one exchange averages the gradients of both."""

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, inputs: Any, targets: Any, weight: Tensor | None) -> tuple[Any, Tensor]:
        """Return the model's outputs, and the mean loss as `weights.mean_loss` does."""
        outputs = self.model(inputs)
        return outputs, mean_loss(self.loss, outputs, targets, weight)


def is_trained(loss: LossFunction) -> bool:
    """Return whether a loss is a module with parameters."""
    return isinstance(loss, nn.Module) and any(True for _ in loss.parameters())


def with_loss(model: nn.Module, loss: LossFunction) -> nn.Module:
    """Return what is trained: the model, with the loss if that has parameters."""
    return ModelAndLoss(model, loss) if isinstance(loss, nn.Module) and is_trained(loss) else model


def place_loss(loss: LossFunction, backend: Backend) -> None:
    """Move a loss to the training device, with rank 0's buffers, if it is a module. A collective then."""
    if isinstance(loss, nn.Module):
        loss.to(backend.device)
        backend.synchronize_buffers(loss)


def modules_of(model: nn.Module, loss: LossFunction) -> list[nn.Module]:
    """Return a model, and the loss if that is a module."""
    return [model, loss] if isinstance(loss, nn.Module) else [model]
