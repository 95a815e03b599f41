"""Tests of this machine's GPUs, the cheap and telling ones first; a report in Markdown beside that of JUnit."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import requirements
import torch
import warm
from launchers import QUICKEST, launch, run_ranks

from gpu import machine
from gpu.report import MarkdownReport

HERE = Path(__file__).parent
NO_GPU = 69
"""EX_UNAVAILABLE of sysexits.h."""
FIRST = ("test_installation", "test_training", "test_scripts", "test_failed_ranks", "test_streams")
LAST = ("test_several", "test_speed", "test_cpu_horovod")
"""Files of tests, in the order in which they run; of the first ones, those without Horovod before it is built."""
OF_BUILD = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}
"""Which NCCL and CUDA Horovod takes, the user may have said; the suite removes these variables later."""
BUILD_S, RANKS_S = 580.0, 500.0
"""Limits of what hangs; below that of a test."""


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """End at once where there is no GPU; else write the report, in the process that has all results."""
    if machine.KIND is None and not config.option.collectonly:
        why = f"PyTorch {torch.__version__} sees no GPU here ({machine.gpus_and_driver()})"
        print(f"gpu-test: {why}: run it on a machine with one", file=sys.stderr)
        return NO_GPU
    if getattr(config.option, "numprocesses", None):
        raise pytest.UsageError("gpu-test: all tests share the GPUs: leave -n out")
    if config.option.xmlpath and not hasattr(config, "workerinput"):
        facts = {**machine.facts(), "typed": shlex.join(["pytest", *config.invocation_params.args])}
        config.pluginmanager.register(MarkdownReport(Path(config.option.xmlpath).with_suffix(".md"), facts))
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put this folder's tests in order, behind all others."""

    def place(item: Any) -> tuple[int, bool, int]:
        name = item.path.stem if item.path.parent == HERE else ""
        if name in FIRST:
            params = item.callspec.params.values() if hasattr(item, "callspec") else ()
            return 1, "horovod" in (*item.fixturenames, *params), FIRST.index(name)
        return (2, False, LAST.index(name)) if name in LAST else (0, False, 0)

    items.sort(key=place)


@pytest.fixture(autouse=True)
def _gpu_is_there() -> None:
    if machine.KIND is None:
        pytest.skip("no GPU is visible: type make gpu-test")


@pytest.fixture(scope="session")
def install_horovod(gpu_environment: Mapping[str, str | None]) -> Callable[[str], float]:
    """Return a function that installs one for `nccl`, or for CPUs (`none`), and returns how long it took, in s."""

    def install(gpu: str) -> float:
        command = ["-m", "hvd_trainer", "install-horovod", "--gpu", gpu]
        result = launch("python", 1, command, env={**gpu_environment, **OF_BUILD}, timeout_s=BUILD_S, check=False)
        warm.stop_shared()  # it has imported another one
        if gpu == "nccl" and result.returncode != 0 and shutil.which("nvcc") is None:
            pytest.skip("needs nvcc, which compiles Horovod for NCCL")
        assert result.returncode == 0, result.stdout + result.stderr
        return result.seconds

    return install


@pytest.fixture(scope="session")
def horovod(install_horovod: Callable[[str], float]) -> float:
    """Install Horovod for this device; return how long that took, in s."""
    if machine.ON_CUDA:
        return install_horovod("nccl")
    if (reason := requirements.missing("horovod")) is not None:
        pytest.skip(reason)
    return 0.0


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> str:
    """Return the engine's name, once it is there."""
    if request.param == "horovod":
        request.getfixturevalue("horovod")
    return str(request.param)


@pytest.fixture
def in_ranks(pytestconfig: pytest.Config) -> machine.InRanks:
    """Return a function that runs a check in ranks on the GPUs: forked ones, or with --cold those of torchrun."""
    launcher = "torchrun" if pytestconfig.getoption("--cold") else QUICKEST

    def run(ranks: int, check: Callable[..., Any], *args: Any, env: Mapping[str, Any] | None = None) -> list[Any]:
        variables = {**machine.variables_of(ranks), **(env or {})}
        return run_ranks(
            check, num_processes=ranks, launcher=launcher, args=args, env=variables, timeout_s=RANKS_S
        )

    return run
