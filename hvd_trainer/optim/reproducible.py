r"""The same bits on 1, 2, 4, ... ranks, on either engine, through any kill and resume.

What makes runs differ is the order of sums, and random numbers. So the global batch is cut into V virtual ranks, a
power of two that does not change with the number of ranks. The gradient of each is computed apart, with random
numbers seeded by (seed, step, virtual rank), and the V gradients are added in one order, pairs of pairs:

    virtual ranks   0   1   2   3   4   5   6   7
                     \ /     \ /     \ /     \ /
                      +       +       +       +         the lower levels within a rank,
                       \     /         \     /
                        \   /           \   /
                          +               +             the upper ones between ranks (Backend.tree_sum)
                            \           /
                                  +

With 2 ranks each has four of the leaves, with 4 ranks two. Logical workers that stay while the processes change
are EasyScale's idea (SC'23).

Batch norm: each virtual rank normalises by its own batch, as a rank would, and from the running statistics that
the step began with. After the step they are the mean of what the virtual ranks made of them, so that all ranks
have the same at all times.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hvd_trainer.backends import StepResult
from hvd_trainer.backends.base import pairwise_sum
from hvd_trainer.backends.model_sync import check_unused
from hvd_trainer.data import Batch, samples_in
from hvd_trainer.observe.metrics import Meter
from hvd_trainer.optim.step import StepParts, TrainStep
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.rng import seed_all, seed_of
from hvd_trainer.utils.tensors import parameters_of


class ReproducibleStep(TrainStep):
    """A step whose result depends on the virtual ranks, and not on who computes them.

    Args:
        parts: with model and optimizer as returned by `backend.prepare(..., exchange=False)`.
        virtual_ranks: how many there are in all; the ranks divide them.
        seed: of the run.
    """

    def __init__(
        self, parts: StepParts, *, virtual_ranks: int, seed: int, find_unused_parameters: bool = False
    ) -> None:
        super().__init__(parts)
        self._virtual_ranks, self._seed = virtual_ranks, seed
        self._find_unused = find_unused_parameters
        self._names: dict[Tensor, str] = {p: name for name, p in parts.model.named_parameters()}
        self._parameters = [p for p in parameters_of(parts.optimizer) if p.requires_grad]

    def __call__(self, window: list[Batch], meter: Meter, meanwhile: Callable[[], None]) -> StepResult:
        """Trains on one window: the passes of this rank's virtual ranks, one virtual rank after the other."""
        world = self.backend.world
        mine = self._virtual_ranks // world.size
        passes = len(window) // mine
        total = sum(map(samples_in, window)) * world.size
        start = [buffer.clone() for buffer in self._buffers]
        sums = TreeSum()
        for number in range(mine):
            seed_all(seed_of(self._seed, self.progress.step, world.rank * mine + number), self.backend.device)
            for buffer, value in zip(self._buffers, start, strict=True):
                buffer.copy_(value)
            for batch in window[number * passes : (number + 1) * passes]:
                count = samples_in(batch)
                self.backward(batch, count / total, meter)
            sums.add(self._gathered())
        self.backend.activity.enter("data")
        meanwhile()
        self._spread([self.backend.tree_sum(part) for part in sums.total()])
        return self.update(meter, start)

    def _gathered(self) -> list[Tensor]:
        """This virtual rank's gradients and statistics, flat, one tensor per type; the gradients are gone then."""
        if not self._find_unused:
            check_unused(self._names, self.optimizer)
        flats = []
        for parameters, buffers in self._by_type():
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            # The mean of statistics: a power of two divides without rounding.
            parts += [buffer / self._virtual_ranks for buffer in buffers]
            flat = [part.detach().reshape(-1) for part in parts]
            if self._find_unused:
                used = [p.grad is not None for p in parameters]
                flat.append(torch.tensor(used, dtype=flat[0].dtype, device=self.backend.device))
            flats.append(torch.cat(flat))
        for parameter in self._parameters:
            parameter.grad = None
        return flats

    def _spread(self, sums: list[Tensor]) -> None:
        """Makes the sums the gradients and statistics of the step."""
        for total, (parameters, buffers) in zip(sums, self._by_type(), strict=True):
            tensors = [*parameters, *buffers]
            lengths = [tensor.numel() for tensor in tensors]
            parts = total[: sum(lengths)].split(lengths)
            used = total[sum(lengths) :].tolist() if self._find_unused else [1.0] * len(parameters)
            for parameter, part, count in zip(parameters, parts, used, strict=False):
                parameter.grad = part.view_as(parameter) if count else None
            for buffer, part in zip(buffers, parts[len(parameters) :], strict=True):
                buffer.copy_(part.view_as(buffer))

    def _by_type(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Trained parameters and floating-point buffers of one type at a time, those that have the same bits."""
        buffers = [b for b in self._buffers if b.is_floating_point()]
        for dtype in dict.fromkeys(tensor.dtype for tensor in [*self._parameters, *buffers]):
            yield [p for p in self._parameters if p.dtype == dtype], [b for b in buffers if b.dtype == dtype]


class TreeSum:
    """Adds up lists of tensors that come one after the other, in the order of `pairwise_sum`.

    As in a binary counter: two sums of as many make one of twice as many. So log2(n) + 1 lists are kept, not n.
    """

    def __init__(self) -> None:
        self._levels: list[tuple[int, list[Tensor]]] = []

    def add(self, tensors: list[Tensor]) -> None:
        """The next leaf."""
        level = 0
        while self._levels and self._levels[-1][0] == level:
            earlier = self._levels.pop()[1]
            tensors = [pairwise_sum([left, right]) for left, right in zip(earlier, tensors, strict=True)]
            level += 1
        self._levels.append((level, tensors))

    def total(self) -> list[Tensor]:
        """The sum of a power of two of leaves."""
        ((_, tensors),) = self._levels
        return tensors


def ask_cublas() -> None:
    """Has cuBLAS compute in one way; it is read once, at the process's first product of matrices on a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def one_way_to_compute(device: torch.device) -> Iterator[None]:
    """Inside, each operation is computed in one way only, or refused by PyTorch with an error that names it.

    On CPUs with one thread: how many share an operation changes the order of its sums.
    """
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    benchmark = torch.backends.cudnn.benchmark
    memory: Any = torch.utils.deterministic  # its attribute is made at import, which mypy does not see
    fills = memory.fill_uninitialized_memory
    if accelerator.is_host(device):
        torch.set_num_threads(1)
    else:
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    # PyTorch would fill each new tensor with NaN first, which its operations then overwrite.
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.benchmark = benchmark
        memory.fill_uninitialized_memory = fills
        torch.set_num_threads(threads)
