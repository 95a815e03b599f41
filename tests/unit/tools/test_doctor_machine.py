"""The doctor's checks of packages, GPUs, CPUs, memory and folders."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from doctor_checks import ONE, PAIR, SMI_FAILS, plant_package, plant_program, run_checks

from hvd_trainer.horovod_build import facts
from hvd_trainer.horovod_build.facts import Facts, Gpu, HorovodFacts, TorchFacts, parse_facts
from hvd_trainer.measure import machine as runner_machine
from hvd_trainer.tools.doctor import machine
from hvd_trainer.tools.doctor.gpus import describe_links, has_code, read_links
from hvd_trainer.tools.doctor.machine import cpu_quota, file_system, num_cores
from hvd_trainer.tools.doctor.software import unmet_requirements
from hvd_trainer.utils.files import default_data_dir

# Python and its packages; what the probe prints.


def test_python_on_path_is_compared(tmp_path: Path) -> None:
    (found,) = run_checks("python", environ=plant_program(tmp_path, "python", "echo /somewhere/else"))
    assert found.status == "warning"
    assert f"is another one: {tmp_path}/python" in found.found
    assert re.match(r"source .*/activate|export PATH=", found.remedy)
    beside = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    assert run_checks("python", environ=beside)[0].status == "ok"


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


def test_missing_packages_of_tools_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All was ok, and then no tool ran: "needs matplotlib and rich and scipy"."""
    plant_package(tmp_path, "scipy", "0.1")
    plant_package(tmp_path, "rich", "0.1")
    monkeypatch.syspath_prepend(str(tmp_path))
    first, found = run_checks("packages")
    assert (first.status, found.status) == ("ok", "warning")
    assert found.found == "rich and scipy are missing for compare, diagnose, parity, show and verify-resume"
    assert re.fullmatch(r"pip install (-e )?'.*\[tools\]'", found.remedy)


def test_pre_release_meets_what_its_release_meets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch in NVIDIA's containers is one, and pip was to replace it."""
    for version, is_met in (("2.11.0a0+nv26.1", True), ("2.10.0a0+nv25.9", False)):
        plant_package(tmp_path / version, "torch", version)
        monkeypatch.syspath_prepend(str(tmp_path / version))
        assert (unmet_requirements("hvd_trainer") == []) is is_met


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
def test_cpu_quota_of_control_groups(
    own: str, files: dict[str, str], quota: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_machine, "OWN_GROUPS", tmp_path / "self")
    monkeypatch.setattr(runner_machine, "CONTROL_GROUPS", tmp_path / "root")
    assert cpu_quota() is None
    (tmp_path / "self").write_text(own)
    for name, text in files.items():
        file = tmp_path / "root" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    assert cpu_quota() == quota


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


def test_folder_below_one_that_may_not_be_looked_into(tmp_path: Path) -> None:
    """It was called a fault of the doctor's."""
    (tmp_path / "closed").mkdir(mode=0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        found = run_checks(
            "data folder", "log folder", data_dir=tmp_path / "closed/a", log_dir=tmp_path / "closed/b"
        )
    finally:
        os.seteuid(user)
    for finding in found:
        assert finding.status == "error"
        assert "nothing can be written (Permission denied in /" in finding.found


def test_folders_on_small_disk(small_disk: Path) -> None:
    data, logs = run_checks("data folder", "log folder", data_dir=small_disk, log_dir=small_disk)
    assert (data.status, logs.status) == ("warning", "warning")
    assert "4 MB free on memory (tmpfs): little for data sets" in data.found
    (small_disk / "fill").write_bytes(bytes(4 * 2**20))
    assert "No space left" in run_checks("log folder", log_dir=small_disk)[0].found
    # Data that are there need no room; the jobs look for MNIST where torchvision puts it.
    (small_disk / "fill").unlink()
    raw = small_disk / "MNIST/raw"
    raw.mkdir(parents=True)
    (small_disk / "train-images-idx3-ubyte.gz").write_text("")
    assert "little for data sets" in run_checks("data folder", data_dir=small_disk)[0].found
    (small_disk / "train-images-idx3-ubyte.gz").rename(raw / "train-images-idx3-ubyte.gz")
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
