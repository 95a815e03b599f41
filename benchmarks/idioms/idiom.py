"""An idiom: a model, data and what a user does with them, without any library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset, TensorDataset
from torch.utils.data import Sampler as TorchSampler


class Ema:
    """The state of a callback: a mean of the weights, and a count of epochs."""

    def __init__(self) -> None:
        self.mean, self.epochs = torch.zeros(()), 0

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must keep."""
        return {"mean": self.mean, "epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.mean, self.epochs = state["mean"], state["epochs"]


class Idiom:
    """One row, in one process; each library's module trains it in the library's own way.

    With 12 samples and batches of 12, a step takes them all: any number of ranks that divides 12 takes the same
    step, in whichever order the library draws samples.

    Attributes:
        compare: how ranks are judged: each rank's `values` are those of one process, or their sum over ranks is.
        expected: the right values; None: those of one process, without loader processes and undisturbed.
        unit: what a sum counts.
        batch: samples of all ranks in a step.
        resumes: the training ends after half of its epochs, and a second start resumes it.
        state: of a callback, which the library must save and resume.
        trainings: how often the process trains, each time a new model; the last one counts.
        is_terminated: a SIGTERM is sent while the library evaluates.
        item_count: what a batch's loss is a mean over, where ranks may have unequal numbers of it.
        scheduler_step: after what `scheduler` is stepped; "metric": after an evaluation, with its accuracy.
    """

    number: ClassVar[str]
    title: ClassVar[str]
    right: ClassVar[str] = "as one process"
    expected: ClassVar[tuple[float, ...] | None] = None
    compare: ClassVar[Literal["equal", "sum"]] = "equal"
    unit: ClassVar[str] = ""
    batch = 12
    epochs = 4
    loader_processes: ClassVar[tuple[int, ...]] = (0,)
    resumes: ClassVar[bool] = False
    trainings = 1
    is_terminated: ClassVar[bool] = False
    item_count: Callable[[Any], Any] | None = None
    scheduler_step: ClassVar[Literal["step", "metric"] | None] = None
    collate: Callable[[list[Any]], Any] | None = None
    sampler: TorchSampler[int] | None = None
    batch_sampler: Any = None
    state: Ema | None = None

    @classmethod
    def is_reference(cls) -> bool:
        """Whether others are compared with what one process does, without loader processes."""
        return cls.expected is None and cls.trainings == 1 and not (cls.resumes or cls.is_terminated)

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.data: Dataset[Any] = self.make_data()
        self.val_data: Dataset[Any] | None = None
        self.model = self.make_model()
        self.loss: Any = nn.functional.mse_loss
        self.rates: list[float] = []
        self.val_metric = 0.0
        self.prepare()
        self.optimizer = self.make_optimizer()
        self.optimizer.register_step_pre_hook(self._note_rate)

    def prepare(self) -> None:
        """Change what the constructor has made, before the optimizer is."""

    def make_data(self) -> Dataset[Any]:
        """Return a map-style data set, or a stream, of (inputs, targets)."""
        inputs = torch.randn(12, 2, generator=torch.Generator().manual_seed(3))
        return TensorDataset(inputs, inputs.sum(1, keepdim=True) ** 2)

    def make_model(self) -> nn.Module:
        """Return the model before the training."""
        return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))

    def make_optimizer(self) -> Optimizer:
        """Return an optimizer of the model's parameters, and of the loss's if it is a module."""
        own = [*self.loss.parameters()] if isinstance(self.loss, nn.Module) else []
        return SGD([*self.model.parameters(), *own], lr=0.1)

    def scheduler(self) -> Any:
        """Return a scheduler of the optimizer."""
        return None

    def metric(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return a value per sample, whose mean over the validation data is the metric."""
        return (outputs.argmax(1) == targets).float()

    def after_epoch(self, epoch: int) -> None:
        """Do what a callback does at the end of an epoch, from 1 on, to model, optimizer or data."""

    def values(self) -> list[float]:
        """Return what is compared, at the end."""
        own = [*self.loss.parameters()] if isinstance(self.loss, nn.Module) else []
        return [float(x) for p in [*self.model.parameters(), *own] for x in p.detach().flatten()]

    def loading(self) -> Mapping[str, Any]:
        """Return arguments of `DataLoader` that the user has, besides the number of samples."""
        chosen = {"collate_fn": self.collate, "sampler": self.sampler}
        return {name: value for name, value in chosen.items() if value is not None}

    def _note_rate(self, optimizer: Optimizer, *_: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


class Counts(nn.Module):
    """A linear model of one input, which notes what it is given in training: a number and its sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.given = nn.Linear(1, 1), []

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.given += inputs[:, 0].tolist()
        return self.layer(inputs)


class CountingIdiom(Idiom):
    """One epoch over numbered samples of which each must be trained on once, by any rank."""

    compare = "sum"
    unit = "samples"
    right = "each sample once"
    num_samples: ClassVar[int] = 24
    expected = (1.0,) * 24
    batch = 6
    epochs = 1

    def make_model(self) -> nn.Module:
        return Counts()

    def make_optimizer(self) -> Optimizer:
        return SGD(self.model.parameters(), lr=0.0)

    def values(self) -> list[float]:
        given = [int(number) for number in self.model.given]
        return [float(given.count(sample)) for sample in range(self.num_samples)]
