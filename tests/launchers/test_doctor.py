"""Test `python -m hvd_trainer doctor` as a whole, and how it runs its checks."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doctor_checks import OTHER, plant_program, run_checks
from launchers import REPOSITORY, Result, launch, requires, start
from requirements import missing
from slurm_cluster import SlurmCluster
from waiting import wait_for

from hvd_trainer.tools.doctor import engines

DOCTOR = ["-m", "hvd_trainer", "doctor"]
STATUSES = ("ok", "warning", "error")
PATIENT = ("--timeout-s", "40")
"""Where it is not about time: the machine may have a lot else to do."""


def run(*options: str, **more: Any) -> Result:
    """Run the tool as a user starts it."""
    return launch("python", 1, [*DOCTOR, *options], check=False, timeout_s=60, **more)


def document(result: Result) -> dict[str, Any]:
    """Check the form of the document that --json printed, and return its findings by name."""
    found: dict[str, Any] = json.loads(result.stdout)
    by_name = {finding["name"]: finding for finding in found["findings"]}
    assert len(by_name) == len(found["findings"])
    assert set(found) == {"hvd_trainer", "host", "time", "seconds", "counts", "findings"}
    for finding in by_name.values():
        assert set(finding) == {"name", "status", "found", "remedy", "figures"}
        assert (finding["status"] == "ok") == (not finding["remedy"]), finding
    counted = [sum(f["status"] == status for f in by_name.values()) for status in STATUSES]
    assert list(found["counts"].values()) == counted
    assert result.returncode == int(found["counts"]["error"] > 0)
    return by_name


# The whole.


def test_report_has_a_line_per_check() -> None:
    result = run(*PATIENT)
    lines = result.stdout.splitlines()
    assert "\x1b" not in result.stdout
    shown = [re.fullmatch(r"(ok|warning|error) +(\S.*?)  +(\S.*)", line) for line in lines[:-1]]
    named = {match[2]: match[1] for match in shown if match}
    assert {"python", "packages", "torch", "CUDA", "NCCL", "horovod", "MPI", "Slurm", "launcher"} <= named.keys()
    assert {"CPU", "/dev/shm", "open files", "interfaces", "network", "host name", "port 29500"} <= named.keys()
    assert "data folder" in named
    # What is not ok has below it what to type.
    for line, below, match in zip(lines, lines[1:], shown, strict=False):
        if match and match[1] != "ok":
            assert re.match(r" +type: \S", below), line
    statuses = [match[1] for match in shown if match]
    counted = {status: statuses.count(status) for status in STATUSES}
    assert lines[-1].startswith(f"{len(statuses)} checks: {counted['ok']} ok, {counted['warning']} warning")
    assert result.returncode == int(counted["error"] > 0)
    assert named["torch"] == "ok"


LITTLE = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
sys.argv = ["hvd_trainer", *sys.argv[1:]]
runpy.run_module("hvd_trainer", run_name="__main__", alter_sys=True)
"""


def test_doctor_reports_many_faults_at_once(small_disk: Path, tmp_path: Path) -> None:
    """Report every fault of a shell and its machine in one document."""
    no_route = plant_program(tmp_path, "ssh", 'echo "ssh: connect to b: No route to host" >&2; exit 255')
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        troubles = {
            **no_route,
            "RANK": "0",
            "OMP_NUM_THREADS": "999",
            "GLOO_SOCKET_IFNAME": "nonesuch0",
            "MASTER_PORT": str(port),
            "MASTER_ADDR": "master.invalid",
        }
        hosts = ["--hosts", "nowhere.invalid:2,203.0.113.1"]
        folders = ["--data-dir", f"{small_disk}/data", "--log-dir", f"{small_disk}/log"]
        argv = ["-c", LITTLE, "doctor", "--json", *PATIENT, *hosts, *folders]
        by_name = document(launch("python", 1, argv, env=troubles, check=False, timeout_s=60))
    expected = {
        "launcher": ("error", "RANK set, but WORLD_SIZE is not", "unset RANK"),
        "threads": ("warning", "OMP_NUM_THREADS=999 is more than", "unset OMP_NUM_THREADS"),
        "GLOO_SOCKET_IFNAME": ("error", "nonesuch0 names no interface", "unset GLOO_SOCKET_IFNAME"),
        f"port {port}": ("warning", f"in use by .*{os.getpid()}", "export MASTER_PORT="),
        "open files": ("warning", "300 for each process.*for root to allow", "nofile"),
        "host nowhere.invalid": ("error", "leads to no address", "getent hosts nowhere.invalid"),
        "host master.invalid": ("error", "leads to no address", "getent hosts master.invalid"),
        "ssh nowhere.invalid": ("error", "does not open", "nowhere.invalid"),
        "ssh 203.0.113.1": ("error", "does not open", "203.0.113.1"),
        "data folder": ("error", "Read-only file system", "--data-dir"),
        "log folder": ("error", "Read-only file system", "--log-dir"),
    }
    for name, (status, words, remedy) in expected.items():
        assert by_name[name]["status"] == status, by_name[name]
        assert re.search(words, by_name[name]["found"]), by_name[name]
        assert remedy in by_name[name]["remedy"], by_name[name]


def test_crash_of_torch_spares_other_checks(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    by_name = document(run("--json", env={"PYTHONPATH": str(tmp_path)}))
    assert by_name["torch"]["found"] == "cannot be imported: it was killed by signal 11"
    assert by_name["torch"]["remedy"] == "pip install torch torchvision"
    assert by_name["horovod"]["status"] == "error"
    assert {by_name[name]["status"] for name in ("CUDA", "CPU", "interfaces")} == {"ok"}


def test_signal_ends_started_programs(tmp_path: Path) -> None:
    environ = plant_program(tmp_path, "ssh", f"touch {tmp_path}/started; sleep 600 & sleep 600")
    with start("python", 1, [*DOCTOR, *PATIENT, "--hosts", OTHER], env=environ) as job:
        wait_for((tmp_path / "started").exists, lambda: job.report("no ssh was started"))
        job.popen.terminate()
        assert job.wait().returncode == 128 + signal.SIGTERM


def test_hanging_ssh_ends_at_time_limit(tmp_path: Path) -> None:
    """End in time, and with all processes, although ssh never ends and has started others."""
    words = ("--timeout-s", "9", "--hosts", "127.0.0.2,127.0.0.3", "--json")
    result = run(*words, env=plant_program(tmp_path, "ssh", "sleep 600 & sleep 600"))
    assert json.loads(result.stdout)["seconds"] < 60
    for host in ("127.0.0.2", "127.0.0.3"):
        finding = document(result)[f"ssh {host}"]
        assert finding["status"] == "error"
        assert "no answer in 9 s" in finding["found"]


@pytest.mark.long
@pytest.mark.warm
@requires("horovod")
def test_run_proves_both_engines() -> None:
    by_name = document(run("--run", "--json", *PATIENT))
    for engine, words in (("ddp", "2 ranks by torchrun"), ("horovod", "2 ranks by horovodrun")):
        finding = by_name[f"run {engine}"]
        assert finding["status"] == "ok", finding
        assert re.search(rf"{words}, .*: sums are right; 4 kB in [\d.]+ ms, 4 MB in [\d.]+ ms", finding["found"])
        assert set(finding["figures"]) == {"started_s", "all_reduce_4kb_ms", "all_reduce_4mb_ms", "gb_per_s"}
        assert all(figure > 0 for figure in finding["figures"].values())
    assert by_name["torch"]["status"] == "ok"


def test_run_reports_why_an_engine_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonesuch0")
    found = engines.prove_engine("ddp", "cpu")
    assert found.status == "error"
    assert re.search(r"2 ranks by torchrun failed: .*(nonesuch0|address|interface)", found.found), found
    assert "torchrun --standalone --nproc-per-node 2 -m hvd_trainer.jobs.all_reduce" in found.remedy


def test_run_reports_missing_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    found = engines.prove_engine("horovod", "cpu")
    assert (found.status, found.found) == ("error", "there is no horovodrun here")


# Slurm and ssh.


INSIDE = """
import sys
sys.path.insert(0, "tests/support")
import doctor_checks
(found,) = doctor_checks.run_checks("Slurm")
print(found.status, found.found)
"""


def test_slurm_inside_and_outside_of_a_job(
    slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (found,) = run_checks("Slurm", environ=slurm.environ)
    assert found.status == "ok"
    assert found.found.endswith("outside of a job")
    monkeypatch.chdir(REPOSITORY)
    inside = slurm.client("salloc", "-n1", sys.executable, "-c", INSIDE, check=False, timeout_s=60)
    assert re.search(r"^ok \S+, inside of job \d+; srun starts tasks$", inside.stdout, re.MULTILINE), inside
    (none,) = run_checks("Slurm", environ={"SLURM_CONF": str(tmp_path / "nonesuch")})
    assert (none.status, "this machine is in no cluster" in none.found) == ("ok", True)


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Run an sshd on 127.0.0.2 that accepts one key; yield the options by which it is reached."""
    reason = missing("sshd")
    if reason is not None:
        pytest.skip(reason)
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    assert program is not None
    if os.geteuid() != 0:
        pytest.skip("needs root, to start a server for ssh")
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)]
        subprocess.run(command, check=True)
    with socket.create_server((OTHER, 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "config").write_text(
        f"Port {port}\nListenAddress {OTHER}\nHostKey {tmp_path}/host\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"AuthorizedKeysFile {tmp_path}/user.pub\nPermitRootLogin yes\nPasswordAuthentication no\n"
    )
    # Where Debian's sshd locks itself up; it is made where sshd is started at boot.
    jail = Path("/run/sshd")
    made = not jail.exists()
    jail.mkdir(exist_ok=True)
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([program, "-D", "-e", "-f", str(tmp_path / "config")], stderr=log)
    deadline = time.monotonic() + 10
    while True:
        try:
            socket.create_connection((OTHER, port), timeout=1).close()
            break
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"sshd did not start: {(tmp_path / 'log').read_text()}")
            time.sleep(0.02)
    yield {"ssh_port": port, "ssh_identity_file": tmp_path / "user"}
    server.terminate()
    server.wait(10)
    if made:
        jail.rmdir()


def test_sshd_of_this_machine(sshd: dict[str, Any], tmp_path: Path) -> None:
    reached, clock = run_checks("ssh", hosts=OTHER, **sshd)
    assert (reached.status, clock.status) == ("ok", "ok"), reached
    (refused,) = run_checks("ssh", hosts=OTHER, **{**sshd, "ssh_identity_file": tmp_path / "host"})
    assert "Permission denied" in refused.found
    assert refused.remedy.startswith(f"ssh-copy-id {OTHER}")


def test_changed_host_key_is_refused(
    sshd: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuse a changed key, as a man in the middle would show it; read the known hosts and write none."""
    known = tmp_path / ".ssh/known_hosts"
    known.parent.mkdir()
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_dir=str(tmp_path)))
    for key, status in (("host", "ok"), ("user", "error")):
        line = f"[{OTHER}]:{sshd['ssh_port']} {(tmp_path / f'{key}.pub').read_text()}"
        known.write_text(line)
        found = run_checks("ssh", hosts=OTHER, **sshd)[0]
        assert found.status == status, found
        assert known.read_text() == line
    assert "Host key verification failed" in found.found
