"""The Horovod installer, and the errors that its users can meet."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from install_checks import NO_NETWORK, ROOT, put_nccl, script, tool_folder
from waiting import PATIENCE_S, wait_for

from hvd_trainer.horovod_build import facts, toolchain
from hvd_trainer.horovod_build import installer as tool
from hvd_trainer.horovod_build.build_plan import BuildPlan, python_tag
from hvd_trainer.horovod_build.build_steps import run_logged
from hvd_trainer.horovod_build.errors import InstallError
from hvd_trainer.horovod_build.facts import Facts, HorovodFacts, TorchFacts, probe
from hvd_trainer.horovod_build.patch_set import PATCH_SET
from hvd_trainer.horovod_build.wheel import lock_wheels
from hvd_trainer.measure.start import Start


def start_installer(*options: str, **environment: str) -> subprocess.Popen[str]:
    """Start the real command; `environment` is added to this process's."""
    return subprocess.Popen(
        [sys.executable, "-m", "hvd_trainer", "install-horovod", *options],
        cwd=ROOT,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that builds for a PyTorch without CUDA, which must fail; it returns the error."""
    monkeypatch.setattr(tool, "probe", lambda: Facts(TorchFacts(version="2.15.0+cpu", cxx_standard=17)))

    def run(*options: str, **environment: str) -> str:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(InstallError) as caught:
            tool.main(["--force", *options])
        return str(caught.value)

    return run


# --- what is missing --------------------------------------------------------------------------


def test_broken_torch_is_named(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('libc10.so: no such file')")
    process = start_installer(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2, out + err
    words = r"error: .*none can be imported.*\n  found: .*libc10.so: no such file\n  type:  pip install torch .*\n"
    assert re.fullmatch(words, err)


@pytest.mark.parametrize("printed", [False, True])
def test_import_that_does_not_end_is_named(
    printed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was a traceback of subprocess.TimeoutExpired. PyTorch's facts are used where only Horovod hangs."""
    line = json.dumps({"torch": dataclasses.asdict(TorchFacts(version="2.15.0"))})
    answer = f"echo '{line}'\n" if printed else ""
    monkeypatch.setattr(sys, "executable", script(tmp_path / "python", f"{answer}exec sleep 60"))
    monkeypatch.setattr(facts, "PROBE_TIMEOUT_S", 0.5)
    if printed:
        state = tool._probe_torch()
        assert state.torch.version == "2.15.0"
        assert not tool._already_usable(tool.Options(), state)
        assert "the installed Horovod cannot be imported: no end within 0.5 s" in capsys.readouterr().out
        return
    with pytest.raises(InstallError, match=r"must be imported[^$]*no end within 0\.5 s[^$]*it hangs"):
        tool._probe_torch()


def test_compiler_that_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "LIMIT_S", 0.5)
    monkeypatch.setattr(toolchain, "USUAL_CUDA_HOME", fake_toolkit(tmp_path / "cuda", "13.0"))
    for name in ("g++", "mpicxx", "nvcc"):
        script(tmp_path / "slow" / name, "exec sleep 60")
    monkeypatch.setenv("PATH", str(tmp_path / "slow"), prepend=os.pathsep)
    monkeypatch.delenv("CXX", raising=False)
    script(tmp_path / "cuda/bin/nvcc", "exec sleep 60")
    with pytest.raises(InstallError, match=r"slow/g\+\+ did not end within 0\.5 s[^$]*CXX=g\+\+"):
        toolchain.find_cxx(17)
    assert toolchain.find_mpi() == "unknown"
    assert toolchain.find_toolkits() == []


@pytest.mark.parametrize(
    ("programs", "options", "package"),
    [
        ((), (), "g++"),
        (("g++",), (), "make"),
        (("g++", "make", "as", "ld"), ("--mpi", "--gpu", "none"), "libopenmpi-dev"),
    ],
)
def test_missing_program_is_named(
    programs: Sequence[str], options: Sequence[str], package: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    path = tool_folder(tmp_path / "bin", *programs)
    message = refused(*options, "--wheel-dir", str(tmp_path), PATH=path, CXX="g++")
    assert f"apt-get install {package}" in message


def test_old_compiler_is_named(tmp_path: Path) -> None:
    """The later -std wins: this g++ knows no more than one of 2016."""
    old = script(tmp_path / "g++-6", f'exec {shutil.which("g++")} "$@" -std=c++14')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", old)
        for standard, newest in ((17, "9"), (20, "11")):
            with pytest.raises(InstallError, match=rf"C\+\+{standard}[^$]*g\+\+ {newest} or") as error:
                toolchain.find_cxx(standard)
            assert old in str(error.value)


def test_nccl_is_refused_for_a_torch_without_cuda() -> None:
    with pytest.raises(InstallError, match="built without CUDA[^$]*--gpu none"):
        toolchain.find_cuda(TorchFacts(version="2.15.0+cpu"))


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TorchFacts:
    """Simulate a PyTorch for CUDA 13.2, with NCCL, on a machine without any toolkit."""
    put_nccl(tmp_path / "nccl")
    for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", tool_folder(tmp_path / "bin"))
    monkeypatch.setattr(toolchain, "USUAL_CUDA_HOME", str(tmp_path / "no_cuda"))
    nccl = {"nccl_home": str(tmp_path / "nccl"), "nccl_version": "2.28.9"}
    return TorchFacts(version="2.15.0+cu132", cuda="13.2", gpu_count=1, **nccl)


def fake_toolkit(home: Path, version: str) -> str:
    script(home / "bin/nvcc", f"echo 'Cuda compilation tools, release {version}, V{version}.1'")
    (home / "include").mkdir()
    (home / "include/cuda_runtime.h").touch()
    return str(home)


def test_nccl_is_refused_without_a_toolkit(no_cuda: TorchFacts) -> None:
    with pytest.raises(InstallError, match=r"no CUDA toolkit[^$]*install CUDA 13"):
        tool.choose_cuda("nccl", no_cuda)
    assert "no CUDA toolkit in" in str(tool.choose_cuda("auto", no_cuda))


def test_nccl_is_refused_with_a_toolkit_of_another_major_version(
    no_cuda: TorchFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", fake_toolkit(tmp_path / "cuda", "11.8"))
    with pytest.raises(InstallError, match=r"different major versions[^$]*CUDA 13\.2; found CUDA 11"):
        tool.choose_cuda("nccl", no_cuda)


def test_toolkit_behind_a_script_on_path_is_found(
    no_cuda: TorchFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = fake_toolkit(tmp_path / "cuda", "13.0")
    script(tmp_path / "bin/nvcc", f"echo '#$ TOP={home}/bin/..'")
    assert tool.choose_cuda("auto", no_cuda) == toolchain.CudaToolkit(Path(home), "13.0")


def test_nccl_is_built_without_a_gpu_only_where_it_is_asked_for(
    no_cuda: TorchFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A toolkit alone took five minutes of a newcomer's first ten, for a machine that had no GPU."""
    monkeypatch.setenv("CUDA_HOME", fake_toolkit(tmp_path / "cuda", "13.0"))
    without = dataclasses.replace(no_cuda, gpu_count=0)
    assert tool.choose_cuda("auto", without) == "no GPU is visible here"
    assert isinstance(tool.choose_cuda("nccl", without), toolchain.CudaToolkit)


# --- what goes wrong on the way ---------------------------------------------------------------


def test_missing_network_is_named(tmp_path: Path, refused: Callable[..., str]) -> None:
    message = refused("--gpu", "none", "--wheel-dir", str(tmp_path), **NO_NETWORK)
    assert "no network?" in message
    log = Path(message.rpartition("the full log: ")[2].strip())
    assert "Connection refused" in log.read_text()
    assert not list(tmp_path.glob("*/*.whl"))
    assert not list(tmp_path.glob(".build-*"))


def test_unwritable_wheel_folder_is_named(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "file").touch()
    assert "cannot be written to" in refused("--wheel-dir", str(tmp_path / "file/wheels"))


def test_full_disk_is_named_before_the_build(small_disk: Path, refused: Callable[..., str]) -> None:
    message = refused("--gpu", "none", "--wheel-dir", str(small_disk / "wheels"))
    assert re.search(r"build needs about .* MB are free: the disk is full.*--wheel-dir", message, re.DOTALL)


def test_disk_that_fills_during_the_build_is_named(small_disk: Path, tmp_path: Path) -> None:
    command = ["dd", "if=/dev/zero", f"of={small_disk / 'objects'}", "bs=1M", "count=16"]
    with pytest.raises(InstallError, match="the disk is full"):
        run_logged("Horovod must be compiled.", Start(command), tmp_path / "log")


def test_compile_error_is_quoted(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo 'a.cc:3:1: error: no such type'; exit 1"]
    with pytest.raises(InstallError, match=r"a\.cc:3:1: error: no such type") as error:
        run_logged("Horovod must be compiled.", Start(command), tmp_path / "log")
    assert str(tmp_path / "log") in str(error.value)


@pytest.fixture
def stalled_index() -> Iterator[str]:
    """Serve a package index that accepts connections and never answers, so that pip does not end."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/simple"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_installer_leaves_nothing_behind(
    tmp_path: Path, number: signal.Signals, stalled_index: str, refused: Callable[..., str]
) -> None:
    """No partial wheel stays, nor (where the installer can still act) a process or a folder."""
    process = start_installer(
        "--force", "--gpu", "none", "--wheel-dir", str(tmp_path),
        **(NO_NETWORK | {"PIP_INDEX_URL": stalled_index}),
    )  # fmt: skip
    wait_for(lambda: list(tmp_path.glob(".build-*/tmp")))
    children = wait_for(lambda: psutil.Process(process.pid).children(recursive=True))
    process.send_signal(number)
    process.communicate(timeout=PATIENCE_S)
    if number == signal.SIGKILL:
        for child in children:
            child.kill()
        psutil.wait_procs(children, timeout=10)
        assert list(tmp_path.glob(".build-*"))
        refused("--gpu", "none", "--wheel-dir", str(tmp_path), **NO_NETWORK)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    # A grandchild that was ended is gone when whoever inherited it has noticed.
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert not list(tmp_path.glob(".build-*"))
    assert not list(tmp_path.glob("*/*.whl"))


class PopenDuringSigterm(subprocess.Popen[bytes]):
    """A Popen that receives SIGTERM once the process is started, before the caller has its number."""

    last: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        PopenDuringSigterm.last = self.pid
        signal.raise_signal(signal.SIGTERM)


def test_sigterm_while_a_step_starts_ends_the_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A pip that had just been started ran on when the installer was gone."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    monkeypatch.setattr(subprocess, "Popen", PopenDuringSigterm)
    try:
        with pytest.raises(SystemExit):
            run_logged("Horovod must be compiled.", Start(["sleep", "600"]), tmp_path / "log")
    finally:
        signal.signal(signal.SIGTERM, before)
    wait_for(lambda: not psutil.pid_exists(PopenDuringSigterm.last))


def test_second_installer_waits_for_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def second() -> bool:
        with lock_wheels(tmp_path) as waited:
            return waited

    with ThreadPoolExecutor(1) as thread:
        with lock_wheels(tmp_path) as waited:
            assert not waited
            waiting = thread.submit(second)
            wait_for(lambda: "waiting for another installer" in capsys.readouterr().out)
            assert not waiting.done()
        assert waiting.result(PATIENCE_S)


def test_no_x86_extensions_on_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an emulated ARM, /proc/cpuinfo is that of the x86 machine, and its compiler refused -mavx."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: "cpython-314-aarch64-linux-gnu")
    record = BuildPlan(TORCH, cuda=None, nccl=None, mpi=None, jobs=1).record
    assert (record["machine"], record["python"]) == ("aarch64", "cpython-314")


# --- what is installed already ----------------------------------------------------------------

TORCH = TorchFacts(version="2.15.0+cu132", cuda="13.2", nccl_version="2.30.7")
RECORD = {
    "horovod": "0.28.1",
    "patch_set": PATCH_SET,
    "torch": "2.15.0+cu132",
    "python": python_tag(),
    "machine": "x86_64_avx",
    "cuda": None,
    "nccl": None,
    "mpi": None,
    "proved": True,
}
NCCL = {"cuda": "13.0", "nccl": "2.30.7"}


@pytest.mark.parametrize(
    ("record", "error", "options", "reason"),
    [
        (RECORD, None, {"gpu": "none"}, None),
        (RECORD, None, {"gpu": "nccl"}, "for the CPU only"),
        (RECORD, None, {"gpu": "none", "mpi": True}, "without MPI"),
        (RECORD | {"mpi": "4.1.4"}, None, {"gpu": "none", "mpi": True}, None),
        (RECORD | {"mpi": "4.1.4"}, None, {"gpu": "none"}, "with MPI"),
        (RECORD | NCCL, None, {"gpu": "none"}, "with NCCL"),
        (RECORD | NCCL, None, {"gpu": "nccl"}, None),
        (RECORD | NCCL, None, {"gpu": "auto"}, None),
        (RECORD | NCCL | {"nccl": "2.27.1"}, None, {"gpu": "auto"}, "nccl 2.27.1"),
        (RECORD | {"torch": "2.14.1"}, None, {"gpu": "none"}, "torch 2.14.1"),
        (RECORD | {"python": "cpython-39"}, None, {"gpu": "none"}, "python cpython-39"),
        (RECORD | {"patch_set": 0}, None, {"gpu": "none"}, "patch_set 0"),
        (RECORD, "undefined symbol", {"gpu": "none"}, "undefined symbol"),
        (RECORD | {"proved": None}, None, {"gpu": "none"}, "it was not proved, or that failed"),
        ({}, None, {}, "not built by this tool"),
        ({}, "no PyTorch extension", {}, "no PyTorch extension"),
    ],
)
def test_mismatches_of_an_installed_horovod_are_named(
    record: dict[str, object], error: str | None, options: dict[str, object], reason: str | None
) -> None:
    chosen = tool.Options(**options)  # type: ignore[arg-type]
    found = tool.find_mismatch(HorovodFacts(error=error, record=record), TORCH, chosen)
    assert found is reason is None or reason in str(found)


@pytest.mark.parametrize("gpu", ["auto", "none"])
def test_cpu_build_beside_gpus_says_so(no_cuda: TorchFacts, gpu: str, capsys: pytest.CaptureFixture[str]) -> None:
    """After an installation on a login node, nothing explained on GPU nodes why gradients went through the CPU."""
    facts = Facts(no_cuda, HorovodFacts(record=RECORD))
    assert tool._already_usable(tool.Options(gpu=gpu), facts)  # type: ignore[arg-type]
    *_, why, last = ["", *capsys.readouterr().out.splitlines()]
    assert (gpu == "auto") == why.startswith("This Horovod is for CPUs only: no CUDA toolkit in HOROVOD_CUDA_HOME")
    assert (gpu == "auto") == last.startswith("For GPUs type: python -m hvd_trainer install-horovod --gpu nccl")


def test_horovod_that_ends_its_process_is_built_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Horovod whose import crashed was taken for a PyTorch that cannot be imported, and nothing was built."""
    (tmp_path / "horovod").mkdir()
    crash = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"
    (tmp_path / "horovod/__init__.py").write_text(crash)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    facts = probe()
    assert facts.torch.error is None
    assert not tool._already_usable(tool.Options(), facts)
    said = capsys.readouterr().out
    assert said == "the installed Horovod cannot be imported: it was killed by signal 11\n"
