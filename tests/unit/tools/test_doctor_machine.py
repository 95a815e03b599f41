"""Test the doctor's checks of CPUs, memory, limits and folders."""

from __future__ import annotations

import os
import resource
import subprocess
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from doctor_checks import only, run_checks

from hvd_trainer.tools.doctor import machine
from hvd_trainer.tools.doctor.finding import ok
from hvd_trainer.tools.doctor.folders import file_system
from hvd_trainer.tools.doctor.machine import (
    cpu_quota,
    judge_infiniband,
    judge_open_files,
    judge_threads,
    num_cores,
)
from hvd_trainer.utils.paths import default_data_dir

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
def test_omp_num_threads(setting: str | None, limit: int, status: str) -> None:
    assert judge_threads(setting, limit).status == status


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


def test_open_files() -> None:
    endless = resource.RLIM_INFINITY
    assert judge_open_files(1024, 4096, 1024) == ok("open files", "1,024 for each process")
    assert judge_open_files(endless, endless, 9999).status == "ok"
    assert judge_open_files(256, 1048576, 1024).remedy == "ulimit -n 65536"
    assert judge_open_files(256, 2048, 1024).remedy == "ulimit -n 2048"
    assert "Docker: --ulimit nofile" in judge_open_files(256, 512, 1024).remedy


def test_infiniband_ports_and_locked_memory(tmp_path: Path) -> None:
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


# Folders.


def test_folder_checks_leave_no_files(tmp_path: Path) -> None:
    new = tmp_path / "a/b"
    data, logs = run_checks("data folder", "log folder", data_dir=new, log_dir=tmp_path)
    assert (data.status, logs.status) == ("ok", "ok")
    assert f"{new} (can be made): " in data.found
    assert data.figures["free_mb"] > 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert "it is a file" in only(run_checks("log folder", log_dir=tmp_path / "file"), "log folder").found
    assert run_checks("log folder") == []


def test_folders_on_small_disk(small_disk: Path) -> None:
    data, logs = run_checks("data folder", "log folder", data_dir=small_disk, log_dir=small_disk)
    assert (data.status, logs.status) == ("warning", "warning")
    assert "4 MB free on memory (tmpfs): little for data sets" in data.found
    (small_disk / "fill").write_bytes(bytes(4 * 2**20))
    assert "No space left" in only(run_checks("log folder", log_dir=small_disk), "log folder").found
    # Data that are there need no room.
    (small_disk / "fill").unlink()
    (small_disk / "train-images-idx3-ubyte.gz").write_text("")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert "data are there" in only(run_checks("data folder", data_dir=small_disk), "data folder").found


def test_data_folder_defaults_to_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_data_dir().is_relative_to(tmp_path)
    assert str(default_data_dir()) in only(run_checks("data folder"), "data folder").found


def test_file_system_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = (("/home", "ext3"), ("/", "ext4"), ("/dev/shm", "tmpfs"), ("/home", "nfs4"), ("/home/my disk", "xfs"))
    partitions = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in mounts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: partitions)
    assert file_system(Path("/var/x")) == "local disk (ext4)"
    assert file_system(Path("/home/me/x")) == "network (nfs4)"
    assert file_system(Path("/home/my disk/x")) == "local disk (xfs)"
    assert file_system(Path("/homer")) == "local disk (ext4)"
    assert file_system(Path("/dev/shm")) == "memory (tmpfs)"


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
