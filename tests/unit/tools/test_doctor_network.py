"""The doctor's checks of the network and of other hosts."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from doctor_checks import OTHER, plant_package, plant_program, run_checks

from hvd_trainer.errors import OptionError
from hvd_trainer.horovod_build import facts
from hvd_trainer.tools.doctor import cli
from hvd_trainer.tools.doctor.context import Host, read_hosts
from hvd_trainer.tools.doctor.findings import Finding
from hvd_trainer.tools.doctor.network import select_interfaces

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


def test_route_to_a_reserved_address_is_named() -> None:
    (lost,) = run_checks("network", hosts="240.0.0.1,nowhere.invalid")
    assert lost.status in ("ok", "error")
    assert "240.0.0.1" in lost.found


def test_silent_name_server_delays_only_its_checks(tmp_path: Path) -> None:
    """Let checks that need a name wait together until the limit, and all others answer at once."""
    environ = plant_program(tmp_path, "ssh", "exit 255")
    ending = threading.Event()

    def endless(name: str) -> list[str]:
        ending.wait()
        return []

    names = ("interfaces", "network", "host names", "MPI", "ssh")
    found = run_checks(*names, environ=environ, limit_s=1.5, look_up=endless, hosts="node1,node2")
    ending.set()
    by_name = {finding.name: finding for finding in found}
    assert {by_name[name].status for name in ("host name", "host node1", "host node2")} == {"error"}
    assert {"interfaces", "MPI", "ssh node1", "ssh node2"} <= by_name.keys()
    assert not any("no answer in 9 s" in by_name[name].found for name in ("interfaces", "MPI", "host name"))


def test_port_of_torchrun_in_use() -> None:
    """Report the port as in use, by this test or by another process."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", 29500))
            trial.listen()
        except OSError:
            pass
        (taken,) = run_checks("port")
    assert (taken.name, taken.status) == ("port 29500", "warning")
    assert re.match(r"torchrun --master-port 295\d\d .*--standalone", taken.remedy)


@pytest.mark.parametrize("text", ["", "a,", "-oProxyCommand=x", "a:0", "a:b", "a b", "a:1:2", "a,a:2"])
def test_malformed_hosts_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="--hosts"):
        read_hosts(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--hosts a,b --ssh-port 0", "--ssh-port must be a whole number, 1 or more"),
        ("--ssh-identity-file /nonesuch", "there is no such file"),
        ("--timeout-s 0", "--timeout-s must be a number, more than 0"),
    ],
)
def test_invalid_options_are_refused(options: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        cli.main(options.split())


def test_hosts_are_parsed() -> None:
    assert read_hosts(None) == ()
    assert read_hosts("a:4, b-1.c,10.0.0.2:1") == (Host("a", 4), Host("b-1.c"), Host("10.0.0.2", 1))


# Other hosts.


def check_ssh(folder: Path, script: str, hosts: str = OTHER, **more: Any) -> list[Finding]:
    return run_checks("ssh", environ=plant_program(folder, "ssh", script), hosts=hosts, **more)


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
    ("shift", "status", "words"),
    [("-5", "warning", r"[45]\.\d s behind"), ("+90000", "error", "1,500 min ahead of")],
)
def test_clock_skew(tmp_path: Path, shift: str, status: str, words: str) -> None:
    """Report a clock that is off. On a busy machine the answer is late, and 5.0 s were reported as 4.9."""
    (tmp_path / "there").mkdir()
    plant_program(tmp_path / "there", "date", f'exec {shutil.which("date")} -d "{shift} seconds" "$@"')
    clock = check_ssh(tmp_path, f'PATH={tmp_path}/there:$PATH exec sh -c "$command"')[-1]
    assert (clock.name, clock.status) == (f"clock {OTHER}", status)
    assert re.search(words, clock.found), clock.found
    assert clock.figures["skew_s"] == pytest.approx(float(shift), abs=1)
    assert "set-ntp true" in clock.remedy


def test_host_with_other_torch(tmp_path: Path) -> None:
    """Report another PyTorch, and another package under an equal version."""
    other = tmp_path / "other"
    plant_package(other, "torch", "9.9.9")
    plant_package(other, "horovod", "0.28.1")
    (other / "horovod").mkdir()
    (other / "horovod/__init__.py").write_text("")
    (other / "horovod/hvd_trainer_build.py").write_text("RECORD = {}\n")
    reached = check_ssh(tmp_path, f'PYTHONPATH={other} exec sh -c "$command"')[0]
    assert reached.status == "error"
    assert re.search(r"torch is 9\.9\.9 there and 2\.\S+ here", reached.found)
    if shutil.which("horovodrun", path=str(Path(sys.executable).parent)):
        assert "horovod 0.28.1 has other files there than here" in reached.found


def test_host_without_python(tmp_path: Path) -> None:
    script = f"""exec sh -c "$(echo "$command" | sed 's#{sys.executable}#/nonesuch#')" """
    lost, clock = check_ssh(tmp_path, script)
    assert (lost.status, clock.status) == ("error", "ok")
    assert f"{sys.executable} cannot be started there" in lost.found


def test_host_with_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"versions": {"python": "3.11.7", "torch": "2.15.0"}, "files": {}, "cpus": 8, "gpus": 2, "folder": True}
    monkeypatch.setattr(facts, "host_facts", lambda folder: here)
    said = facts.HOST_MARK + json.dumps(here | {"folder": False})
    script = f"date '+hvd_trainer time %s.%N'; echo '{said}'"
    found, ranks, clock = check_ssh(tmp_path, script, hosts=f"{OTHER}:3")
    assert [finding.status for finding in (found, ranks, clock)] == ["warning", "warning", "ok"]
    assert f"not the folder {os.getcwd()}" in found.found
    assert ranks.found == "3 ranks are to share 2 GPUs"
