"""Test the doctor's checks of interfaces, names, ports and other hosts."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doctor_checks import OTHER, only, run_checks, write_ssh
from requirements import missing

from hvd_trainer.errors import OptionError
from hvd_trainer.tools.doctor.context import Host, read_hosts
from hvd_trainer.tools.doctor.finding import Finding
from hvd_trainer.tools.doctor.hosts import Visit, judge_visit
from hvd_trainer.tools.doctor.network import judge_localhost, judge_own_name, select_interfaces

# The network.


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("eth", ["eth0", "eth10"]),
        ("=eth0", ["eth0"]),
        ("=eth1", []),
        ("^docker", ["lo", "eth0", "eth10", "ib0"]),
        ("^=eth0,lo", ["eth10", "ib0", "docker0"]),
        ("ib,eth1", ["eth10", "ib0"]),
    ],
)
def test_nccl_interface_patterns(pattern: str, names: list[str]) -> None:
    assert select_interfaces(pattern, ["lo", "eth0", "eth10", "ib0", "docker0"]) == names


def test_interfaces_and_variables() -> None:
    found = only(run_checks("interfaces"), "interfaces")
    assert found.status == "ok"
    assert "lo 127.0.0.1" in found.found
    chosen = {"HOROVOD_GLOO_IFACE": "lo", "NCCL_SOCKET_IFNAME": "^nonesuch", "GLOO_SOCKET_IFNAME": "lo"}
    assert only(run_checks("interfaces", environ=chosen), "interfaces").status == "ok"
    _, wrong = run_checks("interfaces", environ={**chosen, "NCCL_SOCKET_IFNAME": "nonesuch"})
    assert (wrong.name, wrong.status) == ("NCCL_SOCKET_IFNAME", "error")
    assert "nonesuch names no interface that is up" in wrong.found
    _, *alone = run_checks("interfaces", environ={**chosen, "NCCL_SOCKET_IFNAME": ""}, hosts=OTHER)
    assert [finding.name for finding in alone] == ["GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE"]
    assert all("lo leads to no other host" in finding.found for finding in alone)


def test_route_names_interface_of_engines() -> None:
    found = only(run_checks("network"), "network")
    assert found.found.startswith("on this host alone both engines use lo")
    chosen = only(run_checks("network", environ={"GLOO_SOCKET_IFNAME": "lo"}), "network")
    assert "GLOO_SOCKET_IFNAME=lo in this shell comes first" in chosen.found
    near = only(run_checks("network", hosts=f"{socket.gethostname()},{OTHER}"), "network")
    assert near.status == "ok"
    assert re.search(rf"the engines use \S+ to reach {OTHER}$", near.found)
    (lost,) = run_checks("network", hosts="240.0.0.1,nowhere.invalid")
    assert lost.status in ("ok", "error")
    assert "240.0.0.1" in lost.found
    assert run_checks("network", hosts="nowhere.invalid") == []


def test_silent_name_server_delays_only_its_checks(tmp_path: Path) -> None:
    """Let checks that need a name wait together until the limit, and all others answer at once."""
    write_ssh(tmp_path, "exit 255")
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ending = threading.Event()

    def endless(name: str) -> list[str]:
        ending.wait()
        return []

    names = ("interfaces", "network", "host names", "MPI", "ssh", "ports")
    found = run_checks(*names, environ=environ, limit_s=1.5, look_up=endless, hosts="node1,node2")
    ending.set()
    by_name = {finding.name: finding for finding in found}
    assert {by_name[name].status for name in ("host name", "host node1", "host node2")} == {"error"}
    assert {"interfaces", "MPI", "ssh node1", "ssh node2", "free ports"} <= by_name.keys()
    assert not any("no answer in 9 s" in by_name[name].found for name in ("interfaces", "MPI", "host name"))


def test_own_names_that_lead_to_loopback() -> None:
    """Warn of 127.0.1.1, Debian's address of a host's own name, by which other hosts would reach themselves."""
    assert judge_own_name("node1", ["127.0.1.1"], several_hosts=False).status == "ok"
    trap = judge_own_name("node1", ["127.0.1.1"], several_hosts=True)
    assert trap.status == "warning"
    assert "each other host takes for itself" in trap.found
    assert "take out the line with 127.0.1.1" in trap.remedy
    assert judge_own_name("node1", ["10.0.0.5", "127.0.1.1"], several_hosts=True).status == "ok"
    assert judge_own_name("node1", [], several_hosts=False).status == "warning"
    assert judge_own_name("node1", [], several_hosts=True).status == "error"


def test_names_of_other_hosts() -> None:
    """Check names of other hosts, but no addresses, which need no look-up."""
    mine, lost = run_checks("host names", hosts=f"{OTHER},nowhere.invalid")
    assert mine.name == "host name"
    assert (lost.name, lost.status) == ("host nowhere.invalid", "error")
    assert judge_localhost(["127.0.0.1", "::1"]) == []
    (wrong,) = judge_localhost(["::1"])
    assert (wrong.status, wrong.remedy) == ("error", "echo '127.0.0.1 localhost' >> /etc/hosts")


def test_port_of_torchrun_in_use() -> None:
    """Report the port as in use, by this test or by another process."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", 29500))
            trial.listen()
        except OSError:
            pass
        taken, handed_out = run_checks("ports")
    assert (taken.name, taken.status, handed_out.status) == ("port 29500", "warning", "ok")
    assert re.match(r"torchrun --master-port 295\d\d .*--standalone", taken.remedy)


@pytest.mark.parametrize("text", ["", "a,", "-oProxyCommand=x", "a:0", "a:b", "a b", "a:1:2", "a,a:2"])
def test_malformed_hosts_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="--hosts"):
        read_hosts(text)


def test_hosts_are_parsed() -> None:
    assert read_hosts(None) == ()
    assert read_hosts("a:4, b-1.c,10.0.0.2:1") == (Host("a", 4), Host("b-1.c"), Host("10.0.0.2", 1))


# Other hosts.


def check_ssh(folder: Path, script: str, hosts: str = OTHER, **more: Any) -> list[Finding]:
    write_ssh(folder, script)
    return run_checks("ssh", environ={"PATH": f"{folder}:{os.environ['PATH']}"}, hosts=hosts, **more)


def test_host_with_equal_software(tmp_path: Path) -> None:
    """Accept a host whose login script prints, and warn that it has too few CPUs for its ranks."""
    script = f'echo "$@" > {tmp_path}/said; echo Welcome; exec sh -c "$command"'
    reached, ranks, clock = check_ssh(tmp_path, script, hosts=f"{OTHER}:999,localhost:1", ssh_port=2222)[:3]
    assert (reached.name, reached.status) == (f"ssh {OTHER}", "ok"), reached
    assert re.match(r"opens; Python 3\S+, torch 2\S+ and all else as here; \d+ CPUs?, \d+ GPU", reached.found)
    assert (ranks.name, ranks.status) == (f"ranks {OTHER}", "warning")
    assert "999 ranks are to share" in ranks.found
    assert (clock.name, clock.status) == (f"clock {OTHER}", "ok")
    assert abs(clock.figures["skew_s"]) < 1
    said = (tmp_path / "said").read_text()
    assert "-o BatchMode=yes -o ConnectTimeout=3" in said
    assert f"-p 2222 {OTHER} sh -c" in said


def test_own_host_needs_no_ssh(tmp_path: Path) -> None:
    found = check_ssh(tmp_path, "exit 255", hosts=f"localhost,127.0.0.1,{socket.gethostname()}")
    assert [finding.found for finding in found] == ["this host itself: nothing to reach"] * 3


@pytest.mark.parametrize(
    ("shift", "status", "words"), [("-5", "warning", "5.0 s behind"), ("+90000", "error", "1,500 min ahead of")]
)
def test_clock_skew(tmp_path: Path, shift: str, status: str, words: str) -> None:
    (tmp_path / "there").mkdir()
    date = tmp_path / "there/date"
    date.write_text(f'#!/bin/sh\nexec {shutil.which("date")} -d "{shift} seconds" "$@"\n')
    date.chmod(0o755)
    clock = check_ssh(tmp_path, f'PATH={tmp_path}/there:$PATH exec sh -c "$command"')[-1]
    assert (clock.name, clock.status) == (f"clock {OTHER}", status)
    assert words in clock.found
    assert clock.figures["skew_s"] == pytest.approx(float(shift), abs=1)
    assert "set-ntp true" in clock.remedy


def test_host_with_other_torch(tmp_path: Path) -> None:
    """Report another PyTorch, and another package under an equal version."""
    other = tmp_path / "other"
    for name, version in (("torch", "9.9.9"), ("horovod", "0.28.1")):
        (other / f"{name}-{version}.dist-info").mkdir(parents=True)
        (other / f"{name}-{version}.dist-info/METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (other / "horovod").mkdir()
    (other / "horovod/__init__.py").write_text("")
    (other / "horovod/hvd_trainer_build.py").write_text("RECORD = {}\n")
    reached = check_ssh(tmp_path, f'PYTHONPATH={other} exec sh -c "$command"')[0]
    assert reached.status == "error"
    assert re.search(r"torch is 9\.9\.9 there and 2\.\S+ here", reached.found)
    if shutil.which("horovodrun", path=str(Path(sys.executable).parent)):
        assert "horovod 0.28.1 has other files there than here" in reached.found


def test_host_without_python_or_folder(tmp_path: Path) -> None:
    lost, clock = check_ssh(
        tmp_path, f"""exec sh -c "$(echo "$command" | sed 's#{sys.executable}#/nonesuch#')" """
    )
    assert (lost.status, clock.status) == ("error", "ok")
    assert f"{sys.executable} cannot be started there" in lost.found
    here = {"versions": {"python": "3.11.7", "torch": "2.15.0"}, "files": {}, "cpus": 8, "gpus": 2}
    there = {**here, "folder": False}
    found, clock = judge_visit(Host("b", 2), Visit(reached=True, facts=there), here)
    assert (found.status, clock.status) == ("warning", "ok")
    assert f"not the folder {os.getcwd()}" in found.found
    full = judge_visit(Host("b", 3), Visit(reached=True, facts={**there, "folder": True}), here)[1]
    assert (full.status, full.found) == ("warning", "3 ranks are to share 2 GPUs")


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("root@b: Permission denied (publickey,password).", f"ssh-copy-id {OTHER}"),
        ("ssh: connect to host b port 22: Connection refused", "openssh-server"),
        ("ssh: connect to host b port 22: Connection timed out", f"ping {OTHER}"),
        ("Host key verification failed.", f"ssh-keygen -R {OTHER}"),
        ("something else", f"ssh {OTHER} true"),
    ],
)
def test_failed_ssh_has_a_remedy(tmp_path: Path, said: str, remedy: str) -> None:
    (found,) = check_ssh(tmp_path, f"echo '{said}' >&2; exit 255")
    assert found.status == "error"
    assert said in found.found
    assert remedy in found.remedy


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
