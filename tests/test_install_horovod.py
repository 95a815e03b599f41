"""The Horovod installer: its changes, the attack that they close, and the errors users meet."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from launchers import requires

from hvd_trainer.tools import horovod_messages as messages
from hvd_trainer.tools import horovod_toolchain, install_horovod
from hvd_trainer.tools.horovod_errors import InstallError
from hvd_trainer.tools.horovod_patches import PATCH_SET, apply_patches
from hvd_trainer.tools.horovod_plan import python_tag
from hvd_trainer.tools.horovod_probe import HorovodFacts, TorchFacts, probe
from hvd_trainer.tools.horovod_source import PatchError, Replacement
from hvd_trainer.tools.horovod_steps import BuildSteps, run_logged

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[1]
# A port on which nobody listens: pip is refused at once, as on a machine without a network.
NO_NETWORK = {
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_EXTRA_INDEX_URL": "",
    "PIP_FIND_LINKS": "",
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_RETRIES": "1",
    "PIP_NO_CACHE_DIR": "1",
}


def installer(*options: str, **environment: str) -> subprocess.Popen[str]:
    """Starts the real command; `environment` comes on top of this process's."""
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


def refused(*options: str, **environment: str) -> str:
    """Runs the real command, which must fail with a user's error; returns its message."""
    process = installer(*options, **environment)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2, out + err
    assert "Traceback" not in err
    assert err.startswith("error: ")
    assert "\n  found: " in err
    assert "\n  type:  " in err
    return err


def tool_folder(folder: Path, *names: str) -> str:
    """A PATH with only the named programs of this machine."""
    folder.mkdir()
    for name in names:
        found = shutil.which(name)
        if found is None:
            pytest.skip(f"needs {name}: apt-get install {name}")
        (folder / name).symlink_to(found)
    return str(folder)


def script(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


# --- the source and its changes ---------------------------------------------------------------


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Horovod's published source, fetched and checked as the installer does it."""
    folder = tmp_path_factory.mktemp("published")
    steps = BuildSteps(folder, folder / "log")
    try:
        steps.fetch_tools()
        return steps.fetch_source()
    except InstallError as error:
        if "no network" not in error.found:
            raise
        pytest.skip(f"needs a package index to fetch Horovod's source from: {error.found}")


@pytest.fixture(scope="module")
def patched(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("patched") / published.name
    shutil.copytree(published, source)
    apply_patches(source, 20, {"torch": "2.15.0", "cuda": None})
    return source


def test_the_changes_fit_the_published_source(patched: Path) -> None:
    for path in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
        assert "set(CMAKE_CXX_STANDARD 20)" in (patched / path).read_text()
    assert "distutils" not in (patched / "horovod/runner/js_run.py").read_text()
    command = [sys.executable, "-c", "import horovod.hvd_trainer_build as b; print(b.RECORD)"]
    out = subprocess.check_output(command, cwd=patched, text=True)
    assert out.strip() == "{'torch': '2.15.0', 'cuda': None}"


def test_a_source_that_looks_different_is_refused(patched: Path) -> None:
    with pytest.raises(PatchError, match="found 0 times instead of once"):
        apply_patches(patched, 20, {})
    with pytest.raises(PatchError, match=r"cannot change no\.txt"):
        Replacement("no.txt", "a", "b", "a reason").apply(patched)


def test_a_package_with_another_hash_is_not_even_unpacked(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index"
    index.mkdir()
    sdist = published.with_name(f"{published.name}.tar.gz")
    (index / sdist.name).write_bytes(sdist.read_bytes() + b"\0")
    for name, value in (NO_NETWORK | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}).items():
        monkeypatch.setenv(name, value)
    steps = BuildSteps(tmp_path, tmp_path / "log")
    with pytest.raises(InstallError, match="sha256 differs"):
        steps.fetch_source()
    assert not list(tmp_path.glob("horovod-0.28.1*"))


# --- CVE-2024-10190 ---------------------------------------------------------------------------

# Runs in a process of its own, on the source tree given by its working folder: a real elastic
# driver and rendezvous server, three attacks, and then an honest worker.
ATTACKS = """
import json, os, pickle, socketserver, struct, sys, threading, urllib.error, urllib.request
from horovod.runner.common.util import codec, network, secret
from horovod.runner.elastic.discovery import FixedHosts
from horovod.runner.elastic.driver import ElasticDriver
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.elastic.worker import HostUpdateResult, WorkerNotificationManager
from horovod.runner.http.http_server import RendezvousServer

sys.path.insert(0, os.getcwd())
folder = sys.argv[1]
key = b"k" * 32


class Payload:
    def __init__(self, name):
        self.name = name

    def __reduce__(self):
        return os.mkdir, (os.path.join(folder, self.name),)


def request(method, path, data=None):
    url = f"http://127.0.0.1:{port}/{path}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, method=method)) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, b""
    except OSError as error:
        return type(error).__name__, b""


def registration(addresses):
    try:
        from horovod.runner.elastic import messages
        return messages.encode_worker(addresses, key)
    except ImportError:
        return codec.dumps_base64((addresses, key), to_ascii=False)


class Rogue(socketserver.BaseRequestHandler):
    def handle(self):
        message = pickle.dumps(Payload("by_reply"))
        self.request.recv(65536)
        self.request.sendall(secret.compute_digest(key, message))
        self.request.sendall(struct.pack("i", len(message)) + message)


class Listener:
    heard = []

    def on_hosts_updated(self, timestamp, update_res):
        self.heard.append([timestamp, int(update_res), type(update_res).__name__])


rendezvous = RendezvousServer()
driver = ElasticDriver(rendezvous, FixedHosts({"localhost": 2}), 1, 2)
port = rendezvous.start(create_rendezvous_handler(driver))
driver.wait_for_available_slots(1)
result = {}

pickled = codec.dumps_base64(Payload("by_put"), to_ascii=False)
result["put"] = request("PUT", "worker_addresses/localhost:0", pickled)[0]

rogue = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Rogue)
threading.Thread(target=rogue.serve_forever, daemon=True).start()
request("PUT", "worker_addresses/localhost:1", registration({"lo": [rogue.server_address]}))

result["clients_after_attacks"] = len(driver._worker_clients)
manager = WorkerNotificationManager()
manager.register_listener(Listener())
manager.init("127.0.0.1", port, "lo", "localhost", 0)
status, value = request("GET", "worker_addresses/localhost:0")
result["get"] = status
result["key_leaks"] = manager._service._wire._key.hex().encode() in value or status == 200
driver._worker_clients["localhost", 0].notify_hosts_updated(7, HostUpdateResult.mixed)
result["heard"] = Listener.heard
result["ran"] = sorted(os.listdir(folder))
print(json.dumps(result))
os._exit(0)
"""


def attack(source: Path, folder: Path) -> dict[str, object]:
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", ATTACKS, str(folder)],
        cwd=source,
        env=os.environ | {"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def test_the_published_source_runs_what_any_host_sends(published: Path, tmp_path: Path) -> None:
    found = attack(published, tmp_path / "marks")
    assert found["ran"] == ["by_put", "by_reply"]
    assert found["key_leaks"]
    assert found["heard"] == [[7, 3, "HostUpdateResult"]]


def test_the_changed_source_refuses_it_and_still_serves_workers(patched: Path, tmp_path: Path) -> None:
    found = attack(patched, tmp_path / "marks")
    assert found["ran"] == []
    assert found["put"] == 400
    assert found["get"] == 404
    assert not found["key_leaks"]
    assert found["clients_after_attacks"] == 0
    assert found["heard"] == [[7, 3, "HostUpdateResult"]]


class Ping:
    """Stands for Horovod's request classes, whose constructors take their attributes by name."""

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self.count = count


def test_messages_come_back_as_they_were() -> None:
    worker = {"eth0": [("10.0.0.1", 4000), ("10.0.0.2", 4000)], "lo": []}, bytes(range(32))
    assert messages.decode_worker(messages.encode_worker(*worker)) == worker
    ping = messages.decode_message(messages.encode_message(Ping("a", 2)), [Ping])
    assert isinstance(ping, Ping)
    assert vars(ping) == {"name": "a", "count": 2}


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\x80\x05.",
        b"[]",
        b'{"addresses": {}}',
        b'{"addresses": [], "secret_key": "00"}',
        b'{"addresses": {}, "secret_key": "xy"}',
        b'{"addresses": {}, "secret_key": ""}',
        b'{"addresses": {"lo": 3}, "secret_key": "00"}',
        b'{"addresses": {"lo": [["h"]]}, "secret_key": "00"}',
        b'{"addresses": {"lo": [["h", 0]]}, "secret_key": "00"}',
        b'{"addresses": {"lo": [["h", true]]}, "secret_key": "00"}',
        b'{"addresses": {"lo": [[1, 2]]}, "secret_key": "00"}',
        b'{"addresses": {}, "secret_key": "00", "more": 1}',
        b"[" * 100_000,
        b" " * (messages.MAX_BYTES + 1),
    ],
)
def test_malformed_workers_are_refused(value: bytes) -> None:
    with pytest.raises(messages.MalformedMessageError):
        messages.decode_worker(value)


@pytest.mark.parametrize(
    "value",
    [
        b'{"kind": "Other", "fields": {}}',
        b'{"kind": [], "fields": {}}',
        b'{"kind": "Ping", "fields": []}',
        b'{"kind": "Ping", "fields": {"name": "a"}}',
        b'{"kind": "Ping", "fields": {"name": "a", "count": {}}}',
    ],
)
def test_malformed_messages_are_refused(value: bytes) -> None:
    with pytest.raises(messages.MalformedMessageError):
        messages.decode_message(value, [Ping])


# --- what is missing --------------------------------------------------------------------------


def test_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('libc10.so: no such file')")
    message = refused(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert "none can be imported" in message
    assert "libc10.so: no such file" in message
    assert "pip install torch" in message


def test_no_compiler(tmp_path: Path) -> None:
    message = refused("--force", "--wheel-dir", str(tmp_path), PATH=tool_folder(tmp_path / "bin"))
    assert "apt-get install g++" in message


def test_no_make(tmp_path: Path) -> None:
    path = tool_folder(tmp_path / "bin", "g++")
    message = refused("--force", "--wheel-dir", str(tmp_path), PATH=path)
    assert "apt-get install make" in message


def test_a_compiler_that_is_too_old(tmp_path: Path) -> None:
    """The later -std wins: this g++ knows no more than one of 2016."""
    old = script(tmp_path / "g++-6", f'exec {shutil.which("g++")} "$@" -std=c++14')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", old)
        for standard, newest in ((17, "9"), (20, "11")):
            with pytest.raises(InstallError, match=rf"C\+\+{standard}[^$]*g\+\+ {newest} or") as error:
                horovod_toolchain.find_cxx(standard)
            assert old in str(error.value)


def test_no_mpi_compiler(tmp_path: Path) -> None:
    path = tool_folder(tmp_path / "bin", "g++", "make", "as", "ld")
    message = refused("--force", "--mpi", "--gpu", "none", "--wheel-dir", str(tmp_path), PATH=path)
    assert "apt-get install libopenmpi-dev" in message


def test_nccl_for_a_torch_without_cuda() -> None:
    with pytest.raises(InstallError, match="built without CUDA[^$]*--gpu none"):
        horovod_toolchain.find_cuda(TorchFacts(version="2.15.0+cpu"))


def test_nccl_without_pytorchs_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOROVOD_NCCL_HOME", raising=False)
    with pytest.raises(InstallError, match="pip install nvidia-nccl-cu13"):
        horovod_toolchain.find_cuda(TorchFacts(version="2.15.0+cu132", cuda="13.2"))


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TorchFacts:
    """A PyTorch for CUDA 13.2 on a machine without any toolkit."""
    for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", tool_folder(tmp_path / "bin"))
    monkeypatch.setattr(horovod_toolchain, "USUAL_CUDA_HOME", str(tmp_path / "no_cuda"))
    return TorchFacts(version="2.15.0+cu132", cuda="13.2", nccl_home="/nccl", nccl_version="2.30")


def fake_toolkit(home: Path, version: str) -> str:
    script(home / "bin/nvcc", f"echo 'Cuda compilation tools, release {version}, V{version}.1'")
    (home / "include").mkdir()
    (home / "include/cuda_runtime.h").touch()
    return str(home)


def test_nccl_without_a_toolkit(no_cuda: TorchFacts) -> None:
    with pytest.raises(InstallError, match=r"no CUDA toolkit[^$]*install CUDA 13"):
        install_horovod.choose_cuda("nccl", no_cuda)
    assert "looked in" in str(install_horovod.choose_cuda("auto", no_cuda))


def test_nccl_with_a_toolkit_of_another_major_version(
    no_cuda: TorchFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", fake_toolkit(tmp_path / "cuda", "11.8"))
    with pytest.raises(InstallError, match=r"different major versions[^$]*CUDA 13\.2; found CUDA 11"):
        install_horovod.choose_cuda("nccl", no_cuda)


def test_nccl_with_a_toolkit_behind_a_script_on_path(
    no_cuda: TorchFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = fake_toolkit(tmp_path / "cuda", "13.0")
    script(tmp_path / "bin/nvcc", f"echo '#$ TOP={home}/bin/..'")
    found = install_horovod.choose_cuda("auto", no_cuda)
    assert found == horovod_toolchain.CudaToolkit(Path(home), "13.0")


# --- what goes wrong on the way ---------------------------------------------------------------


def test_no_network(tmp_path: Path) -> None:
    message = refused("--force", "--gpu", "none", "--wheel-dir", str(tmp_path), **NO_NETWORK)
    assert "no network?" in message
    log = Path(message.rpartition("the full log: ")[2].strip())
    assert "Connection refused" in log.read_text()
    assert not list(tmp_path.glob("*/*.whl"))
    assert not list(tmp_path.glob(".build-*"))


def test_a_wheel_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = refused("--force", "--wheel-dir", str(tmp_path / "file/wheels"))
    assert "cannot be written to" in message


def test_a_full_disk_is_seen_before_the_build(small_disk: Path) -> None:
    message = refused("--force", "--gpu", "none", "--wheel-dir", str(small_disk))
    assert "the disk is full" in message
    assert "--wheel-dir" in message


def test_a_disk_that_fills_during_the_build(small_disk: Path, tmp_path: Path) -> None:
    command = ["dd", "if=/dev/zero", f"of={small_disk / 'objects'}", "bs=1M", "count=16"]
    with pytest.raises(InstallError, match="the disk is full"):
        run_logged("Horovod must be compiled.", command, tmp_path / "log", os.environ)


def test_a_compile_error_is_quoted(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo compiling; echo 'a.cc:3:1: error: no such type'; exit 1"]
    with pytest.raises(InstallError, match=r"a\.cc:3:1: error: no such type") as error:
        run_logged("Horovod must be compiled.", command, tmp_path / "log", os.environ)
    assert str(tmp_path / "log") in str(error.value)


def wait_for(condition: Callable[[], list[T]], timeout_s: float = 60) -> list[T]:
    end = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end, "the installer did not come this far"
        time.sleep(0.05)
    return found


@pytest.fixture
def stalled_index() -> Iterator[str]:
    """A server that takes connections and never answers: pip stays in its step."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/simple"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_half_way(tmp_path: Path, number: signal.Signals, stalled_index: str) -> None:
    """No half wheel stays, nor (where the installer can still act) a process or a folder."""
    process = installer(
        "--force", "--gpu", "none", "--wheel-dir", str(tmp_path),
        **(NO_NETWORK | {"PIP_INDEX_URL": stalled_index}),
    )  # fmt: skip
    wait_for(lambda: list(tmp_path.glob(".build-*/tmp")))
    children = wait_for(lambda: psutil.Process(process.pid).children(recursive=True))
    process.send_signal(number)
    process.communicate(timeout=60)
    if number == signal.SIGKILL:
        for child in children:
            child.kill()
        psutil.wait_procs(children, timeout=10)
        assert list(tmp_path.glob(".build-*"))
        refused("--force", "--gpu", "none", "--wheel-dir", str(tmp_path), **NO_NETWORK)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    # A grandchild that was ended is gone when whoever inherited it has noticed.
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert not list(tmp_path.glob(".build-*"))
    assert not list(tmp_path.glob("*/*.whl"))


def test_two_installers_at_once(tmp_path: Path) -> None:
    """The second waits for the first (here: this test), and says so."""
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = installer("--force", "--gpu", "none", "--wheel-dir", str(tmp_path), **NO_NETWORK)
        assert process.stdout is not None
        assert "waiting for another installer" in process.stdout.readline()
        assert process.poll() is None
    _, err = process.communicate(timeout=120)
    assert "no network?" in err


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
        ({}, None, {}, "not built by this tool"),
        ({}, "no PyTorch extension", {}, "no PyTorch extension"),
    ],
)
def test_what_counts_as_usable(
    record: dict[str, object], error: str | None, options: dict[str, object], reason: str | None
) -> None:
    chosen = install_horovod.Options(**options)  # type: ignore[arg-type]
    found = install_horovod.unfit(HorovodFacts(error=error, record=record), TORCH, chosen)
    assert found is reason is None or reason in str(found)


def test_a_horovod_without_its_extension_is_not_usable(patched: Path) -> None:
    """Such a one prints a warning, imports all the same, and has no `init`."""
    code = "from hvd_trainer.tools.horovod_probe import probe; print(probe().horovod.error)"
    out = subprocess.check_output(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": f"{patched}{os.pathsep}{ROOT}"},
        text=True,
        timeout=120,
    )
    assert "no PyTorch extension" in out


def test_an_installed_one_is_kept(tmp_path: Path) -> None:
    facts = probe()
    if facts.horovod is None or not facts.horovod.record or facts.horovod.error:
        pytest.skip("needs a Horovod built by: python -m hvd_trainer install-horovod")
    options = ["--mpi"] if facts.horovod.record["mpi"] else []
    options += ["--gpu", "nccl" if facts.horovod.record["cuda"] else "none"]
    process = installer(*options, "--wheel-dir", str(tmp_path / "unused"), **NO_NETWORK)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "is installed already" in out
    assert not (tmp_path / "unused").exists()


@requires("horovod")
def test_horovodrun_knows_its_controllers_without_pytorch() -> None:
    """As published it imports PyTorch twice to learn this, before it starts a rank: 2.7 s of 3.1 s here."""
    ask = "import sys; sys.modules['torch'] = None; from horovod.common.util import *"
    printed = subprocess.check_output(
        [sys.executable, "-c", f"{ask}; print(gloo_built(), mpi_built())"], text=True
    )
    assert printed in ("True False\n", "True True\n")


# --- make -------------------------------------------------------------------------------------


def make_refuses(tmp_path: Path, *arguments: str, **environment: str) -> str:
    command = ["make", "--no-print-directory", f"VENV={tmp_path / 'venv'}", "setup", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert not (tmp_path / "venv").exists()
    return done.stderr


def test_make_without_python(tmp_path: Path) -> None:
    assert "apt-get install python3" in make_refuses(tmp_path, "PYTHON=no-such-python")


def test_make_with_an_old_python(tmp_path: Path) -> None:
    old = script(
        tmp_path / "python3.8",
        textwrap.dedent("""\
            [ "$1" = -V ] && echo Python 3.8.18 && exit 0
            exit 1"""),
    )
    message = make_refuses(tmp_path, f"PYTHON={old}")
    assert "3.10 or later is needed" in message
    assert "Python 3.8.18" in message


def test_make_without_a_compiler(tmp_path: Path) -> None:
    path = tool_folder(tmp_path / "bin", "make", "sh", "rm", "mkdir", "touch")
    message = make_refuses(tmp_path, f"PYTHON={sys.executable}", PATH=path)
    assert "apt-get install g++" in message
