"""What the doctor finds in planted situations, and what it says to type: one table."""

from __future__ import annotations

import resource
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doctor_checks import H100, ONE, OTHER, PAIR, SMI_FAILS, TORCH, plant_program, run_checks
from launchers import requires

from benchmarks import NO_GPUS
from hvd_trainer.horovod_build.build_plan import VERSION, python_tag
from hvd_trainer.horovod_build.facts import Facts, Gpu, HorovodFacts, TorchFacts
from hvd_trainer.horovod_build.patch_set import PATCH_SET
from hvd_trainer.launch.slurm import GPU_VARIABLES
from hvd_trainer.tools.doctor import gpus
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
XPU = TorchFacts(version="2.15.0+xpu", kind="xpu", gpus=[Gpu("Intel Data Center GPU Max 1550", 2**36, "")] * 2)
OLD = replace(TORCH, gpus=[replace(H100, capability="6.0")])
AMD = replace(TORCH, hip="6.4", cuda=None, gpus=[Gpu("AMD Instinct MI300X", 2**37, "gfx942")])
ON_CPU = TorchFacts(version="2.15.0+cpu")


SMI = "GPU-5baec991-de63-c196-1766-04c38407e133, 570.1, 81076\nGPU-02c05ee3, 570.1, [N/A]\n"
TWO = f"printf '{SMI}'"


STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
}
"""A rank of --gpus-per-task=1, with which NCCL cannot reach the neighbours' GPUs by CUDA IPC."""
ONE_EACH = {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
OPENED = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (dvs-builder)\n"
ENDLESS = resource.RLIM_INFINITY
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
    launcher("error", "WORLD_SIZE set, but RANK is not", "unset WORLD_SIZE", WORLD_SIZE="2"),
    launcher("error", "but HOROVOD_LOCAL_RANK", "unset HOROVOD_RANK", HOROVOD_RANK="0", HOROVOD_SIZE="2"),
    launcher("error", "rank 5 of size 2", f"unset {' '.join(RANKS)}", **dict(zip(RANKS, "5022", strict=True))),
    launcher("ok", "this is rank 1 of 2, started by hand", **dict(zip(RANKS, "1122", strict=True))),
    launcher("ok", "no rank variables", SLURM_JOB_ID="7", SLURM_NTASKS="4"),
    row("torch", "ok", "2.15.0+cu132, built for CUDA 13.2, no GPU visible"),
    row("torch", "ok", "2.15.0+cpu, built for the CPU only, no GPU visible", torch=ON_CPU),
    row("torch", "ok", "2.15.0+xpu, built for xpu, 2 GPUs visible", torch=XPU),
    row("torch", "error", "too old, 2.11 to 2.15 are tested", "torch>=2.11", torch=TorchFacts(version="2.4.0")),
    row("torch", "warning", "2.11 to 2.15 are tested", "torch<=2.15", torch=TorchFacts(version="2.16.0")),
    # As NVIDIA's containers have it: it was called too old.
    row("torch", "ok", "2.11.0a0+nv26.1, built", torch=TorchFacts(version="2.11.0a0+nv26.1")),
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
    row("visible GPUs", "", "", torch=ONE, environ=STEP | ONE_EACH),
    row("visible GPUs", "", "", torch=ONE, environ={"SLURM_STEP_ID": "0"}),
    mpi("Open MPI 4.1.4", "mpirun (Open MPI) 4.1.4\n\nReport bugs to ...\n"),
    mpi("MPICH 4.0.2", "HYDRA build details:\n    Version:            4.0.2\n    Release Date: ...\n"),
    mpi(
        "Intel(R) MPI Library for Linux* OS, Version 2021.10",
        "Intel(R) MPI Library for Linux* OS, Version 2021.10",
    ),
    mpi("of unknown version", ""),
    row("MPI", "warning", "does not run: no lib", "mpirun --version", programs={"mpirun": "echo no lib; exit 1"}),
    row("Slurm", "ok", "25.11.2, outside of a job", programs={"srun": "echo slurm 25.11.2"}),
    row("Slurm", "error", "job 7, srun says: no", "scontrol", programs={"srun": "echo no; exit 1"}, environ=STEP),
    *(threads("ok", setting) for setting in ("1", "1,2")),
    *(threads("warning", setting) for setting in (str(len(cpu_ids()) + 1), "many", "0")),
    open_files("ok", "1,024 for each process", "", 1024, 4096),
    open_files("ok", "as many as wanted", "", ENDLESS, ENDLESS),
    open_files("warning", "256 for each process", "ulimit -n 65536", 256, 1048576),
    open_files("warning", "256 for each process", "ulimit -n 2048", 256, 2048),
    open_files("warning", "more than 512 is for root", "Docker: --ulimit nofile", 256, 512),
    # More than it was said to type.
    row("open files", "warning", "400,508", "ulimit -n 400508", limits=(1024, 2**20), hosts="node1:99999"),
    *(row("port", "warning", f"={port} in", "unset", environ={"MASTER_PORT": port}) for port in ("no", "65536")),
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
