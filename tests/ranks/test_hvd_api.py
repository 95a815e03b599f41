"""`from hvd_trainer import hvd` has the names of Horovod's package, with their parameters."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

import pytest
import torch
from launchers import in_ranks, requires

from hvd_trainer.tools.run import horovod_package

pytestmark = pytest.mark.warm


def differences_from_horovod() -> list[str]:
    """Return each public name of the real package that is missing here, or takes other parameters."""
    import horovod.common.elastic
    import horovod.common.exceptions
    import horovod.common.process_sets
    import horovod.common.util
    import horovod.torch

    differences = []
    for real in (
        horovod.torch,
        horovod.torch.mpi_ops,
        horovod.torch.compression,
        horovod.torch.functions,
        horovod.torch.optimizer,
        horovod.torch.sync_batch_norm,
        horovod.torch.elastic,
        horovod.torch.elastic.sampler,
        horovod.torch.elastic.state,
        horovod.common.elastic,
        horovod.common.exceptions,
        horovod.common.process_sets,
        horovod.common.util,
    ):
        name = real.__name__.removeprefix("horovod.").removeprefix("torch").strip(".")
        ours = importlib.import_module(f"hvd_trainer.hvd.{name}".rstrip("."))
        for attribute, value in vars(real).items():
            # Constants know no home: those of these modules are Horovod's.
            has_constants = real in (horovod.torch, horovod.torch.mpi_ops)
            home = str(getattr(value, "__module__", real.__name__ if has_constants else ""))
            is_own = home.startswith("horovod") if real is horovod.torch else home == real.__name__
            if attribute.startswith("_") or inspect.ismodule(value) or not is_own or attribute in OF_EXTENSION:
                continue
            if inspect.isclass(value) and issubclass(value, torch.autograd.Function):
                continue  # how the functions are made differentiable
            if not hasattr(ours, attribute):
                differences.append(f"{real.__name__}.{attribute} is missing")
            elif inspect.isclass(value) and issubclass(value, Exception):
                assert issubclass(getattr(ours, attribute), value.__base__)
            elif callable(value) and parameters(value) not in (parameters(getattr(ours, attribute)), ANY):
                theirs, its = parameters(value), parameters(getattr(ours, attribute))
                differences.append(f"{real.__name__}.{attribute} takes {its} in place of {theirs}")
    return differences


def parameters(function: Callable[..., object]) -> list[tuple[str, object]]:
    """Return names and defaults; classes by their names; those of a function in Horovod's cache."""
    if inspect.isfunction(function):
        function = inspect.getclosurevars(function).nonlocals.get("f", function)
    return [
        (p.name, getattr(p.default, "__qualname__", str(p.default)))
        for p in inspect.signature(function).parameters.values()
    ]


ANY = [("args", "_empty"), ("kwargs", "_empty")]
"""What Horovod's `init` and `shutdown` take, and pass on to its basic object."""
OF_EXTENSION = (
    "get_ext_suffix",
    "get_extension_full_path",
    "check_installed_version",
    "check_extension",
    "HorovodBasics",
    "MPI",
)
"""About Horovod's compiled module, which does not exist here."""


@requires("horovod")
def test_names_and_parameters_are_horovods() -> None:
    (differences,) = in_ranks(1, differences_from_horovod)
    assert not differences, "\n".join(differences)


def differences_from_basics() -> list[str]:
    """Return each method of Horovod's basic object that ours has not, or that takes other parameters."""
    from horovod.torch.mpi_ops import _basics

    from hvd_trainer.hvd import mpi_ops

    names = [name for name in dir(_basics) if not name.startswith("_") and callable(getattr(_basics, name))]
    assert {"init", "rank", "nccl_built"} <= {*names}
    return [
        name
        for name in (*names, "_get_process_set_ids_and_ranks")
        if parameters(getattr(_basics, name)) != parameters(getattr(mpi_ops._basics, name))
    ]


@requires("horovod")
def test_basic_object_has_horovods_methods() -> None:
    """Libraries and Horovod's own tests call it in place of the functions."""
    (differences,) = in_ranks(1, differences_from_basics)
    assert not differences


@requires("horovod")
def test_horovod_run_has_horovods_parameters() -> None:
    import horovod

    assert parameters(horovod_package.run) == parameters(horovod.run)
