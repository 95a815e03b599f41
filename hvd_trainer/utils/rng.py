"""Random numbers: the state that a run goes on from, and those of data, which are kept apart from it.

What a transform draws depends on the seed, the epoch and the sample, and on nothing that changes from run to run:
how many ranks and workers there are, what was fetched ahead, where a run was interrupted. And it leaves the state
that dropout draws from as it was, or fetching a batch sooner would change the training.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from hvd_trainer.utils import accelerator

T = TypeVar("T")


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of PyTorch on the CPU and on this rank's GPU, of Python's random and of NumPy.

    Tensors and plain values, as a checkpoint holds them.
    """
    state: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    if not accelerator.is_host(device):
        state[device.type] = accelerator.rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Goes on where `random_state` was taken."""
    torch.set_rng_state(state["cpu"])
    random.setstate(state["python"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    if not accelerator.is_host(device) and device.type in state:
        accelerator.set_rng_state(state[device.type], device)


def check_random_state(state: Mapping[str, Any]) -> None:
    """Tries a state from elsewhere, on generators of its own.

    Raises:
        TypeError, ValueError, LookupError, RuntimeError: it is none.
    """
    torch.Generator().set_state(state["cpu"])
    random.Random().setstate(state["python"])
    if "numpy" in state:
        import numpy

        numpy.random.RandomState().set_state(state["numpy"])


def seed_of(*numbers: int) -> int:
    """A seed of 63 bits: the same for the same numbers, unrelated for others."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def seed_all(seed: int, device: torch.device) -> None:
    """Seeds all that `random_state` holds; some 10 us, since GPUs that this rank does not use are left out."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    if not accelerator.is_host(device):
        accelerator.seed(seed, device)


def isolated_rng(items: Iterable[T], seed: int, device: torch.device) -> Iterator[T]:
    """The items, with random numbers of their own while each is made, beginning with this seed."""
    iterator, state = iter(items), None
    while True:
        with apart(device):
            if state is None:
                seed_all(seed, device)
            else:
                set_random_state(state, device)
            try:
                item = next(iterator)
            except StopIteration:
                return
            state = random_state(device)
        yield item


@contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """What is drawn inside changes nothing outside."""
    before = random_state(device)
    try:
        yield
    finally:
        set_random_state(before, device)
