r"""The same bits on 1, 2, 4, ... ranks, on either engine, through any kill and resume.

Runs differ by the order of sums and by random numbers. So the global batch is cut into V virtual ranks, a power of
two that does not change with the number of ranks. The gradient of each is computed separately, with random numbers
seeded by (seed, step, virtual rank), and the V gradients are added in one order, as a binary tree:

    virtual ranks   0   1   2   3   4   5   6   7
                     \ /     \ /     \ /     \ /
                      +       +       +       +         the lower levels within a rank,
                       \     /         \     /
                        \   /           \   /
                          +               +             the upper ones between ranks (Collectives.tree_sum)
                            \           /
                                  +

With 2 ranks each has four of the leaves, with 4 ranks two. Logical workers that are independent of the processes
come from EasyScale (SC'23).

Batch norm: each virtual rank normalises by its own batch, as a rank would, and updates the running statistics that
the step began with. After the step they are the mean over the virtual ranks, and other buffers are virtual rank
0's, so that all ranks have the same buffers at all times.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from hvd_trainer.backends import StepResult
from hvd_trainer.backends.buffers import statistics_of
from hvd_trainer.config.options import TrainOptions
from hvd_trainer.data import Batch, mean_samples, samples_in
from hvd_trainer.observe.metrics import Meter
from hvd_trainer.optim.step import StepParts, TrainStep
from hvd_trainer.optim.weights import Share
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.rng import derive_seed, seed_all
from hvd_trainer.utils.tensors import pairwise_sum, parameters_of


class ReproducibleStep(TrainStep):
    """A step whose result depends on the virtual ranks, and not on the ranks that compute them.

    Args:
        parts: with model and optimizer as returned by `backend.prepare(..., exchange=False)`.
        virtual_ranks: their number on all ranks together; a multiple of the number of ranks.
        seed: seed of the run.
        find_unused_parameters: whether parameters may get no gradient.
    """

    def __init__(
        self, parts: StepParts, *, virtual_ranks: int, seed: int, find_unused_parameters: bool = False
    ) -> None:
        super().__init__(parts)
        self._virtual_ranks, self._seed = virtual_ranks, seed
        self._find_unused = find_unused_parameters
        self._parameters: list[Tensor] = []

    def __call__(self, batches: list[Batch], meter: Meter, prefetch: Callable[[], None]) -> StepResult:
        """Train on the batches of one step, which are sorted by virtual rank."""
        world = self.backend.world
        own = self._virtual_ranks // world.size
        passes = len(batches) // own
        shares = self.shares(batches)
        start = [(buffer, buffer.clone()) for buffer in self.buffers()]
        self._parameters = [p for p in parameters_of(self.optimizer) if p.requires_grad]
        sums = TreeSum()
        for number in range(own):
            seed_all(derive_seed(self._seed, self.progress.step, world.rank * own + number), self.backend.device)
            for buffer, value in start:
                buffer.copy_(value)
            for place in range(number * passes, (number + 1) * passes):
                self.backward(batches[place], shares[place], meter)
            sums.add(self._flatten(is_first=world.is_first and number == 0))
        self.backend.activity.enter("data")
        prefetch()
        self._unflatten([self.backend.collectives.tree_sum(part) for part in sums.total()])
        return self.update(meter, start)

    def shares(self, batches: list[Batch]) -> list[Share]:
        """Return what each batch is of the step of all ranks: their gradients are added, not averaged."""
        if self.weight is not None:
            return super().shares(batches)
        total = sum(map(mean_samples, batches)) * self.backend.world.size
        return [Share(samples_in(batch) / total) for batch in batches]

    def mean_weight(self, weights: Tensor) -> Tensor:
        """Return the weight of the step of all ranks, added up over virtual ranks as their gradients are."""
        parts = weights.chunk(self._virtual_ranks // self.backend.world.size)
        own = pairwise_sum([part.sum() for part in parts])
        return self.backend.collectives.tree_sum(own.reshape(1))

    def _flatten(self, *, is_first: bool) -> list[Tensor]:
        """Return a virtual rank's gradients and buffers as one flat tensor per dtype; clears the gradients.

        Args:
            is_first: whether it is virtual rank 0, whose buffers the others get, apart from statistics.
        """
        if not self._find_unused:
            self.backend.check_unused(self.optimizer)
        flats = []
        statistics = {buffer for module in self.modules for buffer in statistics_of(module).values()}
        for dtype, parameters, buffers in self._by_type():
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            for buffer in buffers:
                if buffer in statistics:
                    # The sum over virtual ranks is the mean: division by a power of two is exact.
                    parts.append(buffer / self._virtual_ranks)
                else:
                    parts.append(buffer if is_first else torch.zeros_like(buffer))
            flat = [part.detach().reshape(-1).to(dtype) for part in parts]
            if self._find_unused:
                used = [p.grad is not None for p in parameters]
                flat.append(torch.tensor(used, dtype=flat[0].dtype, device=self.backend.device))
            flats.append(torch.cat(flat))
        for parameter in self._parameters:
            parameter.grad = None
        return flats

    def _unflatten(self, sums: list[Tensor]) -> None:
        """Set gradients and buffers to the sums over all virtual ranks."""
        for total, (_, parameters, buffers) in zip(sums, self._by_type(), strict=True):
            tensors = [*parameters, *buffers]
            lengths = [tensor.numel() for tensor in tensors]
            parts = total[: sum(lengths)].split(lengths)
            used = total[sum(lengths) :].tolist() if self._find_unused else [1.0] * len(parameters)
            for parameter, part, count in zip(parameters, parts, used, strict=False):
                parameter.grad = part.view_as(parameter) if count else None
            for buffer, part in zip(buffers, parts[len(parameters) :], strict=True):
                buffer.copy_(part.view_as(buffer))

    def _by_type(self) -> Iterator[tuple[torch.dtype, list[Tensor], list[Tensor]]]:
        """Yield the trained parameters and the buffers of one dtype at a time; booleans are sent as bytes."""
        kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for place, tensors in enumerate((self._parameters, self.buffers())):
            for tensor in tensors:
                dtype = torch.uint8 if tensor.dtype == torch.bool else tensor.dtype
                kinds.setdefault(dtype, ([], []))[place].append(tensor)
        for dtype, (parameters, buffers) in kinds.items():
            yield dtype, parameters, buffers


class TreeSum:
    """Adds lists of tensors that come one after the other, in the order of `pairwise_sum`.

    Like a binary counter: two sums of n leaves make one of 2 n. So log2(n) + 1 lists are in memory, not n.
    """

    def __init__(self) -> None:
        self._levels: list[tuple[int, list[Tensor]]] = []

    def add(self, tensors: list[Tensor]) -> None:
        """Add the next leaf."""
        level = 0
        while self._levels and self._levels[-1][0] == level:
            earlier = self._levels.pop()[1]
            tensors = [pairwise_sum([left, right]) for left, right in zip(earlier, tensors, strict=True)]
            level += 1
        self._levels.append((level, tensors))

    def total(self) -> list[Tensor]:
        """Return the sum; the number of leaves must be a power of two."""
        ((_, tensors),) = self._levels
        return tensors


def set_cublas_workspace() -> None:
    """Make cuBLAS deterministic. It reads this once, at the process's first matrix product on a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def computing(options: TrainOptions, device: torch.device) -> Iterator[None]:
    """Compute inside as the options say: with `--tf32`, and with `--reproducible`."""
    with ExitStack() as stack:
        if options.tf32:
            stack.enter_context(accelerator.tf32())
        if options.reproducible is not None:
            stack.enter_context(deterministic_algorithms(device))
        yield


@contextmanager
def deterministic_algorithms(device: torch.device) -> Iterator[None]:
    """Use deterministic algorithms inside; PyTorch refuses an operation that has none with an error that names it.

    On CPUs with one thread, because the number of threads changes the order of sums.
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
