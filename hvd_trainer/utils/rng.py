"""Random number generators: their state, for checkpoints, and isolated numbers for data.

What a transform draws depends on the seed, the epoch and the sample only: not on the number of ranks and workers,
on prefetching, or on where a run was interrupted. Nor does it change the state that dropout draws from, or the
time at which a batch is fetched would change the training.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

from hvd_trainer.utils import accelerator

T = TypeVar("T")


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the state of PyTorch's generators on the CPU and this rank's device, of `random`, and of NumPy.

    Tensors and plain values only, for a checkpoint.
    """
    kind, keys, *rest = np.random.get_state()
    state: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tolist(), *rest),
    }
    if not accelerator.is_host(device):
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_rng_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore a state that `rng_state` returned."""
    torch.set_rng_state(state["cpu"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if not accelerator.is_host(device) and device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], device)


def check_rng_state(state: Mapping[str, Any]) -> None:
    """Check a state from a file by loading it into separate generators.

    Raises:
        TypeError, ValueError, LookupError, RuntimeError: it is not valid.
    """
    torch.Generator().set_state(state["cpu"])
    random.Random().setstate(state["python"])
    np.random.RandomState().set_state(state["numpy"])


def derive_seed(*numbers: int) -> int:
    """Return a seed of 63 bits: the hash of the numbers, so that seeds of other numbers are unrelated."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def seed_all(seed: int, device: torch.device) -> None:
    """Seed all generators of `rng_state`: about 10 us, since GPUs that this rank does not use are left out."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if not accelerator.is_host(device):
        accelerator.seed(seed, device)


def iterate_isolated(items: Iterable[T], seed: int, device: torch.device) -> Iterator[T]:
    """Yield the items; while each is computed, random numbers are a sequence of their own, from this seed."""
    iterator, state = iter(items), None
    while True:
        with isolated_rng(device):
            if state is None:
                seed_all(seed, device)
            else:
                set_rng_state(state, device)
            try:
                item = next(iterator)
            except StopIteration:
                return
            state = rng_state(device)
        yield item


@contextmanager
def isolated_rng(device: torch.device) -> Iterator[None]:
    """Restore the state of all generators at the end of the context."""
    before = rng_state(device)
    try:
        yield
    finally:
        set_rng_state(before, device)
