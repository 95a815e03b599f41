"""Test the doctor's checks, each in planted situations."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from doctor_checks import OTHER, TORCH, plant_program, run_checks
from launchers import requires

from benchmarks import NO_GPUS
from hvd_trainer.errors import OptionError
from hvd_trainer.horovod_build import facts
from hvd_trainer.horovod_build.build_plan import VERSION, python_tag
from hvd_trainer.horovod_build.facts import Facts, Gpu, HorovodFacts, TorchFacts, parse_facts
from hvd_trainer.horovod_build.patch_set import PATCH_SET
from hvd_trainer.launch.slurm import GPU_VARIABLES
from hvd_trainer.tools.doctor import cli, gpus, machine
from hvd_trainer.tools.doctor.context import Host, read_hosts
from hvd_trainer.tools.doctor.findings import Finding
from hvd_trainer.tools.doctor.gpus import describe_links, has_code, read_links
from hvd_trainer.tools.doctor.machine import cpu_quota, file_system, num_cores
from hvd_trainer.tools.doctor.network import select_interfaces
from hvd_trainer.utils.files import default_data_dir
from hvd_trainer.utils.process import cpu_ids
from hvd_trainer.utils.text import INSTALL_HOROVOD

Row = tuple[str, str, str, str, str, dict[str, Any]]


def row(check: str, status: str, found: str, remedy: str = "", *, name: str = "", **given: Any) -> Row:
    """Build a row of a table: a check finds these words in a situation, and says to type those.

    Args:
        name: of the finding, if not the check's.
        given: the situation: arguments of `run_checks`; and `programs`, scripts by name; `driver`, what the kernel
            says of NVIDIA's; `limits`, the soft and the hard limit of open files.
    """
    return (check, name or check, status, found, remedy, given)


RECORD = {
    "horovod": VERSION,
    "patch_set": PATCH_SET,
    "torch": TORCH.version,
    "python": python_tag(),
    "cuda": None,
    "nccl": None,
    "mpi": None,
    "proved": True,
}
WITH_NCCL = {"cuda": "13.0", "nccl": "2.30.7"}
H100 = Gpu("NVIDIA H100 80GB HBM3", 79 * 2**30, "9.0", "5baec991-de63-c196-1766-04c38407e133")
ONE = replace(TORCH, gpus=[H100])
PAIR = replace(TORCH, gpus=[H100, replace(H100, uuid="02c05ee3")])
XPU = TorchFacts(version="2.15.0+xpu", kind="xpu", gpus=[Gpu("Intel Data Center GPU Max 1550", 2**36, "")] * 2)
OLD = replace(TORCH, gpus=[replace(H100, capability="6.0")])
AMD = replace(TORCH, hip="6.4", cuda=None, gpus=[Gpu("AMD Instinct MI300X", 2**37, "gfx942")])
ON_CPU = TorchFacts(version="2.15.0+cpu")


SMI = "GPU-5baec991-de63-c196-1766-04c38407e133, 570.1, 81076\nGPU-02c05ee3, 570.1, [N/A]\n"
TWO = f"printf '{SMI}'"
SMI_FAILS = "echo 'Failed to initialize NVML: Driver/library version mismatch' >&2; exit 18"


STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": "1",
}
"""A rank of --gpus-per-task=1, with which NCCL cannot reach the neighbours' GPUs by CUDA IPC."""
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
OPENED = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (dvs-builder)\n"
ENDLESS = resource.RLIM_INFINITY
IN_CLUSTER = {"srun": "echo slurm 25.11.2", "sinfo": "printf 'a idle\nb down*\na idle\nc idle\n'"}
OWN_INTERFACES = {"HOROVOD_GLOO_IFACE": "lo", "NCCL_SOCKET_IFNAME": "^nonesuch", "GLOO_SOCKET_IFNAME": "lo"}
SLOWING = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def launcher(status: str, found: str, remedy: str = "", **environ: str) -> Row:
    return row("launcher", status, found, remedy, environ=environ)


def horovod(status: str, found: str, remedy: str = "", torch: TorchFacts = TORCH, **record: Any) -> Row:
    return row("horovod", status, found, remedy, facts=Facts(torch, HorovodFacts(record=RECORD | record)))


def nccl(status: str, found: str, remedy: str = "", *, torch: TorchFacts, **environ: str) -> Row:
    return row("NCCL", status, found, remedy, torch=torch, environ=environ)


def cuda(status: str, found: str, remedy: str = "", *, torch: TorchFacts, smi: str = TWO, **given: Any) -> Row:
    return row("CUDA", status, found, remedy, torch=torch, programs={"nvidia-smi": smi} if smi else {}, **given)


def mpi(found: str, said: str) -> Row:
    return row("MPI", "ok", found, programs={"mpirun": f"printf '{said}'"})


def threads(status: str, setting: str) -> Row:
    remedy = "" if status == "ok" else "unset OMP_NUM_THREADS"
    return row("CPU", status, setting, remedy, name="threads", environ={"OMP_NUM_THREADS": setting})


def open_files(status: str, found: str, remedy: str, soft: int, hard: int) -> Row:
    return row("open files", status, found, remedy, limits=(soft, hard))


def interfaces(variable: str, value: str, problem: str, hosts: str | None = None) -> Row:
    given = {"environ": OWN_INTERFACES | {variable: value}, "hosts": hosts}
    return row("interfaces", "error", f"{value} {problem}", f"unset {variable}", name=variable, **given)


def host_name(name: str, status: str, found: str, remedy: str, *addresses: str, hosts: str | None = None) -> Row:
    known = {OTHER: [OTHER], "localhost": ["127.0.0.1", "::1"]} if name != "localhost" else {}
    given = {"hosts": hosts, "look_up": lambda asked: known.get(asked, list(addresses))}
    return row("host names", status, found, remedy, name=name, **given)


def ssh(said: str, remedy: str) -> Row:
    given = {"hosts": OTHER, "programs": {"ssh": f"echo '{said}' >&2; exit 255"}}
    return row("ssh", "error", said, remedy, name=f"ssh {OTHER}", **given)


FINDINGS = [
    launcher("ok", "no rank variables are left over"),
    launcher("error", "WORLD_SIZE set, but RANK, LOCAL_RANK", "unset WORLD_SIZE", WORLD_SIZE="2"),
    launcher("error", "but HOROVOD_LOCAL_RANK", "unset HOROVOD_RANK", HOROVOD_RANK="0", HOROVOD_SIZE="2"),
    launcher("error", "rank 5 of size 2", f"unset {' '.join(RANKS)}", **dict(zip(RANKS, "5022", strict=True))),
    launcher("ok", "this is rank 1 of 2, started by hand", **dict(zip(RANKS, "1122", strict=True))),
    launcher("ok", "no rank variables", SLURM_JOB_ID="7", SLURM_NTASKS="4"),
    row("torch", "ok", "2.15.0+cu132, built for CUDA 13.2, no GPU visible"),
    row("torch", "ok", "2.15.0+cpu, built for the CPU only, no GPU visible", torch=ON_CPU),
    row("torch", "ok", "2.15.0+xpu, built for xpu, 2 GPUs visible", torch=XPU),
    row("torch", "error", "too old, 2.11 to 2.15 are tested", "torch>=2.11", torch=TorchFacts(version="2.4.0")),
    row("torch", "warning", "2.11 to 2.15 are tested", "torch<=2.15", torch=TorchFacts(version="2.16.0")),
    row("torch", "error", "cannot be imported: OSError: lib", "pip install", torch=TorchFacts("OSError: lib: no")),
    row("horovod", "warning", "not installed, so only --backend ddp works", INSTALL_HOROVOD),
    row("horovod", "error", "is built for one torch", "see the line of torch", torch=TorchFacts("broken")),
    row("horovod", "warning", "CVE-2024-10190 is open", INSTALL_HOROVOD, facts=Facts(TORCH, HorovodFacts())),
    row("horovod", "error", "no extension", INSTALL_HOROVOD, facts=Facts(TORCH, HorovodFacts("no extension"))),
    horovod("ok", f"{VERSION}, built for this torch with Gloo only"),
    horovod("ok", "with Gloo and NCCL 2.30.7, and MPI", **WITH_NCCL, mpi="4.1.4"),
    horovod("ok", "with Gloo and NCCL 2.30.7", torch=PAIR, **WITH_NCCL),
    horovod(
        "error", "for torch 2.15.0+cu132, and this is 2.14.0", "(until", torch=replace(TORCH, version="2.14.0")
    ),
    horovod("error", "it was built for patch_set 0", "install-horovod --mpi", patch_set=0, mpi="4.1.4"),
    # Also on ROCm, where the installer counts no GPUs.
    horovod("warning", "does not train on GPUs", "--gpu nccl    (until then: --device cpu or --b", torch=PAIR),
    horovod("warning", "on GPUs", "--backend ddp    (or --device cpu: Horovod", torch=replace(PAIR, kind="xpu")),
    nccl("ok", "2.30.7, for GPUs only: CPUs exchange by Gloo", torch=TORCH),
    nccl("ok", "2.30.7", torch=PAIR, NCCL_IB_DISABLE="0"),
    nccl("warning", "slows it down", f"unset {' '.join(SLOWING)}", torch=PAIR, **dict.fromkeys(SLOWING, "1")),
    nccl("error", "2 GPUs, and this torch is built without it", "pip", torch=replace(PAIR, nccl=None)),
    nccl("ok", "none in this torch", torch=ON_CPU),
    nccl("ok", "not needed: devices of type xpu have a library of their own", torch=XPU),
    # A slow import of torch was reported as a torch without NCCL.
    nccl("warning", "not known: torch cannot be asked", "see the line of torch", torch=TorchFacts("timed out")),
    cuda("ok", "no NVIDIA driver, so training runs on the CPU", torch=TORCH, smi=""),
    cuda("ok", "driver 535.104.05, torch sees 1 GPU", torch=ONE, smi="", driver=CLOSED),
    cuda("ok", "driver 570.124.06, torch sees 1 GPU", torch=ONE, smi="", driver=OPENED),
    cuda("ok", "driver 570.1, torch sees 1 GPU", torch=ONE),
    cuda("ok", "torch sees 1 GPU (CUDA_VISIBLE_DEVICES=1)", torch=ONE, environ={"CUDA_VISIBLE_DEVICES": "1"}),
    cuda("warning", "2 GPUs, and CUDA_VISIBLE_DEVICES= hides", "unset CUDA", torch=TORCH, environ=NO_GPUS),
    cuda("error", "torch sees none: it is too old", "update", torch=replace(TORCH, gpu_error="it is too old")),
    cuda("warning", "built without CUDA", "pip install", torch=ON_CPU),
    cuda("error", "nvidia-smi says: Failed to initialize NVML", "reboot", torch=TORCH, smi=SMI_FAILS),
    cuda("ok", "xpu, torch sees 2 GPUs", torch=XPU, smi=""),
    cuda("warning", "mps is here", "--device cpu", torch=replace(ON_CPU, unsupported="mps"), smi=""),
    cuda("ok", "HBM3, 79.0 GB (79.2 GB free), compute capability 9.0", torch=PAIR, name="GPU 0"),
    cuda("error", "has no code (it has sm_80, sm_90, compute_90)", "pip install", torch=OLD, name="GPU 0"),
    cuda("ok", "Intel Data Center GPU Max 1550, 64.0 GB", torch=XPU, name="GPU 1"),
    cuda("ok", "AMD Instinct MI300X, 128.0 GB, compute capability gfx942", torch=AMD, name="GPU 0"),
    row("visible GPUs", "warning", "4 ranks on this", "--gres=gpu:4 --gpu-bind=none", torch=ONE, environ=STEP),
    row("visible GPUs", "", "", torch=replace(ONE, gpus=[H100] * 4), environ=STEP),
    row("visible GPUs", "", "", torch=ONE, environ=STEP | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}),
    row("visible GPUs", "", "", torch=ONE, environ={"SLURM_STEP_ID": "0"}),
    mpi("Open MPI 4.1.4", "mpirun (Open MPI) 4.1.4\n\nReport bugs to ...\n"),
    mpi("MPICH 4.0.2", "HYDRA build details:\n    Version:            4.0.2\n    Release Date: ...\n"),
    mpi(
        "Intel(R) MPI Library for Linux* OS, Version 2021.10",
        "Intel(R) MPI Library for Linux* OS, Version 2021.10",
    ),
    mpi("of unknown version", ""),
    row("MPI", "warning", "does not run: no lib", "mpirun --version", programs={"mpirun": "echo no lib; exit 1"}),
    # A node of two partitions counts once.
    row("Slurm", "ok", "25.11.2, outside of a job; 3 nodes: 2 idle, 1 down*", programs=IN_CLUSTER),
    row("Slurm", "error", "job 7, srun says: no", "scontrol", programs={"srun": "echo no; exit 1"}, environ=STEP),
    *(threads("ok", setting) for setting in ("1", "1,2")),
    *(threads("warning", setting) for setting in (str(len(cpu_ids()) + 1), "many", "0")),
    open_files("ok", "1,024 for each process", "", 1024, 4096),
    open_files("ok", "as many as wanted", "", ENDLESS, ENDLESS),
    open_files("warning", "256 for each process", "ulimit -n 65536", 256, 1048576),
    open_files("warning", "256 for each process", "ulimit -n 2048", 256, 2048),
    open_files("warning", "more than 512 is for root", "Docker: --ulimit nofile", 256, 512),
    row("interfaces", "ok", "lo 127.0.0.1", environ=OWN_INTERFACES),
    interfaces("NCCL_SOCKET_IFNAME", "nonesuch", "names no interface that is up"),
    interfaces("GLOO_SOCKET_IFNAME", "lo,nonesuch", "names no interface that is up"),
    interfaces("HOROVOD_GLOO_IFACE", "lo", "leads to no other host", hosts=OTHER),
    row("network", "ok", "on this host alone both engines use lo"),
    row("network", "ok", "GLOO_SOCKET_IFNAME=lo in this shell comes first", environ={"GLOO_SOCKET_IFNAME": "lo"}),
    row("network", "ok", f"to reach {OTHER}", hosts=f"{socket.gethostname()},{OTHER}"),
    row("network", "", "", hosts="nowhere.invalid"),
    host_name("host node1", "error", "leads to no address", "getent", hosts="node1"),
    host_name("host node1", "error", "has IPv6 addresses only", "getent", "::2", hosts="node1"),
    # An address needs no look-up.
    host_name(f"host {OTHER}", "", "", "", hosts=OTHER),
    host_name("localhost", "error", "leads to ::1, and ranks", "echo '127.0.0.1 localhost' >> /etc/hosts", "::1"),
    host_name("localhost", "", "", "", "127.0.0.1", "::1"),
    # Debian's address of a host's own name, by which other hosts would reach themselves.
    host_name("host name", "ok", "is 127.0.1.1", "", "127.0.1.1"),
    host_name("host name", "warning", "other host takes", "take out the line with 127", "127.0.1.1", hosts=OTHER),
    host_name("host name", "ok", "is 10.0.0.5, 127.0.1.1", "", "10.0.0.5", "127.0.1.1", hosts=OTHER),
    host_name("host name", "warning", "leads to no address", ">> /etc/hosts"),
    host_name("host name", "error", "leads to no address", ">> /etc/hosts", hosts=OTHER),
    ssh("root@b: Permission denied (publickey,password).", f"ssh-copy-id {OTHER}"),
    ssh("ssh: connect to host b port 22: Connection refused", "openssh-server"),
    ssh("ssh: connect to host b port 22: Connection timed out", f"ping {OTHER}"),
    ssh("Host key verification failed.", f"ssh-keygen -R {OTHER}"),
    ssh("something else", f"ssh {OTHER} true"),
]


@requires("horovod")
@pytest.mark.parametrize(("check", "name", "status", "words", "remedy", "given"), FINDINGS)
def test_finding(
    check: str,
    name: str,
    status: str,
    words: str,
    remedy: str,
    given: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"environ": {}} | given
    if driver := given.pop("driver", ""):
        (tmp_path / "driver").write_text(driver)
    monkeypatch.setattr(gpus, "DRIVER_FILE", tmp_path / "driver")
    if limits := given.pop("limits", None):
        monkeypatch.setattr(resource, "getrlimit", lambda of: limits)
    for variable in GPU_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    for program, script in given.pop("programs", {}).items():
        given["environ"] = given["environ"] | plant_program(tmp_path, program, script)
    found = [finding for finding in run_checks(check, **given) if finding.name == name]
    assert [finding.status for finding in found] == ([status] if status else [])
    for finding in found:
        assert words in finding.found
        assert remedy in finding.remedy
        assert bool(finding.remedy) == (status != "ok")


# Python and its packages; what the probe prints.


def test_python_on_path_is_compared(tmp_path: Path) -> None:
    (found,) = run_checks("python", environ=plant_program(tmp_path, "python", "echo /somewhere/else"))
    assert found.status == "warning"
    assert f"is another one: {tmp_path}/python" in found.found
    assert re.match(r"source .*/activate|export PATH=", found.remedy)
    beside = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    assert run_checks("python", environ=beside)[0].status == "ok"


def plant_package(folder: Path, name: str, version: str) -> None:
    (folder / f"{name}-{version}.dist-info").mkdir(parents=True)
    (folder / f"{name}-{version}.dist-info/METADATA").write_text(f"Name: {name}\nVersion: {version}\n")


def test_unmet_requirements_of_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_checks("packages")[0].status == "ok"
    plant_package(tmp_path, "tqdm", "0.1")
    plant_package(tmp_path, "torch", "2.0.1")
    monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = run_checks("packages")
    assert found.status == "error"
    assert "0.1 tqdm is installed, where tqdm>=" in found.found
    # torchvision asks for a newer torch than this package does, or for one only.
    assert found.found.count("2.0.1 torch is installed, where torch") == 2
    assert found.remedy.count("torch") == 1
    assert "'tqdm>=" in found.remedy


def test_partial_output_of_probe_is_used() -> None:
    its = TorchFacts(version="2.15.0", architectures=["sm_90"], gpus=[Gpu("A", 1, "9.0")])
    torch, rest = json.dumps({"torch": asdict(its)}), json.dumps({"horovod": {"path": "x", "record": {}}})
    assert parse_facts(f"{torch}\nnoise\n7\n\n{rest}\n", 0, "") == Facts(its, HorovodFacts(path="x"))
    assert parse_facts(f'{torch}\n{{"horovod": null}}', 0, "") == Facts(its)
    crashed = parse_facts(f"{torch}\n", -11, "")
    assert crashed == Facts(its, ended="it was killed by signal 11")
    assert run_checks("horovod", facts=crashed)[0].found == "cannot be imported: it was killed by signal 11"
    slow = parse_facts(torch[:20], None, "no answer in time")
    assert [finding.found for finding in run_checks("torch", "horovod", facts=slow)] == ["no answer in 30 s"] * 2
    assert parse_facts("", 1, "ImportError: no libc").torch.error == "ImportError: no libc"


def test_probe_lists_intel_gpus() -> None:
    gpu = SimpleNamespace(name="Intel Data Center GPU Max 1550", total_memory=2**36, uuid="5baec991")
    xpu = SimpleNamespace(init=lambda: None, device_count=lambda: 2, get_device_properties=lambda number: gpu)
    torch = SimpleNamespace(version=SimpleNamespace(hip=None), get_device_module={"xpu": xpu}.get)
    assert facts._gpus(torch, "xpu") == ([Gpu(gpu.name, gpu.total_memory, "", gpu.uuid)] * 2, None)


# GPUs: recorded output, as there may be none here.

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tSYS\tSYS\tPXB\tSYS\t0-31,64-95\t0\t\tN/A
GPU1\tNV12\t X \tSYS\tSYS\tPXB\tSYS\t0-31,64-95\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNV12\tSYS\tPXB\t32-63,96-127\t1\t\tN/A
GPU3\tSYS\tSYS\tNV12\t X \tSYS\tPXB\t32-63,96-127\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\tSYS\t X \tSYS\t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
"""


def test_gpu_links(tmp_path: Path) -> None:
    (tmp_path / "topology").write_text(TOPOLOGY)
    smi = plant_program(tmp_path, "nvidia-smi", f"cat {tmp_path}/topology")
    (found,) = run_checks("GPU links", torch=PAIR, environ=smi)
    assert (found.status, found.found) == (
        "ok",
        "GPU0-GPU1, GPU2-GPU3 NV12 (NVLink); "
        "GPU0-GPU2, GPU0-GPU3, GPU1-GPU2, GPU1-GPU3 SYS (PCIe and from one CPU socket to another)",
    )
    links = read_links(TOPOLOGY)
    assert links == read_links(re.sub(r"\x1b\[\d+m", "", TOPOLOGY))
    two = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tPHB\t0-63\t0\nGPU1\tPHB\t X \t0-63\t0\n"
    assert describe_links(read_links(two)) == "GPU0-GPU1 PHB (PCIe through the CPU)"
    assert describe_links(dict.fromkeys(links, "NV18")) == "all GPUs to all others NV18 (NVLink)"
    assert describe_links({("GPU0", "GPU1"): "XYZ"}) == "GPU0-GPU1 XYZ"
    failing = plant_program(tmp_path, "nvidia-smi", SMI_FAILS)
    assert run_checks("GPU links", torch=PAIR, environ=failing)[0].status == "warning"
    assert run_checks("GPU links", torch=ONE, environ=failing) == []


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
def test_has_code_for_capability(architectures: list[str], capability: str, runs: bool) -> None:
    assert has_code(architectures, capability) is runs


# MPI and Slurm.


def test_mpi_and_slurm_are_optional(tmp_path: Path) -> None:
    found = run_checks("MPI", "Slurm", environ={"PATH": str(tmp_path)})
    if not any(Path(folder, name).exists() for folder in ("/usr/sbin", "/sbin") for name in ("mpirun", "srun")):
        assert [finding.status for finding in found] == ["ok", "ok"]
        assert all("not needed" in finding.found for finding in found)


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
def test_cpu_quota_of_control_groups(tmp_path: Path, own: str, files: dict[str, str], quota: float | None) -> None:
    (tmp_path / "self").write_text(own)
    for name, text in files.items():
        file = tmp_path / "root" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    assert cpu_quota(tmp_path / "self", tmp_path / "root") == quota
    assert cpu_quota(tmp_path / "nonesuch", tmp_path / "root") is None


def test_hardware_threads_share_a_core(tmp_path: Path) -> None:
    for cpu in range(4):
        (tmp_path / f"cpu{cpu}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/topology/thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    assert num_cores([0, 1, 2, 3], tmp_path) == 2
    assert num_cores([0, 2], tmp_path) == 1
    assert num_cores([0, 1, 9], tmp_path) == 3


def test_shared_memory(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SHARED_MEMORY", small_disk)
    (found,) = run_checks("shared memory")
    assert found.status == "warning"
    assert "4 MB free of 4 MB" in found.found
    assert "docker run --shm-size 8g" in found.remedy
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert run_checks("shared memory")[0].status == "error"
    monkeypatch.setattr(machine, "SHARED_MEMORY", small_disk / "nonesuch")
    assert run_checks("shared memory")[0].status == "error"


def test_infiniband_ports_and_locked_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "INFINIBAND", tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda of: (8 * 2**20, ENDLESS))
    assert run_checks("InfiniBand") == []
    port = tmp_path / "mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
    ports, locked = run_checks("InfiniBand")
    assert (ports.status, ports.found) == ("ok", "mlx5_0 port 1 ACTIVE 200 Gb/sec (4X HDR)")
    assert (locked.status, locked.name) == ("warning", "locked memory")
    assert "ulimit -l unlimited" in locked.remedy
    (port / "state").write_text("1: DOWN\n")
    monkeypatch.setattr(resource, "getrlimit", lambda of: (ENDLESS, ENDLESS))
    assert [finding.status for finding in run_checks("InfiniBand")] == ["warning", "ok"]


# Folders.


def test_folder_checks_leave_no_files(tmp_path: Path) -> None:
    new = tmp_path / "a/b"
    data, logs = run_checks("data folder", "log folder", data_dir=new, log_dir=tmp_path)
    assert (data.status, logs.status) == ("ok", "ok")
    assert f"{new} (can be made): " in data.found
    assert data.figures["free_mb"] > 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert "Not a directory" in run_checks("log folder", log_dir=tmp_path / "file")[0].found
    assert run_checks("log folder") == []


def test_folders_on_small_disk(small_disk: Path) -> None:
    data, logs = run_checks("data folder", "log folder", data_dir=small_disk, log_dir=small_disk)
    assert (data.status, logs.status) == ("warning", "warning")
    assert "4 MB free on memory (tmpfs): little for data sets" in data.found
    (small_disk / "fill").write_bytes(bytes(4 * 2**20))
    assert "No space left" in run_checks("log folder", log_dir=small_disk)[0].found
    # Data that are there need no room.
    (small_disk / "fill").unlink()
    (small_disk / "train-images-idx3-ubyte.gz").write_text("")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert "data are there" in run_checks("data folder", data_dir=small_disk)[0].found


def test_data_folder_defaults_to_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_data_dir().is_relative_to(tmp_path)
    assert str(default_data_dir()) in run_checks("data folder")[0].found


def test_file_system_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = (("/home", "ext3"), ("/", "ext4"), ("/dev/shm", "tmpfs"), ("/home", "nfs4"), ("/home/my disk", "xfs"))
    partitions = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in mounts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: partitions)
    expected = {
        "/var/x": "local disk (ext4)",
        "/home/me/x": "network (nfs4)",
        "/home/my disk/x": "local disk (xfs)",
        "/homer": "local disk (ext4)",
        "/dev/shm": "memory (tmpfs)",
    }
    assert {path: file_system(Path(path)) for path in expected} == expected


def test_file_system_below_a_path_with_a_space(tmp_path: Path) -> None:
    """Find the mount at a path that the kernel writes as `my\\040disk`."""
    (tmp_path / "my disk").mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system")
    command = ["mount", "-t", "ramfs", "none", str(tmp_path / "my disk")]
    if subprocess.run(command, check=False).returncode != 0:
        pytest.skip("may not mount a file system")
    try:
        assert file_system(tmp_path / "my disk") == "memory (ramfs)"
    finally:
        subprocess.run(["umount", str(tmp_path / "my disk")], check=True)


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

    names = ("interfaces", "network", "host names", "MPI", "ssh", "ports")
    found = run_checks(*names, environ=environ, limit_s=1.5, look_up=endless, hosts="node1,node2")
    ending.set()
    by_name = {finding.name: finding for finding in found}
    assert {by_name[name].status for name in ("host name", "host node1", "host node2")} == {"error"}
    assert {"interfaces", "MPI", "ssh node1", "ssh node2", "free ports"} <= by_name.keys()
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
        taken, handed_out = run_checks("ports")
    assert (taken.name, taken.status, handed_out.status) == ("port 29500", "warning", "ok")
    assert re.match(r"torchrun --master-port 295\d\d .*--standalone", taken.remedy)


@pytest.mark.parametrize("text", ["", "a,", "-oProxyCommand=x", "a:0", "a:b", "a b", "a:1:2", "a,a:2"])
def test_malformed_hosts_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="--hosts"):
        read_hosts(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--hosts a,b --ssh-port 0", "--ssh-port must be 1 or more"),
        ("--ssh-identity-file /nonesuch", "there is no such file"),
        ("--timeout-s 0", "--timeout-s must be more than 0"),
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
    ("shift", "status", "words"), [("-5", "warning", "5.0 s behind"), ("+90000", "error", "1,500 min ahead of")]
)
def test_clock_skew(tmp_path: Path, shift: str, status: str, words: str) -> None:
    (tmp_path / "there").mkdir()
    plant_program(tmp_path / "there", "date", f'exec {shutil.which("date")} -d "{shift} seconds" "$@"')
    clock = check_ssh(tmp_path, f'PATH={tmp_path}/there:$PATH exec sh -c "$command"')[-1]
    assert (clock.name, clock.status) == (f"clock {OTHER}", status)
    assert words in clock.found
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
