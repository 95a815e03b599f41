"""Test the doctor's checks of PyTorch, Horovod and GPUs."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from doctor_checks import TORCH, only, run_checks
from launchers import requires

from hvd_trainer.horovod_build import facts
from hvd_trainer.horovod_build.build_plan import VERSION, python_tag
from hvd_trainer.horovod_build.facts import Facts, Gpu, HorovodFacts, TorchFacts, parse_facts
from hvd_trainer.horovod_build.patch_set import PATCH_SET
from hvd_trainer.tools.doctor.finding import Finding, ok
from hvd_trainer.tools.doctor.gpus import (
    Driver,
    describe_links,
    has_code,
    judge_cuda,
    judge_gpu,
    read_driver,
    read_links,
    read_module,
)
from hvd_trainer.tools.doctor.software import judge_horovod
from hvd_trainer.utils.text import INSTALL_HOROVOD

# PyTorch and Horovod.

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


@pytest.mark.parametrize(
    ("torch", "status", "words"),
    [
        (TORCH, "ok", "2.15.0+cu132, built for CUDA 13.2, no GPU visible"),
        (TorchFacts(version="2.12.1+cpu"), "ok", "2.12.1+cpu, built for the CPU only, no GPU visible"),
        (TorchFacts(version="2.4.0"), "error", "too old, 2.11 to 2.15 are tested"),
        (TorchFacts(version="2.16.0"), "warning", "2.11 to 2.15 are tested"),
        (
            TorchFacts(error="OSError: libtorch.so: cannot open"),
            "error",
            "cannot be imported: OSError: libtorch.so",
        ),
    ],
)
def test_torch_versions(torch: TorchFacts, status: str, words: str) -> None:
    (found,) = run_checks("torch", facts=Facts(torch))
    assert found.status == status
    assert words in found.found


@pytest.mark.parametrize(
    ("horovod", "torch", "status", "words", "remedy"),
    [
        (None, TORCH, "warning", "not installed, so only --backend ddp works", "install-horovod"),
        (HorovodFacts(record=RECORD), TORCH, "ok", f"{VERSION}, built for this torch with Gloo only", ""),
        (
            HorovodFacts(record={**RECORD, "cuda": "13.0", "nccl": "2.30.7", "mpi": "4.1.4"}),
            TORCH,
            "ok",
            "with Gloo and NCCL 2.30.7, and MPI",
            "",
        ),
        (
            HorovodFacts(record={**RECORD, "torch": "2.14.0"}),
            TORCH,
            "error",
            "it was built for torch 2.14.0, and this is 2.15.0+cu132",
            "python -m hvd_trainer install-horovod    (until then",
        ),
        (
            HorovodFacts(record={**RECORD, "patch_set": 0, "mpi": "4.1.4"}),
            TORCH,
            "error",
            "it was built for patch_set 0",
            "install-horovod --mpi",
        ),
        (HorovodFacts(record={}), TORCH, "warning", "CVE-2024-10190 is open in it", "install-horovod"),
        (
            HorovodFacts(error="it has no PyTorch extension"),
            TORCH,
            "error",
            "it has no PyTorch extension",
            "install",
        ),
    ],
)
@requires("horovod")
def test_horovod_must_fit_torch(
    horovod: HorovodFacts | None, torch: TorchFacts, status: str, words: str, remedy: str
) -> None:
    found = judge_horovod(horovod, torch)
    assert (found.status, words in found.found, remedy in found.remedy) == (status, True, True), found


@requires("horovod")
def test_horovod_without_nccl_beside_gpus() -> None:
    """Warn of a Horovod with which training refuses GPUs; also on ROCm, where the installer counts none."""
    pair = replace(TORCH, gpus=[Gpu("A", 1, "9.0")] * 2)
    found = judge_horovod(HorovodFacts(record=RECORD), pair)
    assert found.status == "warning"
    assert "with this build horovod does not train on GPUs" in found.found
    for words in (f"{INSTALL_HOROVOD} --gpu nccl", "--device cpu", "--backend ddp"):
        assert words in found.remedy
    with_nccl = HorovodFacts(record={**RECORD, "cuda": "13.0", "nccl": "2.30.7"})
    assert judge_horovod(with_nccl, pair).status == "ok"
    intel = judge_horovod(HorovodFacts(record=RECORD), replace(pair, kind="xpu"))
    assert intel.remedy == "--backend ddp    (or --device cpu: Horovod exchanges no tensors of xpu)"


def test_partial_output_of_probe_is_used() -> None:
    its = TorchFacts(version="2.15.0", architectures=["sm_90"], gpus=[Gpu("A", 1, "9.0")])
    torch, rest = json.dumps({"torch": asdict(its)}), json.dumps({"horovod": {"path": "x", "record": {}}})
    assert parse_facts(f"{torch}\nnoise\n7\n\n{rest}\n", 0, "") == Facts(its, HorovodFacts(path="x"))
    assert parse_facts(f'{torch}\n{{"horovod": null}}', 0, "") == Facts(its)
    crashed = parse_facts(f"{torch}\n", -11, "")
    assert crashed == Facts(its, ended="it was killed by signal 11")
    said = run_checks("horovod", facts=crashed)[0]
    assert (said.status, said.found) == ("error", "cannot be imported: it was killed by signal 11")
    slow = parse_facts(torch[:20], None, "no answer in time")
    assert [finding.found for finding in run_checks("torch", "horovod", facts=slow)] == ["no answer in 30 s"] * 2
    assert parse_facts("", 1, "ImportError: no libc").torch.error == "ImportError: no libc"


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


def test_gpu_links() -> None:
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
def test_has_code_for_capability(architectures: list[str], capability: str, runs: bool) -> None:
    assert has_code(architectures, capability) is runs


SMI = """\
GPU-5baec991-de63-c196-1766-04c38407e133, 570.124.06, 81076
GPU-02c05ee3-bdb5-aac7-f9e8-a4c8f3f725b3, 570.124.06, [N/A]
"""


def test_gpus_and_their_memory() -> None:
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
            TorchFacts(version="2.15.0+cpu"),
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
def test_driver_and_visible_gpus(
    driver: Driver, torch: TorchFacts, environ: dict[str, str], status: str, words: str, remedy: str
) -> None:
    found = judge_cuda(driver, torch, environ)
    assert (found.status, words in found.found, remedy in found.remedy) == (status, True, True), found


def test_accelerators_of_other_makers() -> None:
    """Accept Intel's GPUs, and name accelerators on which ranks cannot train."""
    intel = TorchFacts(
        version="2.15.0+xpu", kind="xpu", gpus=[Gpu("Intel Data Center GPU Max 1550", 2**36, "")] * 2
    )
    assert (
        only(run_checks("torch", facts=Facts(intel)), "torch").found == "2.15.0+xpu, built for xpu, 2 GPUs visible"
    )
    assert judge_cuda(Driver(), intel, {}) == ok("CUDA", "xpu, torch sees 2 GPUs")
    assert judge_gpu(0, intel.gpus[0], intel, Driver()) == ok("GPU 0", "Intel Data Center GPU Max 1550, 64.0 GB")
    assert check_nccl(intel) == ok("NCCL", "not needed: devices of type xpu have a library of their own")
    apple = judge_cuda(Driver(), TorchFacts(version="2.15.0", unsupported="mps"), {})
    assert (apple.status, apple.found[:37]) == ("warning", "mps is here, and ranks cannot train o")
    assert "--device cpu" in apple.remedy


def test_nccl_is_not_known_without_an_answer_of_torch() -> None:
    """A slow import of torch was reported as a torch without NCCL."""
    assert check_nccl(TorchFacts(error="timed out")).found == "not known: torch cannot be asked"


def test_probe_lists_intel_gpus() -> None:
    gpu = SimpleNamespace(name="Intel Data Center GPU Max 1550", total_memory=2**36, uuid="5baec991")
    xpu = SimpleNamespace(init=lambda: None, device_count=lambda: 2, get_device_properties=lambda number: gpu)
    torch = SimpleNamespace(version=SimpleNamespace(hip=None), get_device_module={"xpu": xpu}.get)
    found, error = facts._gpus(torch, "xpu")
    assert found == [Gpu(gpu.name, gpu.total_memory, "", gpu.uuid)] * 2
    assert error is None


def test_machine_with_recorded_nvidia_smi(tmp_path: Path) -> None:
    """Check GPUs by an nvidia-smi that prints recorded answers."""
    (tmp_path / "topology").write_text(TOPOLOGY)
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\nif [ $1 = topo ]; then cat {tmp_path}/topology; else printf '{SMI}'; fi\n")
    smi.chmod(0o755)
    gpu = Gpu("NVIDIA H100 80GB HBM3", 79 * 2**30, "9.0", "5baec991-de63-c196-1766-04c38407e133")
    found = Facts(replace(TORCH, gpus=[gpu, replace(gpu, uuid="02c05ee3")]))
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    found = run_checks("CUDA", "NCCL", "GPU links", facts=found, environ=environ)
    assert [finding.name for finding in found] == ["CUDA", "GPU 0", "GPU 1", "NCCL", "GPU links"]
    assert all(finding.status == "ok" for finding in found), found
    assert "driver 570.124.06, torch sees 2 GPUs" in found[0].found
    assert "GPU0-GPU1, GPU2-GPU3 NV12 (NVLink)" in found[-1].found


def check_nccl(torch: TorchFacts, **environ: str) -> Finding:
    return only(run_checks("NCCL", facts=Facts(torch), environ=environ), "NCCL")


def test_nccl_is_needed_and_not_slowed() -> None:
    pair = replace(TORCH, gpus=[Gpu("A", 1, "9.0")] * 2)
    assert check_nccl(TORCH).found == "2.30.7, for GPUs only: CPUs exchange by Gloo"
    assert check_nccl(pair, NCCL_IB_DISABLE="0") == ok("NCCL", "2.30.7")
    slowed = check_nccl(pair, NCCL_P2P_DISABLE="1", NCCL_IB_DISABLE="1")
    assert (slowed.status, slowed.remedy[:38]) == ("warning", "unset NCCL_P2P_DISABLE NCCL_IB_DISABLE")
    assert check_nccl(replace(pair, nccl=None)).status == "error"
    assert check_nccl(TorchFacts(version="2.15.0")).status == "ok"
