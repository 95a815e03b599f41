"""The Docker image: what its scripts do; `make image-test` builds it and runs it."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from launchers import REPOSITORY
from requirements import requires

DOCKER = REPOSITORY / "docker"


def run(
    *words: str | Path, env: dict[str, str] | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | (env or {}), cwd=REPOSITORY)
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


def built_for(folder: Path, gpu: str, *, has_nvcc: bool) -> str:
    """Return what the Dockerfile's last build step asks the installer for; its programs only print."""
    for name in ("pip", "python", *(["nvcc"] if has_nvcc else [])):
        (folder / name).write_text('#!/bin/sh\necho "$0" "$@"\n')
        (folder / name).chmod(0o755)
    (step,) = re.findall(
        r"^RUN (?:--mount\S+ \\\n\s*)*(pip install --no-deps .*?[^\\])$",
        (DOCKER / "Dockerfile").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    said = run("/bin/sh", "-euc", step, env={"PATH": str(folder), "GPU": gpu, "MPI": ""}).stdout
    return said.splitlines()[-1].partition("install-horovod --gpu ")[2].strip()


def test_gpu_image_has_no_horovod_for_cpus(tmp_path: Path) -> None:
    """`--gpu auto` would build one where PyTorch's CUDA is not the base's; `nccl` is refused there."""
    assert built_for(tmp_path, "auto", has_nvcc=False) == "none"
    assert built_for(tmp_path, "auto", has_nvcc=True) == "nccl"
    assert built_for(tmp_path, "none", has_nvcc=True) == "none"


def hvd_ssh(home: Path, *words: str, check: bool = True, port: int = 0) -> subprocess.CompletedProcess[str]:
    environ = {"HOME": str(home), "HVD_SSH_PORT": str(port)}
    return run(DOCKER / "hvd-ssh", *words, env=environ, check=check)


@pytest.fixture
def home() -> Iterator[Path]:
    """Return a user's home, not below /tmp: sshd trusts no keys below a folder that others may write to."""
    with tempfile.TemporaryDirectory(prefix=".hvd-ssh-", dir=Path.home()) as folder:
        (Path(folder) / ".ssh").mkdir(mode=0o700)
        yield Path(folder)


@contextmanager
def served(home: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[str]]]:
    """Run `hvd-ssh serve` as this host's server; yield it and the words that enter it by its key."""
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder = home / ".ssh"
    assert "keys for 127.0.0.1" in hvd_ssh(home, "keys", "127.0.0.1", port=port).stdout
    ssh = [
        *("ssh", "-F", str(folder / "config"), "-o", f"UserKnownHostsFile={folder}/known_hosts"),
        *("-o", "GlobalKnownHostsFile=/dev/null", "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes"),
    ]
    path = f"{home}/programs:{os.environ['PATH']}"
    environ = os.environ | {"HOME": str(home), "HVD_SSH_PORT": str(port), "PATH": path}
    serving = subprocess.Popen([DOCKER / "hvd-ssh", "serve"], env=environ, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 20
        words = [*ssh, "-i", str(folder / "id_ed25519"), "127.0.0.1"]
        while (entered := run(*words, "true", check=False)).returncode != 0:
            assert time.monotonic() < end, entered.stderr
            time.sleep(0.05)
        yield serving, ssh
    finally:
        serving.terminate()
        serving.wait()


@requires("sshd")
def test_hvd_ssh_serve_accepts_the_key_only(home: Path) -> None:
    """The server runs while the command does; another key, or a host that answers with another one, is refused."""
    folder = home / ".ssh"
    with served(home) as (_, ssh):
        key = ["-i", str(folder / "id_ed25519")]
        assert {file.stat().st_mode & 0o077 for file in folder.iterdir()} == {0}
        assert f"{home}/programs" in run(*ssh, *key, "127.0.0.1", "echo", "$PATH").stdout.split(":")
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", home / "other")
        assert "Permission denied" in run(*ssh, "-i", home / "other", "127.0.0.1", "true", check=False).stderr
        known = (folder / "known_hosts").read_text().split()
        other = (home / "other.pub").read_text().split()[1]
        (folder / "known_hosts").write_text(" ".join([*known[:2], other]) + "\n")
        assert "REMOTE HOST IDENTIFICATION" in run(*ssh, *key, "127.0.0.1", "true", check=False).stderr


RANK = """
import signal, sys, time
def save(*_):
    time.sleep(1)
    print("saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("trains", flush=True)
time.sleep(60)
"""


@requires("sshd")
def test_hvd_ssh_serve_passes_sigterm_to_ranks(home: Path) -> None:
    """The server alone got the signal and ended, and with it the container and all that ran there."""
    (home / "rank.py").write_text(RANK)
    with served(home) as (serving, ssh):
        # As horovodrun does it: by a shell, which waits.
        shell = f"cd / ; A=1 {sys.executable} {home}/rank.py; exit $?"
        words = [*ssh, "-i", home / ".ssh/id_ed25519", "127.0.0.1", shell]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as entered:
            assert entered.stdout is not None
            assert entered.stdout.readline() == "trains\n"
            serving.terminate()
            assert entered.communicate(timeout=30)[0] == "saved\n"
            assert entered.returncode == 75
        assert serving.wait(timeout=30) == 143


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "type: hvd-ssh keys HOST... or hvd-ssh serve"),
        (("keys",), "which hosts are there?"),
        (("serve",), "Type once: hvd-ssh keys HOST_A HOST_B"),
    ],
)
def test_hvd_ssh_says_what_to_type(home: Path, words: Sequence[str], says: str) -> None:
    done = hvd_ssh(home, *words, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr


@requires("ssh-keygen")
@pytest.mark.parametrize(("port", "names"), [(2222, ["[a]:2222", "[b]:2222"]), (22, ["a", "b"])])
def test_hvd_ssh_keys_names_hosts_and_overwrites_no_key(home: Path, port: int, names: Sequence[str]) -> None:
    hvd_ssh(home, "keys", "a", "b", port=port)
    known = (home / ".ssh/known_hosts").read_text().splitlines()
    assert [line.split()[0] for line in known] == names
    before = {file.name: file.read_bytes() for file in (home / ".ssh").iterdir()}
    assert "is there already" in hvd_ssh(home, "keys", "a", check=False).stderr
    assert {file.name: file.read_bytes() for file in (home / ".ssh").iterdir()} == before


@requires("horovodrun")
def test_hvd_mnist_starts_np_ranks() -> None:
    words = [DOCKER / "hvd-mnist", "--dataset", "digits", "--repeat", "1", "--epochs", "1", "--batch-size", "64"]
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    assert "2 ranks on 1 node" in run(*words, env=path | {"NP": "2"}).stdout


# Built and run: make image-test

BUILDAH = ("buildah", "--storage-driver", "vfs")
IMAGE, BASE = "localhost/hvd_trainer", "localhost/hvd-base"


class Image:
    """A built image in a storage of its own.

    Args:
        folder: for all of it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._storage = ("--root", str(folder / "root"), "--runroot", str(folder / "run"))

    def buildah(self, *words: str | Path) -> str:
        done = run(*BUILDAH, *self._storage, *words)
        return done.stdout + done.stderr

    def make_base(self) -> None:
        """Make a Debian of this machine's release, with this machine's mirrors and certificates."""
        release = re.search(r"VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text())
        assert release is not None
        root = self.folder / "base"
        run("debootstrap", "--variant=minbase", "--include=ca-certificates", release[1], root)
        for name in ("sources.list", "sources.list.d", "apt.conf.d"):
            ours = Path("/etc/apt") / name
            if ours.is_dir():
                shutil.copytree(ours, root / "etc/apt" / name, dirs_exist_ok=True)
            elif ours.exists():
                shutil.copy(ours, root / "etc/apt" / name)
        # debootstrap's own list of mirrors would be a second one.
        if any((root / "etc/apt/sources.list.d").iterdir()):
            (root / "etc/apt/sources.list").unlink(missing_ok=True)
        # Beside Debian's list, which is made anew when a package brings it.
        shutil.copy("/etc/ssl/certs/ca-certificates.crt", root / "etc/ssl/machine.crt")
        container = self.buildah("from", "scratch").strip()
        self.buildah("config", "--env", "PIP_CERT=/etc/ssl/machine.crt", container)
        self.buildah("add", "--quiet", container, root, "/")
        self.buildah("commit", "--quiet", "--rm", container, BASE)
        shutil.rmtree(root)

    def build(self) -> None:
        """Build as README.md does for CPUs, with one layer per stage: this storage copies whole layers."""
        arguments = [f"BUILD_BASE={BASE}", f"RUNTIME_BASE={BASE}", "GPU=none", "REVISION=tested"]
        arguments += [f"{name}={value}" for name, value in os.environ.items() if name.startswith("PIP_INDEX")]
        words = [word for argument in arguments for word in ("--build-arg", argument)]
        self.buildah(
            *("bud", "--isolation", "chroot", "--layers=false", "--format", "docker"),
            *("--ignorefile", DOCKER / "Dockerfile.dockerignore", "--file", DOCKER / "Dockerfile"),
            *(*words, "--tag", IMAGE, REPOSITORY),
        )

    def run(self, *words: str) -> str:
        """Return what a command prints in a new container."""
        container = self.buildah("from", IMAGE).strip()
        try:
            return self.buildah("run", "--isolation", "chroot", container, "--", *words)
        finally:
            self.buildah("rm", container)


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    """Build the image."""
    packages = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]
    if packages or os.geteuid() != 0:
        pytest.skip(f"needs root and: apt-get install {' '.join(packages)}")
    folder = Path("/var/tmp") / f"hvd-image-{os.getpid()}"
    folder.mkdir()
    made = Image(folder)
    try:
        made.make_base()
        made.build()
        yield made
    finally:
        run("rm", "-rf", "--one-file-system", folder, check=False)


@pytest.mark.image
def test_image_trains_on_both_engines(image: Image) -> None:
    options = ["--dataset", "digits", "--repeat", "1", "--epochs", "1", "--batch-size", "64"]
    said = image.run("env", "NP=2", "hvd-mnist", *options)
    assert "2 ranks on 1 node" in said
    # Other than Docker, buildah gives a container a name that it cannot look up.
    run = ["torchrun", "--local-addr", "127.0.0.1", "--nproc-per-node", "2", "-m", "hvd_trainer.mnist"]
    assert "2 ranks on 1 node" in image.run(*run, "--backend", "ddp", *options)


@pytest.mark.image
def test_image_has_no_root_user_and_no_compiler(image: Image) -> None:
    assert image.run("id", "-u").strip() == "10001"
    assert "gcc" not in image.run("ls", "/usr/bin").split()
    assert "ssh_host_" not in image.run("ls", "/etc/ssh")


@pytest.mark.image
def test_image_passes_doctor_and_is_labelled(image: Image) -> None:
    inspected = image.buildah("inspect", "--type", "image", IMAGE)
    for word in ("org.opencontainers.image.revision", "tested", '"hvd-mnist"'):
        assert word in inspected
    # Its first start reads PyTorch from a cold disk, which may take longer than the usual limit of a check.
    said = image.run("python", "-m", "hvd_trainer", "doctor", "--timeout-s", "60")
    assert "horovod       0.28.1" in said
    assert " 0 errors" in said


@pytest.mark.image
def test_image_contains_no_build_files(image: Image) -> None:
    """Without PyTorch, its requirements and Debian's own, the image is small; `-s` prints what takes room."""
    wheels = "/opt/hvd_trainer/lib/python3*/site-packages"
    parts = {"all": "/", "torch": f"{wheels}/torch", "nvidia": f"{wheels}/nvidia", "triton": f"{wheels}/triton"}
    sums = {
        name: int(image.run("sh", "-c", f"du -xsm {place} 2> /dev/null || true").split()[0])
        for name, place in parts.items()
    }
    print(f"in MB: {sums}")
    assert sums["all"] - sums["torch"] - sums["nvidia"] - sums["triton"] < 1500
    assert (
        image.run("sh", "-c", "ls -A /var/lib/apt/lists /tmp /root 2> /dev/null | grep -v : || true").split() == []
    )


# The server ends with its container. Here that is a folder only, and the server of one run answered the next.
END_SSHD = (
    "for process in /proc/[0-9]*; do "
    '[ "$(cat $process/comm 2> /dev/null)" = sshd ] && kill ${process#/proc/} 2> /dev/null; done'
)


@pytest.mark.image
def test_container_is_reached_by_ssh(image: Image) -> None:
    """A container is entered by ssh like another machine."""
    enter = "ssh -o HostKeyAlias='[container]:2222' 127.0.0.1 python -m hvd_trainer doctor --help"
    said = image.run(
        "sh", "-c", f"hvd-ssh keys container && hvd-ssh serve {enter}; code=$?; {END_SSHD}; exit $code"
    )
    assert "--hosts" in said
