"""The suite polices itself: what a test changes it puts back, what it starts it ends."""

from __future__ import annotations

import gc
import logging
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import child_environment
import process_tree
import psutil
import pytest
import slurm_cluster
import warm

from benchmarks import NO_GPUS

_SET_BY_IMPORTS = {
    # pytest itself
    "PYTEST_CURRENT_TEST",
    # torch, once in a process
    "TORCHINDUCTOR_CACHE_DIR",
}

TIERS = ("cluster", "pretend", "launchers", "ranks", "unit")
"""The folders of tests, those with the longest files first."""
_LEFT_BEHIND = pytest.StashKey[str]()
_GPUS = pytest.StashKey[dict[str, str]]()
"""The variables that choose GPUs, as they were."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --cold."""
    parser.addoption(
        "--cold", action="store_true", help="launchers start all processes, for tests marked warm, too"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Remove the variables of the launcher or make that started pytest, and mark what the session starts."""
    for name in [name for name in os.environ if child_environment.is_rank_variable(name)]:
        del os.environ[name]
    # A make inside `make test` would take over its options, and say that it enters and leaves a folder. And ranks
    # without a buffer write a line in two parts, so that those of two ranks mix.
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHONUNBUFFERED"):
        os.environ.pop(name, None)
    # Ranks would share a GPU, or one that is in use, and have another arithmetic than the CPU's.
    config.stash[_GPUS] = {name: os.environ[name] for name in NO_GPUS if name in os.environ}
    os.environ.update(NO_GPUS)
    # A shell that starts a job in the background lets it ignore Ctrl-C, and a program inherits that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Under nohup SIGHUP is ignored, and a program inherits that; a handler that does nothing is not inherited.
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    # A run inside a test of another run carries that one's mark in front.
    outer = os.environ.get(process_tree.MARK, "")
    os.environ[process_tree.MARK] = f"{outer}/pytest-{secrets.token_hex(8)}".lstrip("/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tiers with the longest files first, so that none of these is left alone at the end."""
    items.sort(key=lambda item: next((n for n, tier in enumerate(TIERS) if tier in item.path.parts), len(TIERS)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let what launchers start come from the warm server where a test or its file is marked so."""
    marker = item.get_closest_marker("warm")
    warm.is_used = marker is not None and marker.args != (False,) and not item.config.getoption("--cold")


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """Return what was logged since the last call."""
    caplog.set_level(logging.INFO, logger="hvd_trainer")

    def read() -> str:
        text = "\n".join([*caplog.messages, ""])
        caplog.clear()
        return text

    return read


@pytest.fixture(autouse=True)
def _random_numbers_are_the_same_in_each_run() -> None:
    random.seed(0)
    # Not imported here: a test that does not use torch shall not wait for it.
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def _environment_is_restored() -> Iterator[None]:
    before = dict(os.environ)
    folders = list(sys.path)
    yield
    if sys.path != folders:
        added = [folder for folder in sys.path if folder not in folders]
        sys.path[:] = folders
        pytest.fail(f"the test left changes in sys.path: {', '.join(added)}")
    changed = {
        name
        for name in before.keys() | os.environ.keys()
        if name not in _SET_BY_IMPORTS and before.get(name) != os.environ.get(name)
    }
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    if changed:
        pytest.fail(f"the test left changes in os.environ: {', '.join(sorted(changed))}")


@pytest.fixture(scope="session")
def gpu_environment(pytestconfig: pytest.Config) -> dict[str, str | None]:
    """Return what to change in the environment for a process that shall see GPUs; None removes a variable."""
    return {**dict.fromkeys(NO_GPUS), **pytestconfig.stash[_GPUS]}


@pytest.fixture(autouse=True)
def _gpus_are_seen_by_tests_of_them(
    request: pytest.FixtureRequest, gpu_environment: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Show GPUs to tests marked `gpu` and their children; PyTorch in this process may have counted none before."""
    if request.node.get_closest_marker("gpu") is not None:
        for name, value in gpu_environment.items():
            if value is None:
                monkeypatch.delenv(name)
            else:
                monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def _process_groups_are_destroyed() -> Iterator[None]:
    yield
    # Not imported here: a test that does not use torch shall not wait for it.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("the test left torch.distributed's process group initialised")


@pytest.fixture
def lone_backend() -> Iterator[Any]:
    """Return the engine of one process, started."""
    # Not imported above: a test that does not train shall not wait for it.
    from hvd_trainer.backends import EngineOptions, create

    with create(EngineOptions(backend="single")) as backend:
        yield backend


@pytest.fixture(scope="session")
def slurm() -> slurm_cluster.SlurmCluster:
    """Return the session's private Slurm of three nodes with 8 CPUs; the session's end stops it."""
    reason = slurm_cluster.missing()
    if reason is not None:
        pytest.skip(reason)
    return slurm_cluster.shared()


@pytest.fixture(scope="session")
def mnist_dir(pytestconfig: pytest.Config) -> Path:
    """Return the folder beside the repository with MNIST's files as torchvision lays them out."""
    folder = pytestconfig.rootpath / "../shared/data/mnist"
    if not (folder / "MNIST/raw").is_dir():
        pytest.skip("no MNIST in ../shared/data/mnist (torchvision's layout, MNIST/raw/...)")
    return folder.resolve()


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return Horovod's published source, fetched and checked as the installer does it."""
    # Not imported above: a test that does not build Horovod shall not wait for it.
    from hvd_trainer.horovod_build.build_steps import BuildSteps
    from hvd_trainer.horovod_build.errors import InstallError

    folder = tmp_path_factory.mktemp("published")
    steps = BuildSteps(folder, folder / "log")
    try:
        steps.fetch_tools()
        return steps.fetch_source()
    except InstallError as error:
        if "no network" not in error.found:
            raise
        pytest.skip(f"needs a package index to fetch Horovod's source from: {error.found}")


@pytest.fixture(scope="session")
def patched(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return Horovod's published source with our patches applied."""
    from hvd_trainer.horovod_build.patch_set import apply_patches

    source = tmp_path_factory.mktemp("patched") / published.name
    shutil.copytree(published, source)
    tools = published.parent / "tools"
    apply_patches(source, tools, cxx_standard=20, record={"torch": "2.15.0", "cuda": None})
    return source


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 4 MB; return its folder."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"this machine lets nobody mount a file system: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def _is_pythons_own_helper(process: psutil.Process) -> bool:
    """Return whether this is multiprocessing's helper, which lives as long as the process that first needed it."""
    try:
        command = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return True
    return "multiprocessing.resource_tracker" in command or "multiprocessing.forkserver" in command


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if anything that it started is still there."""
    gc.collect()  # a loader in the traceback of an expected error has its processes until then
    slurm_cluster.stop_shared()
    warm.stop_shared()
    started = process_tree.with_descendants(
        [
            *psutil.Process().children(recursive=True),
            *process_tree.marked(os.environ[process_tree.MARK]),
        ]
    )
    watched = [process for process in started if not _is_pythons_own_helper(process)]
    left = process_tree.wait_for_end(watched, limit_s=3)
    if left:
        session.config.stash[_LEFT_BEHIND] = process_tree.describe(left)
        process_tree.kill(left)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the processes that the tests left behind."""
    if _LEFT_BEHIND in config.stash:
        terminalreporter.section("FAILED: processes left behind by the tests (killed now)", red=True)
        terminalreporter.write_line(config.stash[_LEFT_BEHIND])


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return a real browser, by Playwright."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no browser on this machine: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()
