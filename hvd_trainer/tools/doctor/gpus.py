"""Check the GPUs: the driver, PyTorch's code for each GPU, NCCL, and the links between GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from hvd_trainer.horovod_build.facts import Gpu, TorchFacts
from hvd_trainer.horovod_build.toolchain import find_toolkits
from hvd_trainer.launch.slurm import GPU_VARIABLES, visible_gpus
from hvd_trainer.tools.doctor.context import Context
from hvd_trainer.tools.doctor.finding import Finding, error, ok, size, warning
from hvd_trainer.utils.text import plural

GPU_QUERY = "--query-gpu=uuid,driver_version,memory.free"
DRIVER_FILE = Path("/proc/driver/nvidia/version")
SLOWING_VARIABLES = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")
LINK_MEANINGS = {
    "SYS": "PCIe and from one CPU socket to another",
    "NODE": "PCIe, inside of one NUMA node",
    "PHB": "PCIe through the CPU",
    "PXB": "PCIe through several switches",
    "PIX": "PCIe through one switch",
}


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver on this machine, and the free memory of its GPUs."""

    version: str | None = None
    """None: there is no driver"""
    free_mb: Mapping[str, int] | None = None
    """by the GPU's unique id, without `GPU-`; None: unknown"""
    error: str | None = None


def check_cuda(context: Context) -> list[Finding]:
    """Check the driver and the toolkit, and each GPU in a finding of its own."""
    driver = _find_driver(context)
    torch = context.facts.torch
    finding = judge_cuda(driver, torch, context.environ)
    if finding.status == "ok" and torch.cuda:
        kits = ", ".join(f"{kit.version} in {kit.home}" for kit in find_toolkits())
        text = (
            f"toolkit {kits}, for building Horovod" if kits else "no toolkit, which only install-horovod would use"
        )
        finding = ok(finding.name, f"{finding.found}; {text}")
    gpus = [judge_gpu(number, gpu, torch, driver) for number, gpu in enumerate(torch.gpus)]
    return [finding, *gpus]


def _find_driver(context: Context) -> Driver:
    program = context.programs.find("nvidia-smi")
    version = read_module(DRIVER_FILE.read_text()) if DRIVER_FILE.exists() else None
    if program is None:
        return Driver(version)
    answer = context.programs.ask(program, GPU_QUERY, "--format=csv,noheader,nounits")
    if answer.code != 0:
        return Driver(version, error=answer.last_line)
    return read_driver(answer.out)


def read_module(text: str) -> str | None:
    """Parse the driver's version from the text of /proc/driver/nvidia/version."""
    match = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)\s", text)
    return match[1] if match else None


def read_driver(text: str) -> Driver:
    """Parse nvidia-smi's lines `GPU-5ba3..., 570.124.06, 81076`."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") == 2]
    free = {uuid.removeprefix("GPU-"): int(free) for uuid, _, free in rows if free.isdecimal()}
    return Driver(rows[0][1] if rows else None, free)


def judge_cuda(driver: Driver, torch: TorchFacts, environ: Mapping[str, str]) -> Finding:
    """Return whether PyTorch sees the GPUs that the driver lists, as a finding."""
    if torch.gpus:
        hidden = _visibility_setting(environ)
        kind = f"driver {driver.version or 'of unknown version'}" if torch.cuda else gpu_platform(torch)
        visible = f"torch sees {plural(len(torch.gpus), 'GPU')}"
        return ok("CUDA", f"{kind}, {visible}{f' ({hidden})' if hidden else ''}")
    if driver.error is not None:
        remedy = "nvidia-smi    (after an update of the driver: reboot; in a container: docker run --gpus all)"
        return error("CUDA", f"nvidia-smi says: {driver.error}", remedy)
    if torch.unsupported is not None:
        found = f"{torch.unsupported} is here, and ranks cannot train on it, so training runs on the CPU"
        return warning(
            "CUDA", found, "--device cpu    (to say so; ranks train on NVIDIA's, AMD's and Intel's GPUs)"
        )
    if driver.version is None:
        return ok("CUDA", "no NVIDIA driver, so training runs on the CPU")
    there = f"driver {driver.version} with {plural(len(driver.free_mb or ()), 'GPU')}"
    if torch.error is not None:
        return ok("CUDA", there)
    if not torch.cuda:
        remedy = "pip install --force-reinstall torch torchvision    (the builds on PyPI have CUDA)"
        return warning("CUDA", f"{there}, and this torch is built without CUDA", remedy)
    if visible_gpus(environ) == ():
        name = _visibility_setting(environ).partition("=")[0]
        return warning("CUDA", f"{there}, and {_visibility_setting(environ)} hides them all", f"unset {name}")
    remedy = f"update the driver, or install a torch for an older CUDA than {torch.cuda}: https://pytorch.org"
    return error("CUDA", f"{there}, and torch sees none: {torch.gpu_error or 'it does not say why'}", remedy)


def gpu_platform(torch: TorchFacts) -> str:
    """Return the platform that this PyTorch is built for: `CUDA 13.2`, `ROCm 6.4`, `xpu`; empty if for none."""
    return f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else torch.kind or ""


def _visibility_setting(environ: Mapping[str, str]) -> str:
    """Return the environment's setting that selects GPUs, `CUDA_VISIBLE_DEVICES=0`; empty if there is none."""
    return next((f"{name}={environ[name]}" for name in GPU_VARIABLES if name in environ), "")


def judge_gpu(number: int, gpu: Gpu, torch: TorchFacts, driver: Driver) -> Finding:
    """Return whether this PyTorch has code for a GPU, as a finding."""
    name = f"GPU {number}"
    free_mb = (driver.free_mb or {}).get(gpu.uuid)
    free = f" ({size(free_mb * 2**20)} free)" if free_mb is not None else ""
    found = f"{gpu.name}, {size(gpu.memory)}{free}"
    found += f", compute capability {gpu.capability}" if gpu.capability else ""
    if not torch.cuda or has_code(torch.architectures, gpu.capability):
        return ok(name, found)
    known = ", ".join(torch.architectures)
    remedy = "pip install --upgrade torch torchvision    (an old GPU needs a torch for an older CUDA: https://pytorch.org)"
    return error(name, f"{found}, for which this torch has no code (it has {known})", remedy)


def has_code(architectures: Sequence[str], capability: str) -> bool:
    """Return whether one of these architectures' code runs on a GPU of this capability, as it is or translated by
    the driver.

    sm_80       8.0 and later capabilities of generation 8
    sm_90a      9.0 only
    sm_100f     as sm_100
    compute_90  all from 9.0 on, translated when it is loaded
    """
    major, minor = map(int, capability.split("."))
    for text in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", text)
        if match is None:
            continue
        of = int(match[2]), int(match[3])
        if match[4] == "a":
            fits = of == (major, minor)
        elif match[1] == "sm" or match[4] == "f":
            fits = of[0] == major and of[1] <= minor
        else:
            fits = of <= (major, minor)
        if fits:
            return True
    return False


def check_nccl(context: Context) -> list[Finding]:
    """Check that NCCL, by which NVIDIA's GPUs exchange tensors, is there where it is needed, and is not slowed."""
    torch, environ = context.facts.torch, context.environ
    several = len(torch.gpus) > 1
    if torch.gpus and torch.kind != "cuda":
        return [ok("NCCL", f"not needed: devices of type {torch.kind} have a library of their own")]
    if torch.error is not None:
        return [warning("NCCL", "not known: torch cannot be asked", "see the line of torch")]
    if torch.nccl is None:
        if several:
            remedy = "pip install --force-reinstall torch torchvision    (or train with --transport gloo)"
            return [error("NCCL", f"{len(torch.gpus)} GPUs, and this torch is built without it", remedy)]
        return [ok("NCCL", "none in this torch: CPUs exchange by Gloo")]
    version = torch.nccl_version or torch.nccl
    slowing = [name for name in SLOWING_VARIABLES if environ.get(name) not in (None, "", "0")]
    if several and slowing:
        found = f"{version}, and {', '.join(slowing)} in this shell slows it down"
        return [warning("NCCL", found, f"unset {' '.join(slowing)}    (unless you need it)")]
    return [ok("NCCL", f"{version}{'' if torch.gpus else ', for GPUs only: CPUs exchange by Gloo'}")]


def check_links(context: Context) -> list[Finding]:
    """Check how the GPUs are connected, if there are several."""
    program = context.programs.find("nvidia-smi")
    if program is None or len(context.facts.torch.gpus) < 2:
        return []
    answer = context.programs.ask(program, "topo", "-m")
    links = read_links(answer.out)
    if not links:
        return [warning("GPU links", f"nvidia-smi topo -m says: {answer.last_line}", "nvidia-smi topo -m")]
    return [ok("GPU links", describe_links(links))]


def read_links(text: str) -> dict[tuple[str, str], str]:
    """Parse the table of `nvidia-smi topo -m` into ("GPU0", "GPU1") -> "NV12"."""
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    # Both the heading and the first row begin with GPU0; in the row an X for the GPU itself follows.
    heading = next((row for row in rows if row[:1] == ["GPU0"] and row[1:2] != ["X"]), [])
    columns = [word for word in heading if re.fullmatch(r"GPU\d+", word)]
    cells = {row[0]: row[1 : len(columns) + 1] for row in rows if row and row is not heading}
    return {
        (one, other): cells[one][columns.index(other)]
        for one, other in combinations(columns, 2)
        if len(cells.get(one, ())) == len(columns)
    }


def describe_links(links: Mapping[tuple[str, str], str]) -> str:
    """Describe the links in groups, the fastest first: `GPU0-GPU1 NV12 (NVLink); GPU0-GPU2, GPU1-GPU2 SYS (PCIe
    ...)`.
    """
    kinds = sorted(set(links.values()), key=_slowness)
    if len(kinds) == 1 and len(links) > 1:
        return f"all GPUs to all others {_explain_link(kinds[0])}"
    groups = [(kind, [f"{one}-{other}" for (one, other), its in links.items() if its == kind]) for kind in kinds]
    return "; ".join(f"{', '.join(pairs)} {_explain_link(kind)}" for kind, pairs in groups)


def _slowness(kind: str) -> tuple[int, str]:
    order = ["PIX", "PXB", "PHB", "NODE", "SYS"]
    return (order.index(kind) if kind in order else -1, kind)


def _explain_link(kind: str) -> str:
    meaning = "NVLink" if kind.startswith("NV") else LINK_MEANINGS.get(kind)
    return f"{kind} ({meaning})" if meaning else kind
