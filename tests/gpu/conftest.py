"""Tests of this machine's GPUs, the cheap and telling ones first; a report in Markdown beside that of JUnit."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import requirements
import torch
import warm
from launchers import QUICKEST, run_ranks, start

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
BUILD_S, AGAIN_S = 480.0, 240.0
"""Limit of a build that hangs; with less time than this left, Horovod is not installed again."""
BEGAN = time.monotonic()
Wait = Callable[[], float]
"""Waits until Horovod is installed; returns how long ago that began, in s."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --minutes, which `make test` does not have."""
    help = "how long all may take; tests for which no time is left are skipped"
    parser.addoption("--minutes", type=float, default=10.0, help=help)


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
            return 1, _needs_horovod(item), FIRST.index(name)
        return (2, False, LAST.index(name)) if name in LAST else (0, False, 0)

    items.sort(key=place)


def _needs_horovod(item: Any) -> bool:
    params = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return "horovod" in (*item.fixturenames, *params)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test where there is no GPU, or no time left."""
    if machine.KIND is None:
        pytest.skip("no GPU is visible: type make gpu-test")
    left_s = BEGAN + 60 * item.config.getoption("minutes") - time.monotonic()
    if left_s < (AGAIN_S if item.path.stem == LAST[-1] else machine.LIMIT_S):
        pytest.skip("no time left: GPU_ARGS='--minutes 60'")


@pytest.fixture(scope="session")
def install_horovod(gpu_environment: Mapping[str, str | None]) -> Callable[[str], AbstractContextManager[Wait]]:
    """Return a context that begins to install one for `nccl` or CPUs (`none`)."""

    @contextmanager
    def install(gpu: str) -> Iterator[Wait]:
        command, end = ["-m", "hvd_trainer", "install-horovod", "--gpu", gpu], time.monotonic() + BUILD_S
        with start("python", 1, command, env={**gpu_environment, **OF_BUILD}) as job:
            psutil.Process(job.popen.pid).nice(10)  # tests that run meanwhile have limits

            def wait() -> float:
                result = job.wait(max(1.0, end - time.monotonic()))
                warm.stop_shared()  # it has imported another one
                if gpu == "nccl" and result.returncode != 0 and shutil.which("nvcc") is None:
                    pytest.skip("needs nvcc, which compiles Horovod for NCCL")
                if result.returncode != 0:  # without the stack: the report has an equal text once
                    pytest.fail(job.report("Horovod was not installed"), pytrace=False)
                return result.seconds

            yield wait

    return install


@pytest.fixture(scope="session", autouse=True)
def _build(request: pytest.FixtureRequest, install_horovod: Any) -> Iterator[Wait | None]:
    """Install Horovod beside the first tests, which do without and leave most cores idle."""
    if not (machine.ON_CUDA and any(map(_needs_horovod, request.session.items))):
        yield None
        return
    with install_horovod("nccl") as wait:
        yield wait


@pytest.fixture(scope="session")
def horovod(_build: Wait | None) -> float:
    """Wait until there is a Horovod for this device; return after how long it was there, in s."""
    if _build is None and (reason := requirements.missing("horovod")) is not None:
        pytest.skip(reason)
    return 0.0 if _build is None else _build()


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
            check, num_processes=ranks, launcher=launcher, args=args, env=variables, timeout_s=machine.LIMIT_S
        )

    return run
