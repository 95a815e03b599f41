"""`doctor`: each trouble is planted for real where it can be, and must be found, with what to type about it."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import process_tree
import pytest
import torch
from launchers import REPOSITORY, Result, launch, requires, start
from slurm_cluster import SlurmCluster

from hvd_trainer.backends import EngineOptions, create
from hvd_trainer.data.mnist import default_data_dir
from hvd_trainer.errors import BackendError, OptionError
from hvd_trainer.tools import doctor, doctor_folders, doctor_probe, doctor_run
from hvd_trainer.tools.doctor_finding import Finding, error, ok, warning
from hvd_trainer.tools.doctor_folders import file_system
from hvd_trainer.tools.doctor_gpus import (
    Driver,
    describe_links,
    has_code,
    judge_cuda,
    judge_gpu,
    judge_nccl,
    read_driver,
    read_links,
    read_module,
)
from hvd_trainer.tools.doctor_hosts import Visit, judge_visit
from hvd_trainer.tools.doctor_job import check_sum
from hvd_trainer.tools.doctor_launchers import judge_variables, mpi_version, nodes_by_state
from hvd_trainer.tools.doctor_machine import (
    cpu_quota,
    judge_infiniband,
    judge_open_files,
    judge_shared_memory,
    judge_threads,
    num_cores,
)
from hvd_trainer.tools.doctor_network import judge_localhost, judge_own_name, matching
from hvd_trainer.tools.doctor_probe import Gpu, Seen, TorchSeen
from hvd_trainer.tools.doctor_programs import Answer, Programs, side_by_side
from hvd_trainer.tools.doctor_report import lines_of, summary
from hvd_trainer.tools.doctor_situation import Host, Options, Situation, look_up, read_hosts
from hvd_trainer.tools.doctor_software import judge_horovod, judge_torch
from hvd_trainer.tools.horovod_patches import PATCH_SET
from hvd_trainer.tools.horovod_plan import VERSION, python_tag
from hvd_trainer.tools.horovod_probe import Facts, HorovodFacts, TorchFacts

DOCTOR = ["-m", "hvd_trainer", "doctor"]
STATUSES = ("ok", "warning", "error")
OTHER = "127.0.0.2"
"""Another host, as it seems: it is this machine, too, but none of its interfaces has that address."""


PATIENT = ("--timeout-s", "40")
"""Where it is not about time: the machine may have a lot else to do."""


def run(*options: str, **more: Any) -> Result:
    """The tool as a user starts it."""
    return launch("python", 1, [*DOCTOR, *options], check=False, timeout_s=60, **more)


def document(result: Result) -> dict[str, Any]:
    """What --json has printed, and nothing but that."""
    found: dict[str, Any] = json.loads(result.stdout)
    names = [finding["name"] for finding in found["findings"]]
    assert len(names) == len(set(names)), names
    assert set(found) == {"hvd_trainer", "host", "time", "seconds", "counts", "findings"}
    for finding in found["findings"]:
        assert set(finding) == {"name", "status", "found", "remedy", "figures"}
        assert (finding["status"] == "ok") == (not finding["remedy"]), finding
    counted = [sum(f["status"] == status for f in found["findings"]) for status in STATUSES]
    assert list(found["counts"].values()) == counted
    assert result.returncode == int(found["counts"]["error"] > 0)
    return found


def examine(
    *names: str,
    environ: Mapping[str, str] | None = None,
    seen: Seen | None = None,
    limit_s: float = 40.0,
    look_up: Callable[[str], list[str]] = look_up,
    **options: Any,
) -> list[Finding]:
    """Some of the checks, as the tool makes them, without asking PyTorch."""
    chosen = Options(**options)
    hosts = read_hosts(chosen.hosts)
    variables = {**os.environ, **(environ or {})}
    known = [socket.gethostname(), "localhost", *(host.name for host in hosts)]
    lookups = dict(zip(known, side_by_side([partial(look_up, name) for name in known]), strict=True))
    seeing: Future[Seen] = Future()
    seeing.set_result(seen or Seen(TorchSeen(version="2.15.0")))
    with Programs(variables, time.monotonic() + limit_s) as programs:
        situation = Situation(chosen, hosts, variables, programs, seeing, lookups)
        return doctor.examine(situation, {name: doctor.CHECKS[name] for name in names})


def only(findings: list[Finding], name: str) -> Finding:
    """The finding of that name."""
    (found,) = [finding for finding in findings if finding.name == name]
    return found


# The whole.


def test_lines_for_people() -> None:
    result = run(*PATIENT)
    lines = result.stdout.splitlines()
    assert "\x1b" not in result.stdout
    shown = [re.fullmatch(r"(ok|warning|error) +(\S.*?)  +(\S.*)", line) for line in lines[:-1]]
    named = {match[2]: match[1] for match in shown if match}
    assert {"python", "packages", "torch", "CUDA", "NCCL", "horovod", "MPI", "Slurm", "launcher", "CPU"} <= set(
        named
    )
    assert {"/dev/shm", "open files", "interfaces", "network", "host name", "free ports", "data folder"} <= set(
        named
    )
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


def test_many_troubles_at_once(small_disk: Path) -> None:
    """All that can be wrong with a shell and its surroundings, in one document."""
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        troubles = {
            "RANK": "0",
            "OMP_NUM_THREADS": "999",
            "GLOO_SOCKET_IFNAME": "nonesuch0",
            "MASTER_PORT": str(port),
            "MASTER_ADDR": "master.invalid",
        }
        hosts = ["--hosts", "nowhere.invalid:2,203.0.113.1"]
        folders = ["--data-dir", f"{small_disk}/data", "--log-dir", f"{small_disk}/log"]
        argv = ["-c", LITTLE, "doctor", "--json", *PATIENT, *hosts, *folders]
        found = document(launch("python", 1, argv, env=troubles, check=False, timeout_s=60))
    by_name = {finding["name"]: finding for finding in found["findings"]}
    expected = {
        "launcher": ("error", "RANK set, but WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE are not", "unset RANK"),
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


def test_a_torch_that_crashes_takes_nothing_along(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    result = run("--json", env={"PYTHONPATH": str(tmp_path)})
    by_name = {finding["name"]: finding for finding in document(result)["findings"]}
    assert by_name["torch"]["found"] == "cannot be imported: it was killed by signal 11"
    assert by_name["torch"]["remedy"] == "pip install torch torchvision"
    assert by_name["horovod"]["status"] == "error"
    assert {by_name[name]["status"] for name in ("CUDA", "CPU", "free ports")} == {"ok"}


def test_a_signal_ends_all_that_it_has_started(tmp_path: Path) -> None:
    write_ssh(tmp_path, f"touch {tmp_path}/started; sleep 60 & sleep 60")
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with start("python", 1, [*DOCTOR, *PATIENT, "--hosts", OTHER], env=environ) as job:
        deadline = time.monotonic() + 30
        while not (tmp_path / "started").exists():
            assert time.monotonic() < deadline, job.report("no ssh was started")
            time.sleep(0.02)
        job.popen.terminate()
        assert job.wait(10).returncode == 128 + signal.SIGTERM


def test_nothing_holds_it_up(tmp_path: Path) -> None:
    """An ssh that never ends, and has started others: it is over in its time, and nothing is left of it."""
    write_ssh(tmp_path, "sleep 60 & sleep 60")
    began = time.monotonic()
    result = run("--hosts", "127.0.0.2,127.0.0.3", "--json", env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    seconds = time.monotonic() - began
    found = document(result)
    assert found["seconds"] < 10
    # The rest is Python's own start and end.
    assert seconds < 20
    for host in ("127.0.0.2", "127.0.0.3"):
        (finding,) = [finding for finding in found["findings"] if finding["name"] == f"ssh {host}"]
        assert finding["status"] == "error"
        assert "no answer in 9 s" in finding["found"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hosts", "-oProxyCommand=sh"], "hosts"),
        (["--hosts", "a,b", "--ssh-port", "0"], "--ssh-port must be 1 or more"),
        (["--ssh-identity-file", "/nonesuch"], "there is no such file"),
        (["--timeout-s", "0"], "--timeout-s must be more than 0"),
        (["--nonesuch"], "--nonesuch"),
    ],
)
def test_mistakes_of_a_user(options: list[str], words: str) -> None:
    result = run(*options)
    assert result.returncode == 2
    assert words in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.long
@requires("horovod")
def test_both_engines_are_proved() -> None:
    result = run("--run", "--json", *PATIENT)
    by_name = {finding["name"]: finding for finding in document(result)["findings"]}
    for engine, words in (("ddp", "2 ranks by torchrun"), ("horovod", "2 ranks by horovodrun")):
        finding = by_name[f"run {engine}"]
        assert finding["status"] == "ok", finding
        assert re.search(rf"{words}, .*: sums are right; 4 kB in [\d.]+ ms, 4 MB in [\d.]+ ms", finding["found"])
        assert set(finding["figures"]) == {"started_s", "all_reduce_4kb_ms", "all_reduce_4mb_ms", "gb_per_s"}
        assert all(figure > 0 for figure in finding["figures"].values())
    assert by_name["torch"]["status"] == "ok"


def test_an_engine_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonesuch0")
    found = doctor_run.prove_engine("ddp", "cpu")
    assert found.status == "error"
    assert re.search(r"2 ranks by torchrun failed: .*(nonesuch0|address|interface)", found.found), found
    assert "torchrun --standalone --nproc-per-node 2 -m hvd_trainer.tools.doctor_job" in found.remedy


def test_an_engine_without_its_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    found = doctor_run.prove_engine("horovod", "cpu")
    assert (found.status, found.found) == ("error", "there is no horovodrun here")


def test_which_engines_are_proved() -> None:
    facts = Facts(FACTS, HorovodFacts())
    gpu = Gpu("A", 1, "9.0")
    assert doctor_run.engines(Seen(TORCH, facts)) == ["ddp", "horovod"]
    assert doctor_run.engines(Seen(TORCH, Facts(FACTS, None))) == doctor_run.engines(Seen(TORCH)) == ["ddp"]
    assert doctor_run.engines(Seen(TorchSeen(error="broken"))) == []
    devices = [doctor_run.device_of(Seen(replace(TORCH, gpus=[gpu] * number))) for number in range(3)]
    assert devices == ["cpu", "cpu", "cuda"]


def test_a_wrong_sum_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with create(EngineOptions(backend="single"), {}) as backend:
        check_sum(backend)
        right = backend.all_reduce
        monkeypatch.setattr(
            backend, "all_reduce", lambda tensor: right(tensor).index_fill(0, torch.tensor([3]), 7.0)
        )
        with pytest.raises(BackendError, match="element 3 of the sum of 1 ranks is 7 instead of 3"):
            check_sum(backend)


# How checks are made.


def test_a_check_that_fails_is_a_finding_and_so_is_one_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = threading.Event()

    def broken(situation: Situation) -> list[Finding]:
        raise KeyError("planted")

    def endless(situation: Situation) -> list[Finding]:
        ending.wait()
        return []

    monkeypatch.setattr(
        doctor, "CHECKS", {"broken": broken, "endless": endless, "open files": doctor.CHECKS["open files"]}
    )
    found = examine("broken", "endless", "open files", limit_s=1.0)
    ending.set()
    assert [finding.name for finding in found] == ["broken", "endless", "open files"]
    assert re.fullmatch(r"the check itself failed: KeyError: 'planted' \(line \d+ in broken\)", found[0].found)
    assert [finding.status for finding in found[:2]] == ["error", "error"]
    assert found[1].found == "no answer in 9 s"
    assert found[1].remedy.startswith("python -m hvd_trainer doctor --timeout-s 60")


def test_programs_are_ended_with_all_that_they_started() -> None:
    mark = f"{os.environ[process_tree.MARK]}/programs"
    with Programs({**os.environ, process_tree.MARK: mark}, time.monotonic() + 30) as programs:
        quick = programs.ask("sh", "-c", "echo out; echo err >&2; exit 3")
        assert (quick.code, quick.out, quick.err, quick.last_line) == (3, "out\n", "err\n", "err")
        late = programs.ask("sh", "-c", "echo first; sleep 60 & sleep 60", limit_s=0.5)
        assert (late.code, late.out, late.last_line) == (None, "first\n", "no answer in time")
        assert process_tree.wait_for_end(process_tree.marked(mark), limit_s=5) == []
        programs.start(["sleep", "60"], stderr=subprocess.DEVNULL)
    assert process_tree.wait_for_end(process_tree.marked(mark), limit_s=5) == []


class Terminal(io.StringIO):
    """Says that it is one."""

    def isatty(self) -> bool:
        return True


def test_how_lines_look(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = warning("/dev/shm", "64 MB free of 64 MB", "docker run --shm-size 8g")
    assert lines_of(finding, 10, io.StringIO()) == [
        "warning  /dev/shm    64 MB free of 64 MB",
        "                     type: docker run --shm-size 8g",
    ]
    assert (
        summary([finding, ok("a", "b"), ok("c", "d"), error("e", "f", "g")])
        == "4 checks: 2 ok, 1 warning, 1 error"
    )
    assert summary([ok("a", "b")]) == "1 check: 1 ok, 0 warnings, 0 errors"
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    long = ok("torch", "many words " * 9)
    lines = lines_of(long, 10, Terminal())
    assert lines[0].startswith("\x1b[32mok     \x1b[0m  torch       many")
    assert len(lines) == 2
    monkeypatch.setenv("NO_COLOR", "1")
    assert lines_of(long, 10, Terminal())[0].startswith("ok       torch       many")


# The shell.


@pytest.mark.parametrize(
    ("environ", "status", "words", "remedy"),
    [
        ({}, "ok", "no rank variables are left over", ""),
        ({"WORLD_SIZE": "2"}, "error", "WORLD_SIZE set, but RANK, LOCAL_RANK", "unset WORLD_SIZE"),
        (
            {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"},
            "error",
            "but HOROVOD_LOCAL_RANK",
            "unset HOROVOD_RANK HOROVOD_SIZE",
        ),
        (
            {"RANK": "5", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
            "error",
            "rank 5 of size 2, which cannot be",
            "unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            "ok",
            "this is rank 1 of 2, started by hand",
            "",
        ),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, "ok", "no rank variables", ""),
    ],
)
def test_variables_of_launchers(environ: dict[str, str], status: str, words: str, remedy: str) -> None:
    found = judge_variables(environ)
    assert (found.status, found.remedy) == (status, remedy)
    assert words in found.found


def test_python_is_the_one_that_launchers_start(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho /somewhere/else\n")
    other.chmod(0o755)
    found = only(examine("python", environ={"PATH": f"{tmp_path}:{os.environ['PATH']}"}), "python")
    assert found.status == "warning"
    assert f"is another one: {other}" in found.found
    assert re.match(r"source .*/activate|export PATH=", found.remedy)
    beside = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    assert only(examine("python", environ=beside), "python").status == "ok"


def test_packages_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(examine("packages"), "packages").status == "ok"
    for name, version in (("tqdm", "0.1"), ("torch", "2.0.1")):
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        (tmp_path / f"{name}-{version}.dist-info/METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = only(examine("packages"), "packages")
    assert found.status == "error"
    assert "0.1 tqdm is installed, where tqdm>=" in found.found
    # torchvision asks for a newer torch than this package does, or for one only.
    assert found.found.count("2.0.1 torch is installed, where torch") == 2
    assert found.remedy.count("torch") == 1
    assert "'tqdm>=" in found.remedy


# PyTorch and Horovod.

TORCH = TorchSeen(
    version="2.15.0+cu132", cuda="13.2", nccl="2.30.7", architectures=("sm_80", "sm_90", "compute_90")
)
FACTS = TorchFacts(version="2.15.0+cu132", cuda="13.2", nccl_version="2.30.7")
RECORD = {
    "horovod": VERSION,
    "patch_set": PATCH_SET,
    "torch": FACTS.version,
    "python": python_tag(),
    "cuda": None,
    "nccl": None,
    "mpi": None,
}


@pytest.mark.parametrize(
    ("torch", "status", "words"),
    [
        (TORCH, "ok", "2.15.0+cu132, built for CUDA 13.2, no GPU visible"),
        (TorchSeen(version="2.12.1+cpu"), "ok", "2.12.1+cpu, built for the CPU only, no GPU visible"),
        (TorchSeen(version="2.4.0"), "error", "too old, 2.11 to 2.15 are tested"),
        (TorchSeen(version="2.16.0"), "warning", "2.11 to 2.15 are tested"),
        (
            TorchSeen(error="OSError: libtorch.so: cannot open"),
            "error",
            "cannot be imported: OSError: libtorch.so",
        ),
    ],
)
def test_torch(torch: TorchSeen, status: str, words: str) -> None:
    found = judge_torch(torch)
    assert found.status == status
    assert words in found.found


@pytest.mark.parametrize(
    ("horovod", "torch", "status", "words", "remedy"),
    [
        (None, FACTS, "warning", "not installed, so only --backend ddp works", "install-horovod"),
        (HorovodFacts(record=RECORD), FACTS, "ok", f"{VERSION}, built for this torch with Gloo only", ""),
        (
            HorovodFacts(record={**RECORD, "cuda": "13.0", "nccl": "2.30.7", "mpi": "4.1.4"}),
            FACTS,
            "ok",
            "with Gloo and NCCL 2.30.7, and MPI",
            "",
        ),
        (
            HorovodFacts(record={**RECORD, "torch": "2.14.0"}),
            FACTS,
            "error",
            "it was built for torch 2.14.0, and this is 2.15.0+cu132",
            "python -m hvd_trainer install-horovod    (until then",
        ),
        (
            HorovodFacts(record={**RECORD, "patch_set": 0, "mpi": "4.1.4"}),
            FACTS,
            "error",
            "it was built for patch_set 0",
            "install-horovod --mpi",
        ),
        (HorovodFacts(record={}), FACTS, "warning", "CVE-2024-10190 is open in it", "install-horovod"),
        (
            HorovodFacts(error="it has no PyTorch extension"),
            FACTS,
            "error",
            "it has no PyTorch extension",
            "install",
        ),
        (
            HorovodFacts(record=RECORD),
            replace(FACTS, gpu_count=2),
            "warning",
            "gradients of GPUs go through the CPU",
            "--gpu nccl",
        ),
    ],
)
@requires("horovod")
def test_horovod(horovod: HorovodFacts | None, torch: TorchFacts, status: str, words: str, remedy: str) -> None:
    found = judge_horovod(horovod, torch)
    assert (found.status, words in found.found, remedy in found.remedy) == (status, True, True), found


def test_what_the_probe_says_counts_as_far_as_it_came() -> None:
    torch = json.dumps({"version": "2.15.0", "gpus": [{"name": "A", "memory": 1, "capability": "9.0"}]})
    rest = json.dumps({"torch": {"version": "2.15.0"}, "horovod": {"path": "x", "record": {}}})
    whole = doctor_probe.read(Answer(0, f"{torch}\nnoise\n\n{rest}\n", ""))
    assert whole == Seen(
        TorchSeen(version="2.15.0", gpus=[Gpu("A", 1, "9.0")]),
        Facts(TorchFacts(version="2.15.0"), HorovodFacts(path="x")),
    )
    assert whole.horovod is not None
    crashed = doctor_probe.read(Answer(-11, f"{torch}\n", ""))
    assert (crashed.torch.version, crashed.facts, crashed.ended) == ("2.15.0", None, "it was killed by signal 11")
    said = examine("horovod", seen=crashed)[0]
    assert (said.status, said.found) == ("error", "cannot be imported: it was killed by signal 11")
    slow = doctor_probe.read(Answer(None, torch[:20], ""))
    assert [finding.found for finding in examine("torch", "horovod", seen=slow)] == ["no answer in 9 s"] * 2
    broken = doctor_probe.read(Answer(1, "", "Traceback\nImportError: no libc"))
    assert broken.torch.error == "ImportError: no libc"


# GPUs: recorded output, as there may be none here.

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tSYS\tSYS\tPXB\tSYS\t0-31,64-95\t0\t\tN/A
GPU1\tNV12\t X \tSYS\tSYS\tPXB\tSYS\t0-31,64-95\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNV12\tSYS\tPXB\t32-63,96-127\t1\t\tN/A
GPU3\tSYS\tSYS\tNV12\t X \tSYS\tPXB\t32-63,96-127\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\tSYS\t X \tSYS\t\t\t\t
NIC1\tSYS\tSYS\tPXB\tPXB\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""


def test_links_of_gpus() -> None:
    links = read_links(TOPOLOGY)
    assert links["GPU0", "GPU1"] == links["GPU2", "GPU3"] == "NV12"
    assert len(links) == 6
    assert links == read_links(re.sub(r"\x1b\[\d+m", "", TOPOLOGY))
    assert describe_links(links) == (
        "GPU0-GPU1, GPU2-GPU3 NV12 (NVLink); "
        "GPU0-GPU2, GPU0-GPU3, GPU1-GPU2, GPU1-GPU3 SYS (PCIe and from one CPU socket to another)"
    )
    two = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tPHB\t0-63\t0\nGPU1\tPHB\t X \t0-63\t0\n"
    assert describe_links(read_links(two)) == "GPU0-GPU1 PHB (PCIe through the CPU)"
    all_alike = dict.fromkeys(links, "NV18")
    assert describe_links(all_alike) == "all GPUs to all others NV18 (NVLink)"
    assert describe_links({("GPU0", "GPU1"): "XYZ"}) == "GPU0-GPU1 XYZ"
    assert read_links("Failed to initialize NVML: Unknown Error\n") == {}


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (["sm_80", "sm_90"], "9.0", True),
        (["sm_80"], "8.6", True),
        (["sm_86"], "8.0", False),
        (["sm_80", "sm_90"], "10.0", False),
        (["sm_80", "compute_80"], "12.0", True),
        (["sm_90a"], "9.0", True),
        (["sm_100a"], "10.3", False),
        (["sm_100f"], "10.3", True),
        (["sm_120"], "12.0", True),
        (["sm_75", "nonsense"], "7.0", False),
        ([], "9.0", False),
    ],
)
def test_code_for_a_gpu(architectures: list[str], capability: str, runs: bool) -> None:
    assert has_code(architectures, capability) is runs


SMI = """\
GPU-5baec991-de63-c196-1766-04c38407e133, 570.124.06, 81076
GPU-02c05ee3-bdb5-aac7-f9e8-a4c8f3f725b3, 570.124.06, [N/A]
"""


def test_gpus() -> None:
    driver = read_driver(SMI)
    assert driver == Driver("570.124.06", {"5baec991-de63-c196-1766-04c38407e133": 81076})
    closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
    assert read_module(closed) == "535.104.05"
    opened = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (dvs-builder)\n"
    assert read_module(opened) == "570.124.06"
    assert read_module("") is None
    gpu = Gpu("NVIDIA H100 80GB HBM3", 79 * 2**30, "9.0", "5baec991-de63-c196-1766-04c38407e133")
    assert judge_gpu(0, gpu, TORCH, driver) == ok(
        "GPU 0", "NVIDIA H100 80GB HBM3, 79.0 GB (79.2 GB free), compute capability 9.0"
    )
    old = judge_gpu(1, replace(gpu, name="Tesla P100", capability="6.0"), TORCH, driver)
    assert old.status == "error"
    assert "this torch has no code (it has sm_80, sm_90, compute_90)" in old.found
    amd = replace(TORCH, hip="6.4", cuda=None)
    assert judge_gpu(0, Gpu("AMD Instinct MI300X", 2**37, "gfx942"), amd, Driver()).status == "ok"


@pytest.mark.parametrize(
    ("driver", "torch", "environ", "status", "words", "remedy"),
    [
        (Driver(), TORCH, {}, "ok", "no NVIDIA driver, so training runs on the CPU", ""),
        (Driver("570.1", {"a": 1}), replace(TORCH, gpus=[Gpu("A", 1, "9.0")]), {}, "ok", "torch sees 1 GPU", ""),
        (
            Driver("570.1", {"a": 1, "b": 1}),
            replace(TORCH, gpus=[Gpu("A", 1, "9.0")]),
            {"CUDA_VISIBLE_DEVICES": "1"},
            "ok",
            "torch sees 1 GPU (CUDA_VISIBLE_DEVICES=1)",
            "",
        ),
        (
            Driver("570.1", {"a": 1, "b": 1}),
            TORCH,
            {"CUDA_VISIBLE_DEVICES": ""},
            "warning",
            "driver 570.1 with 2 GPUs, and CUDA_VISIBLE_DEVICES= hides them all",
            "unset CUDA_VISIBLE_DEVICES",
        ),
        (
            Driver("470.1", {"a": 1}),
            replace(TORCH, gpu_error="The NVIDIA driver on your system is too old (found version 11040)"),
            {},
            "error",
            "torch sees none: The NVIDIA driver on your system is too old",
            "update the driver",
        ),
        (
            Driver("570.1", {"a": 1}),
            TorchSeen(version="2.15.0+cpu"),
            {},
            "warning",
            "built without CUDA",
            "pip install",
        ),
        (
            Driver("570.1", error="Failed to initialize NVML: Driver/library version mismatch"),
            TORCH,
            {},
            "error",
            "nvidia-smi says: Failed to initialize NVML",
            "reboot",
        ),
    ],
)
def test_the_driver(
    driver: Driver, torch: TorchSeen, environ: dict[str, str], status: str, words: str, remedy: str
) -> None:
    found = judge_cuda(driver, torch, environ)
    assert (found.status, words in found.found, remedy in found.remedy) == (status, True, True), found


def test_a_machine_with_gpus(tmp_path: Path) -> None:
    """nvidia-smi as a program that gives the recorded answers."""
    (tmp_path / "topology").write_text(TOPOLOGY)
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\nif [ $1 = topo ]; then cat {tmp_path}/topology; else printf '{SMI}'; fi\n")
    smi.chmod(0o755)
    gpu = Gpu("NVIDIA H100 80GB HBM3", 79 * 2**30, "9.0", "5baec991-de63-c196-1766-04c38407e133")
    seen = Seen(replace(TORCH, gpus=[gpu, replace(gpu, uuid="02c05ee3")]))
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    found = examine("CUDA", "NCCL", "GPU links", seen=seen, environ=environ)
    assert [finding.name for finding in found] == ["CUDA", "GPU 0", "GPU 1", "NCCL", "GPU links"]
    assert all(finding.status == "ok" for finding in found), found
    assert "driver 570.124.06, torch sees 2 GPUs" in found[0].found
    assert "GPU0-GPU1, GPU2-GPU3 NV12 (NVLink)" in found[-1].found


def test_nccl() -> None:
    pair = replace(TORCH, gpus=[Gpu("A", 1, "9.0")] * 2)
    assert judge_nccl("2.30.7", TORCH, {}).found == "2.30.7, for GPUs only: CPUs exchange by Gloo"
    assert judge_nccl("2.30.7", pair, {"NCCL_IB_DISABLE": "0"}) == ok("NCCL", "2.30.7")
    slowed = judge_nccl("2.30.7", pair, {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"})
    assert (slowed.status, slowed.remedy[:38]) == ("warning", "unset NCCL_P2P_DISABLE NCCL_IB_DISABLE")
    assert judge_nccl(None, replace(pair, nccl=None), {}).status == "error"
    assert judge_nccl(None, TorchSeen(version="2.15.0"), {}).status == "ok"


# The machine.


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "200000 100000"}, 2.0),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/a/b\n", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5),
        ("0::/a/b\n", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "50000 100000"}, 0.5),
        # A container that sees its own group at the root, under another name than outside.
        ("0::/../../docker/7f3a\n", {"cpu.max": "300000 100000"}, 3.0),
        (
            "4:cpu,cpuacct:/docker/7f3a\n1:name=systemd:/docker/7f3a\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "400000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            4.0,
        ),
        ("2:cpu:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("3:memory:/\n", {}, None),
    ],
)
def test_quotas_of_control_groups(tmp_path: Path, own: str, files: dict[str, str], quota: float | None) -> None:
    (tmp_path / "self").write_text(own)
    for name, text in files.items():
        file = tmp_path / "root" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    assert cpu_quota(tmp_path / "self", tmp_path / "root") == quota
    assert cpu_quota(tmp_path / "nonesuch", tmp_path / "root") is None


def test_hardware_threads_are_no_cores(tmp_path: Path) -> None:
    for cpu in range(4):
        (tmp_path / f"cpu{cpu}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/topology/thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    assert num_cores([0, 1, 2, 3], tmp_path) == 2
    assert num_cores([0, 2], tmp_path) == 1
    assert num_cores([0, 1, 9], tmp_path) == 3


@pytest.mark.parametrize(
    ("setting", "limit", "status"),
    [
        (None, 2, "ok"),
        ("2", 2, "ok"),
        ("3", 2, "warning"),
        ("2,1", 2, "ok"),
        ("many", 2, "warning"),
        ("0", 2, "warning"),
    ],
)
def test_threads(setting: str | None, limit: int, status: str) -> None:
    assert judge_threads(setting, limit).status == status


def test_shared_memory(small_disk: Path) -> None:
    found = judge_shared_memory(small_disk)
    assert found.status == "warning"
    assert "4 MB free of 4 MB" in found.found
    assert "docker run --shm-size 8g" in found.remedy
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert judge_shared_memory(small_disk).status == "error"
    assert judge_shared_memory(small_disk / "nonesuch").status == "error"


def test_open_files() -> None:
    endless = resource.RLIM_INFINITY
    assert judge_open_files(1024, 4096, 1024) == ok("open files", "1,024 for each process")
    assert judge_open_files(endless, endless, 9999).status == "ok"
    assert judge_open_files(256, 1048576, 1024).remedy == "ulimit -n 65536"
    assert judge_open_files(256, 2048, 1024).remedy == "ulimit -n 2048"
    assert "Docker: --ulimit nofile" in judge_open_files(256, 512, 1024).remedy


def test_infiniband(tmp_path: Path) -> None:
    assert judge_infiniband(tmp_path, 8 * 2**20) == []
    port = tmp_path / "mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
    ports, locked = judge_infiniband(tmp_path, 8 * 2**20)
    assert ports == ok("InfiniBand", "mlx5_0 port 1 ACTIVE 200 Gb/sec (4X HDR)")
    assert (locked.status, locked.name) == ("warning", "locked memory")
    assert "ulimit -l unlimited" in locked.remedy
    (port / "state").write_text("1: DOWN\n")
    ports, locked = judge_infiniband(tmp_path, resource.RLIM_INFINITY)
    assert (ports.status, locked.status) == ("warning", "ok")


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
def test_patterns_of_nccl(pattern: str, names: list[str]) -> None:
    assert matching(pattern, ["lo", "eth0", "eth10", "ib0", "docker0"]) == names


def test_interfaces() -> None:
    found = only(examine("interfaces"), "interfaces")
    assert found.status == "ok"
    assert "lo 127.0.0.1" in found.found
    chosen = {"HOROVOD_GLOO_IFACE": "lo", "NCCL_SOCKET_IFNAME": "^nonesuch", "GLOO_SOCKET_IFNAME": "lo"}
    assert only(examine("interfaces", environ=chosen), "interfaces").status == "ok"
    _, wrong = examine("interfaces", environ={**chosen, "NCCL_SOCKET_IFNAME": "nonesuch"})
    assert (wrong.name, wrong.status) == ("NCCL_SOCKET_IFNAME", "error")
    assert "nonesuch names no interface that is up" in wrong.found
    _, *alone = examine("interfaces", environ={**chosen, "NCCL_SOCKET_IFNAME": ""}, hosts=OTHER)
    assert [finding.name for finding in alone] == ["GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE"]
    assert all("lo leads to no other host" in finding.found for finding in alone)


def test_which_interface_the_engines_take() -> None:
    found = only(examine("network"), "network")
    assert found.found.startswith("on this host alone both engines use lo")
    chosen = only(examine("network", environ={"GLOO_SOCKET_IFNAME": "lo"}), "network")
    assert "GLOO_SOCKET_IFNAME=lo in this shell comes first" in chosen.found
    near = only(examine("network", hosts=f"{socket.gethostname()},{OTHER}"), "network")
    assert near.status == "ok"
    assert re.search(rf"the engines use \S+ to reach {OTHER}$", near.found)
    (lost,) = examine("network", hosts="240.0.0.1,nowhere.invalid")
    assert lost.status in ("ok", "error")
    assert "240.0.0.1" in lost.found
    assert examine("network", hosts="nowhere.invalid") == []


def test_a_name_server_that_never_answers() -> None:
    """It holds up what waits for it, in one and the same time, and nothing else."""
    ending = threading.Event()

    def endless(name: str) -> list[str]:
        ending.wait()
        return []

    names = ("interfaces", "network", "host names", "MPI", "ssh", "ports")
    found = examine(*names, limit_s=1.5, look_up=endless, hosts="node1,node2")
    ending.set()
    by_name = {finding.name: finding for finding in found}
    assert {by_name[name].status for name in ("host name", "host node1", "host node2")} == {"error"}
    assert {"interfaces", "MPI", "ssh node1", "ssh node2", "free ports"} <= by_name.keys()
    assert not any("no answer in 9 s" in by_name[name].found for name in ("interfaces", "MPI", "host name"))


def test_names_that_lead_home() -> None:
    """Debian gives a host's own name the address 127.0.1.1, by which every other host would reach itself."""
    assert judge_own_name("node1", ["127.0.1.1"], several_hosts=False).status == "ok"
    trap = judge_own_name("node1", ["127.0.1.1"], several_hosts=True)
    assert trap.status == "warning"
    assert "each other host takes for itself" in trap.found
    assert "take out the line with 127.0.1.1" in trap.remedy
    assert judge_own_name("node1", ["10.0.0.5", "127.0.1.1"], several_hosts=True).status == "ok"
    assert judge_own_name("node1", [], several_hosts=False).status == "warning"
    assert judge_own_name("node1", [], several_hosts=True).status == "error"


def test_names_of_other_hosts() -> None:
    """An address is no name, and leads to itself."""
    mine, lost = examine("host names", hosts=f"{OTHER},nowhere.invalid")
    assert mine.name == "host name"
    assert (lost.name, lost.status) == ("host nowhere.invalid", "error")
    assert judge_localhost(["127.0.0.1", "::1"]) == []
    (wrong,) = judge_localhost(["::1"])
    assert (wrong.status, wrong.remedy) == ("error", "echo '127.0.0.1 localhost' >> /etc/hosts")


def test_the_port_of_torchrun() -> None:
    """Taken by this test, or by whoever has it already."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", 29500))
            trial.listen()
        except OSError:
            pass
        taken, handed_out = examine("ports")
    assert (taken.name, taken.status, handed_out.status) == ("port 29500", "warning", "ok")
    assert re.match(r"torchrun --master-port 295\d\d .*--standalone", taken.remedy)


@pytest.mark.parametrize("text", ["", "a,", "-oProxyCommand=x", "a:0", "a:b", "a b", "a:1:2", "a,a:2"])
def test_malformed_hosts(text: str) -> None:
    with pytest.raises(OptionError, match="--hosts"):
        read_hosts(text)


def test_hosts() -> None:
    assert read_hosts(None) == ()
    assert read_hosts("a:4, b-1.c,10.0.0.2:1") == (Host("a", 4), Host("b-1.c"), Host("10.0.0.2", 1))


# Other hosts.


def write_ssh(folder: Path, script: str) -> None:
    """An `ssh` that runs this; `$command` is what the other host should run."""
    program = folder / "ssh"
    program.write_text(f"#!/bin/sh\nfor command; do :; done\n{textwrap.dedent(script)}\n")
    program.chmod(0o755)


def visit(folder: Path, script: str, hosts: str = OTHER, **more: Any) -> list[Finding]:
    write_ssh(folder, script)
    return examine("ssh", environ={"PATH": f"{folder}:{os.environ['PATH']}"}, hosts=hosts, **more)


def test_a_host_like_this_one(tmp_path: Path) -> None:
    """Its login script prints something, and it has too few CPUs for its ranks."""
    script = f'echo "$@" > {tmp_path}/said; echo Welcome; exec sh -c "$command"'
    reached, ranks, clock = visit(tmp_path, script, hosts=f"{OTHER}:999,localhost:1", ssh_port=2222)[:3]
    assert (reached.name, reached.status) == (f"ssh {OTHER}", "ok"), reached
    assert re.match(r"opens; Python 3\S+, torch 2\S+ and all else as here; \d+ CPUs?, \d+ GPU", reached.found)
    assert (ranks.name, ranks.status) == (f"ranks {OTHER}", "warning")
    assert "999 ranks are to share" in ranks.found
    assert (clock.name, clock.status) == (f"clock {OTHER}", "ok")
    assert abs(clock.figures["skew_s"]) < 1
    said = (tmp_path / "said").read_text()
    assert "-o BatchMode=yes -o ConnectTimeout=3" in said
    assert f"-p 2222 {OTHER} sh -c" in said


def test_this_host_is_not_reached_by_ssh(tmp_path: Path) -> None:
    found = visit(tmp_path, "exit 255", hosts=f"localhost,127.0.0.1,{socket.gethostname()}")
    assert [finding.found for finding in found] == ["this host itself: nothing to reach"] * 3


@pytest.mark.parametrize(
    ("shift", "status", "words"), [("-5", "warning", "5.0 s behind"), ("+90000", "error", "1,500 min ahead of")]
)
def test_a_clock_that_is_wrong(tmp_path: Path, shift: str, status: str, words: str) -> None:
    (tmp_path / "there").mkdir()
    date = tmp_path / "there/date"
    date.write_text(f'#!/bin/sh\nexec {shutil.which("date")} -d "{shift} seconds" "$@"\n')
    date.chmod(0o755)
    clock = visit(tmp_path, f'PATH={tmp_path}/there:$PATH exec sh -c "$command"')[-1]
    assert (clock.name, clock.status) == (f"clock {OTHER}", status)
    assert words in clock.found
    assert clock.figures["skew_s"] == pytest.approx(float(shift), abs=1)
    assert "set-ntp true" in clock.remedy


def test_another_torch_there(tmp_path: Path) -> None:
    """And another package under the same version."""
    other = tmp_path / "other"
    for name, version in (("torch", "9.9.9"), ("horovod", "0.28.1")):
        (other / f"{name}-{version}.dist-info").mkdir(parents=True)
        (other / f"{name}-{version}.dist-info/METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (other / "horovod").mkdir()
    (other / "horovod/__init__.py").write_text("")
    (other / "horovod/hvd_trainer_build.py").write_text("RECORD = {}\n")
    reached = visit(tmp_path, f'PYTHONPATH={other} exec sh -c "$command"')[0]
    assert reached.status == "error"
    assert re.search(r"torch is 9\.9\.9 there and 2\.\S+ here", reached.found)
    if shutil.which("horovodrun", path=str(Path(sys.executable).parent)):
        assert "horovod 0.28.1 has other files there than here" in reached.found


def test_no_python_there_and_no_folder(tmp_path: Path) -> None:
    lost, clock = visit(tmp_path, f"""exec sh -c "$(echo "$command" | sed 's#{sys.executable}#/nonesuch#')" """)
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
        ("something else", f"ssh {OTHER} true"),
    ],
)
def test_an_ssh_that_does_not_open(tmp_path: Path, said: str, remedy: str) -> None:
    (found,) = visit(tmp_path, f"echo '{said}' >&2; exit 255")
    assert found.status == "error"
    assert said in found.found
    assert remedy in found.remedy


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A real one on 127.0.0.2, that lets one key in: the options by which it is reached."""
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None or shutil.which("ssh-keygen") is None:
        pytest.skip("no sshd on this machine: apt-get install openssh-server")
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


def test_a_real_ssh(sshd: dict[str, Any], tmp_path: Path) -> None:
    reached, clock = examine("ssh", hosts=OTHER, **sshd)
    assert (reached.status, clock.status) == ("ok", "ok"), reached
    (refused,) = examine("ssh", hosts=OTHER, **{**sshd, "ssh_identity_file": tmp_path / "host"})
    assert "Permission denied" in refused.found
    assert refused.remedy.startswith(f"ssh-copy-id {OTHER}")


# Folders.


def test_folders_are_left_as_they_were(tmp_path: Path) -> None:
    new = tmp_path / "a/b"
    data, logs = examine("data folder", "log folder", data_dir=new, log_dir=tmp_path)
    assert (data.status, logs.status) == ("ok", "ok")
    assert f"{new} (can be made): " in data.found
    assert data.figures["free_mb"] > 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert "it is a file" in only(examine("log folder", log_dir=tmp_path / "file"), "log folder").found
    assert examine("log folder") == []


def test_a_small_disk(small_disk: Path) -> None:
    data, logs = examine("data folder", "log folder", data_dir=small_disk, log_dir=small_disk)
    assert (data.status, logs.status) == ("warning", "warning")
    assert "4 MB free on memory (tmpfs): little for data sets" in data.found
    (small_disk / "fill").write_bytes(bytes(4 * 2**20))
    assert "No space left" in only(examine("log folder", log_dir=small_disk), "log folder").found
    # Data that are there need no room.
    (small_disk / "fill").unlink()
    (small_disk / "train-images-idx3-ubyte.gz").write_text("")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert "data are there" in only(examine("data folder", data_dir=small_disk), "data folder").found


def test_the_default_data_folder_is_the_jobs_own() -> None:
    assert doctor_folders.default_data_dir() == default_data_dir()


def test_kinds_of_file_systems() -> None:
    mounts = (
        "/dev/vda / ext4 rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\nserver:/home /home nfs4 rw 0 0\n"
        "/dev/sdb /home/my\\040disk xfs rw 0 0\n"
    )
    assert file_system(Path("/var/x"), mounts) == "local disk (ext4)"
    assert file_system(Path("/home/me/x"), mounts) == "network (nfs4)"
    assert file_system(Path("/home/my disk/x"), mounts) == "local disk (xfs)"
    assert file_system(Path("/homer"), mounts) == "local disk (ext4)"
    assert file_system(Path("/dev/shm"), mounts) == "memory (tmpfs)"


# MPI and Slurm.


def test_versions_of_mpi() -> None:
    assert mpi_version("mpirun (Open MPI) 4.1.4\n\nReport bugs to ...\n") == "Open MPI 4.1.4"
    hydra = "HYDRA build details:\n    Version:                                 4.0.2\n    Release Date: ...\n"
    assert mpi_version(hydra) == "MPICH 4.0.2"
    intel = "Intel(R) MPI Library for Linux* OS, Version 2021.10 Build 20230619 (id: c2e19c2f3e)\n"
    assert mpi_version(intel).startswith("Intel(R) MPI Library for Linux* OS, Version 2021.10")
    assert mpi_version("") == "of unknown version"


def test_neither_mpi_nor_slurm_is_needed(tmp_path: Path) -> None:
    found = examine("MPI", "Slurm", environ={"PATH": str(tmp_path)})
    if not any(Path(folder, name).exists() for folder in ("/usr/sbin", "/sbin") for name in ("mpirun", "srun")):
        assert [finding.status for finding in found] == ["ok", "ok"]
        assert all("not needed" in finding.found for finding in found)


INSIDE = """
import sys
sys.path.insert(0, "tests")
import test_doctor
found = test_doctor.only(test_doctor.examine("Slurm"), "Slurm")
print(found.status, found.found)
"""


def test_slurm(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = only(examine("Slurm", environ=slurm.environ), "Slurm")
    assert found.status == "ok"
    assert re.search(r"outside of a job; 3 nodes: 3 \w+", found.found)
    monkeypatch.chdir(REPOSITORY)
    inside = slurm.client("salloc", "-n1", sys.executable, "-c", INSIDE, check=False, timeout_s=60)
    assert re.search(r"^ok \S+, inside of job \d+; srun starts tasks$", inside.stdout, re.MULTILINE), inside
    # A cluster whose controller is down, and no cluster at all.
    text = Path(slurm.environ["SLURM_CONF"]).read_text()
    (tmp_path / "slurm.conf").write_text(re.sub(r"SlurmctldPort=\d+", "SlurmctldPort=1", text))
    down = only(examine("Slurm", environ={"SLURM_CONF": str(tmp_path / "slurm.conf")}), "Slurm")
    assert down.status == "warning"
    assert "its controller does not answer" in down.found
    none = only(examine("Slurm", environ={"SLURM_CONF": str(tmp_path / "nonesuch")}), "Slurm")
    assert none.status == "ok"
    assert "this machine is in no cluster" in none.found


def test_nodes_are_counted_once() -> None:
    assert nodes_by_state("a idle\nb down*\na idle\nc idle\n") == "3 nodes: 2 idle, 1 down*"
    assert nodes_by_state("") == "no nodes"
