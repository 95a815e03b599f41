"""The batches of a PyTorch `DataLoader`: those that one process draws, each shared out over the ranks.

    drawn     7 2 9 4 1 | 0 5 1 8 3 | 6 2       3 ranks
    rank 0    7     4   | 0     8   | 6         2/5, 2/5, 1/2 of a step's loss
    rank 1      2     1 |   5     3 |   2       2/5, 2/5, 1/2
    rank 2        9     |     1     | (6)       1/5, 1/5, 0

A sampler's order and the batches of a batch sampler are kept, and what a step trains on does not depend on the
number of ranks.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from hvd_trainer.backends import Backend
from hvd_trainer.data.shard import EVALUATION, BatchKey, Chosen
from hvd_trainer.errors import DataError
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.rng import derive_seed, isolated_rng, seed_all

MAX_REPEATS = 100
"""How often, on average, a sampler may draw each sample in an epoch. One without an end draws more."""


def unsupported(loader: DataLoader[Any]) -> Iterator[str]:
    """Yield a message for each thing that a `DataLoader` asks for and cannot be kept."""
    kind = type(loader).__name__
    if type(loader).__iter__ is not DataLoader.__iter__:
        yield (
            f"{kind} makes its batches in an __iter__ of its own, which would not be called: give a DataLoader of "
            f"its data set, or a BatchSource"
        )
    if loader.batch_sampler is None:
        yield (
            f"{kind} has batch_size=None, so its data set gives ready batches: let it give samples, or give a "
            f"BatchSource"
        )
    if any(isinstance(sampler, DistributedSampler) for sampler in _samplers_of(loader)):
        yield (
            f"{kind} has a DistributedSampler, and the trainer itself shares its batches out over the ranks: "
            f"leave the sampler out, and write shuffle=True if it shuffled"
        )
    if not loader.in_order:
        yield f"{kind} has in_order=False, and a resume needs batches in one order: leave it out"


def _samplers_of(loader: DataLoader[Any]) -> list[Any]:
    """Return the samplers of a `DataLoader`, with those inside others."""
    samplers: list[Any] = []
    following: list[Any] = [loader.batch_sampler]
    while following:
        sampler = following.pop(0)
        if sampler is not None and all(sampler is not other for other in samplers):
            samplers.append(sampler)
            following += [getattr(sampler, name, None) for name in ("batch_sampler", "sampler")]
    return samplers


def draw_batches(data: Any, backend: Backend, seed: int) -> DrawnBatches | None:
    """Return the batches of a `DataLoader`; None for other data, and for a stream. A collective."""
    if not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset):
        return None
    return DrawnBatches(data, backend, seed)


class DrawnBatches:
    """The indices of a `DataLoader`'s batches, epoch by epoch, the same on all ranks.

    `torch.Generator`s of the loader and its samplers continue from one epoch to the next, as in PyTorch, and the
    state of this object has theirs. While batches are drawn, the global generators are seeded by seed and epoch.
    `set_epoch` of samplers that have it is called before. All generators are as they were afterwards.

    Making one is a collective.

    Args:
        loader: over a data set with indices.

    Attributes:
        batch_size: samples of the longest batch, in the first epoch.
        num_samples, num_batches: in the first epoch.
        generators: those of the loader and its samplers.

    Raises:
        DataError: no batch is drawn, or an empty one, or they do not end; they are others when they are drawn
            again, or on another rank.
    """

    def __init__(self, loader: DataLoader[Any], backend: Backend, seed: int) -> None:
        self._loader, self._backend, self._seed = loader, backend, seed
        self._samplers = _samplers_of(loader)
        own = [value for one in self._samplers for value in getattr(one, "__dict__", {}).values()]
        generators = [value for value in (loader.generator, *own) if isinstance(value, torch.Generator)]
        self.generators = list(dict.fromkeys(generators))
        self._start = self._get_states()
        self._states = {0: self._start}
        batches = self._draw(0)
        if batches != self._draw(0):
            raise DataError(
                f"{self._names} gave other samples when it was asked for the same epoch again, so that no resume "
                f"could continue it. Let it draw from a torch.Generator that is one of its attributes, or from "
                f"the global generators of torch, NumPy or random; or seed its own in a method set_epoch(epoch)."
            )
        self.batch_size = max(map(len, batches))
        self.num_samples, self.num_batches = sum(map(len, batches)), len(batches)

    @property
    def is_regular(self) -> bool:
        """Whether batches have one size, but for the last, and epochs equally many: no sampler has made them."""
        return type(self._loader.batch_sampler) is BatchSampler

    @property
    def _names(self) -> str:
        return " with ".join(type(sampler).__name__ for sampler in self._samplers)

    def training(
        self, epoch: int, parts: Sequence[int], size: int, *, accumulate: int = 1, consumed: int = 0
    ) -> list[Chosen]:
        """Return one rank's training batches of an epoch: those of each step together, part by part. A collective.

        Args:
            parts: of each batch: the rank's own number, or those of its virtual ranks.
            size: number of parts of a batch.
            accumulate: batches of a step.
            consumed: samples of the epoch, of all ranks, to skip.

        Raises:
            DataError: as for the constructor; or no batch begins after so many samples.
        """
        batches = self._after(self._draw(epoch), consumed)
        starts = itertools.accumulate(map(len, batches), initial=consumed)
        placed = list(zip(starts, batches, strict=False))
        steps = (placed[first : first + accumulate] for first in range(0, len(placed), accumulate))
        return [_share(batch, start, part, size) for step in steps for part in parts for start, batch in step]

    def evaluation(self, number: int, size: int) -> list[Chosen]:
        """Return the share of one rank of each batch of an evaluation: never padded. A collective."""
        batches = self._draw(EVALUATION)
        starts = itertools.accumulate(map(len, batches), initial=0)
        placed = zip(starts, batches, strict=False)
        return [_share(batch, start, number, size) for start, batch in placed if number < len(batch)]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of generators before the epoch that was drawn last, and before the next one."""
        return {"generators": self._states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned.

        Raises:
            ValueError: it is of another number of generators.
        """
        states = state["generators"]
        for tensors in states.values():
            if len(tensors) != len(self.generators):
                raise ValueError(f"{len(tensors)} generators of samplers, for {len(self.generators)} of this job")
            for tensor in tensors:
                torch.Generator().set_state(tensor)
        self._states = states

    def _after(self, batches: list[list[Any]], consumed: int) -> list[list[Any]]:
        """Return the batches that are left of an epoch."""
        if not consumed:
            return batches
        size = self._loader.batch_size
        if self.is_regular and size is not None:
            # Only the order is the sampler's: a run may resume with batches of another size.
            order = list(itertools.chain.from_iterable(batches))
            return [order[first : first + size] for first in range(consumed, len(order), size)]
        done = 0
        for place, batch in enumerate(batches):
            if done == consumed:
                return batches[place:]
            done += len(batch)
        if done == consumed:
            return []
        raise DataError(
            f"The checkpoint was saved after {consumed} samples of the epoch, and {self._names} begins no batch "
            f"there. Give the sampler that it was saved with, or begin the epoch again: --resume-partial data"
        )

    def _draw(self, epoch: int) -> list[list[Any]]:
        """Return all batches of an epoch. A collective."""
        before = self._get_states()
        start = self._states.get(epoch, self._start)
        with isolated_rng(accelerator.CPU):
            seed_all(derive_seed(self._seed, epoch), accelerator.CPU)
            self._set_states(start)
            for sampler in self._samplers:
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(max(0, epoch))
            if self._loader.generator is not None:
                # A DataLoader draws its processes' seed from it, before it asks the sampler.
                torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
            assert self._loader.batch_sampler is not None
            batches = self._read(self._loader.batch_sampler)
            if epoch != EVALUATION:
                self._states = {epoch: start, epoch + 1: self._get_states()}
        self._set_states(before)
        self._check_alike(batches)
        return batches

    def _read(self, sampler: Iterable[Any]) -> list[list[Any]]:
        """Return all batches of a sampler."""
        data = self._loader.dataset
        limit = MAX_REPEATS * len(data) if hasattr(data, "__len__") else None
        batches, samples = [], 0
        for batch in sampler:
            batches.append(list(batch))
            samples += len(batches[-1])
            if not batches[-1]:
                raise DataError(f"{self._names} gave an empty batch: leave it out.")
            if limit is not None and samples > limit:
                raise DataError(
                    f"{self._names} gave more than {limit:,} samples, {MAX_REPEATS} times those of the data set, "
                    f"and does not end. The order of an epoch is drawn at its start: let the sampler end it."
                )
        if not batches:
            raise DataError(f"{self._names} gave no batch: give it more samples, or leave out drop_last=True.")
        return batches

    def _check_alike(self, batches: list[list[Any]]) -> None:
        if self._backend.world.size == 1:
            return
        digest = hashlib.blake2b(repr(batches).encode(), digest_size=16).hexdigest()
        if len(set(self._backend.collectives.all_gather_object(digest))) > 1:
            raise DataError(
                f"{self._names} gave each rank other samples, and the trainer itself shares the same batches out "
                f"over the ranks. Leave the sharding to it, and seed the sampler alike on all ranks."
            )

    def _get_states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self.generators]

    def _set_states(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)


def _share(batch: list[Any], start: int, part: int, size: int) -> Chosen:
    """Return a part's samples of a batch; of a batch that has none for it one that does not count.

    Args:
        start: samples of the epoch before the batch.
    """
    count = len(batch)
    places = range(part, count, size) or [part % count]
    indices, numbers = [batch[place] for place in places], [start + place for place in places]
    # The seeds of samples are those of their places: a sampler may draw one sample several times.
    return Chosen(BatchKey(start, part), indices, numbers, len(range(part, count, size)), count)
