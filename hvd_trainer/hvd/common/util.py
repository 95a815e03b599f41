"""The helpers of `horovod.common.util` that scripts import."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from packaging.version import Version

from hvd_trainer.hvd.common import basics
from hvd_trainer.utils.process import set_variables

T = TypeVar("T")

EXTENSIONS = ["torch"]
"""The frameworks that this package serves."""

_cache = functools.cache
"""`functools.cache`, which the launcher of an installed Horovod imports from here."""


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether operations exist for a framework: `torch` alone."""
    return ext_base_name in EXTENSIONS


def mpi_built(verbose: bool = False) -> bool:
    """Return whether MPI is used: never."""
    return basics.mpi_built()


ddl_built = ccl_built = mpi_built


def gloo_built(verbose: bool = False) -> bool:
    """Return whether this PyTorch has Gloo."""
    return basics.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    """Return NCCL's version as a number; 0 if this PyTorch has none."""
    return basics.nccl_built()


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError unless operations exist for a framework, such as `horovod.torch`."""
    if ext_name.rpartition(".")[2] not in EXTENSIONS:
        raise ImportError(f"{ext_name} is not served by hvd_trainer, which runs PyTorch only.")


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether PyTorch sees a GPU."""
    return ext_base_name in EXTENSIONS and torch.accelerator.is_available()


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables inside the block; those that are None stay as they are."""
    with set_variables({name: value for name, value in kwargs.items() if value is not None}):
        yield


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[int | None, bool | None], int]:
    """Return the function that makes a reduction of the parameters `op` and `average`.

    Args:
        reduce_ops: has `Average` and `Sum`.
    """

    def choose(op: int | None, average: bool | None) -> int:
        if op is not None:
            if average is not None:
                raise ValueError("The op parameter supersedes average. Please provide only one of them.")
            return op
        if average is None:
            return int(reduce_ops.Average)
        warnings.warn(
            "Parameter `average` has been replaced with `op` and will be removed in v1.0",
            DeprecationWarning,
            stacklevel=3,
        )
        return int(reduce_ops.Average if average else reduce_ops.Sum)

    return choose


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number of ranks is a power of two, as Adasum needs it."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: Sequence[T], n: int) -> list[Sequence[T]]:  # noqa: E741  Horovod's name
    """Return `n` consecutive parts of a list, whose lengths differ by one at most."""
    base, rest = divmod(len(l), n)
    starts = [part * base + min(part, rest) for part in range(n + 1)]
    return [l[begin:end] for begin, end in zip(starts, starts[1:], strict=False)]


def is_iterable(x: object) -> bool:
    """Return whether a value can be iterated over."""
    try:
        iter(x)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether a version is `target`, which has three numbers, or later.

    Raises:
        ValueError: not texts, or the target has not three numbers.
    """
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"Versions are texts, not {ver!r} and {target!r}.")
    if len(target.split(".")) != 3:
        raise ValueError(f"The target version has the form major.minor.patch, not {target!r}.")
    return Version(ver) >= Version(target)
