"""Check the GPUs: the driver, PyTorch's code for each GPU, NCCL, and the links between GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from hvd_trainer.horovod_build.facts import Gpu, TorchFacts
from hvd_trainer.horovod_build.toolchain import find_toolkits
from hvd_trainer.launch.slurm import GPU_VARIABLES, visible_gpus
from hvd_trainer.tools.doctor.context import Context
from hvd_trainer.tools.doctor.findings import Finding, error, ok, size, warning
from hvd_trainer.utils.text import plural

GPU_QUERY = "--query-gpu=uuid,driver_version,memory.free"
DRIVER_FILE = Path("/proc/driver/nvidia/version")
SLOWING_VARIABLES = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")
LINK_MEANINGS = {
    "NV": "NVLink",
    "PIX": "PCIe through one switch",
    "PXB": "PCIe through several switches",
    "PHB": "PCIe through the CPU",
    "NODE": "PCIe, inside of one NUMA node",
    "SYS": "PCIe and from one CPU socket to another",
}
"""Links as nvidia-smi names them, the fastest first; the number of NVLinks follows theirs."""


class Driver(NamedTuple):
    """NVIDIA's driver on this machine, and the free memory of its GPUs."""

    version: str | None = None
    """None: there is no driver"""
    free_mb: Mapping[str, int | None] = MappingProxyType({})
    """by the GPU's unique id, without `GPU-`; None: the driver does not say"""
    error: str | None = None


def check_cuda(context: Context) -> Iterator[Finding]:
    """Check the driver and the toolkit, and each GPU in a finding of its own."""
    driver, torch = _find_driver(context), context.facts.torch
    finding = judge_cuda(driver, torch, context.environ)
    if finding.status == "ok" and torch.cuda:
        kits = ", ".join(f"{kit.version} in {kit.home}" for kit in find_toolkits())
        text = (
            f"toolkit {kits}, for building Horovod" if kits else "no toolkit: only install-horovod would use one"
        )
        finding = replace(finding, found=f"{finding.found}; {text}")
    yield finding
    yield from (judge_gpu(number, gpu, torch, driver) for number, gpu in enumerate(torch.gpus))


def _find_driver(context: Context) -> Driver:
    version, program = None, context.programs.find("nvidia-smi")
    if DRIVER_FILE.exists() and (
        match := re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)\s", DRIVER_FILE.read_text())
    ):
        version = match[1]
    if program is None:
        return Driver(version)
    answer = context.programs.ask(program, GPU_QUERY, "--format=csv,noheader,nounits")
    if answer.code != 0:
        return Driver(version, error=answer.last_line)
    # GPU-5ba3..., 570.124.06, 81076
    rows = re.findall(r"^(?:GPU-)?(\S+), (\S+), (.+)$", answer.out, re.MULTILINE)
    free_mb = {uuid: int(free) if free.isdecimal() else None for uuid, _, free in rows}
    return Driver(rows[0][1] if rows else None, free_mb)


def judge_cuda(driver: Driver, torch: TorchFacts, environ: Mapping[str, str]) -> Finding:
    """Return whether PyTorch sees the GPUs that the driver lists, as a finding."""
    setting = next((f"{name}={environ[name]}" for name in GPU_VARIABLES if name in environ), "")
    if torch.gpus:
        kind = f"driver {driver.version or 'of unknown version'}" if torch.cuda else gpu_platform(torch)
        visible = f"torch sees {plural(len(torch.gpus), 'GPU')}"
        return ok("CUDA", f"{kind}, {visible}{f' ({setting})' if setting else ''}")
    if driver.error is not None:
        remedy = "nvidia-smi    (after an update of the driver: reboot; in a container: docker run --gpus all)"
        return error("CUDA", f"nvidia-smi says: {driver.error}", remedy)
    if torch.unsupported is not None:
        text = f"{torch.unsupported} is here, and ranks cannot train on it, so training runs on the CPU"
        remedy = "--device cpu    (to say so; ranks train on NVIDIA's, AMD's and Intel's GPUs)"
        return warning("CUDA", text, remedy)
    if driver.version is None:
        return ok("CUDA", "no NVIDIA driver, so training runs on the CPU")
    text = f"driver {driver.version} with {plural(len(driver.free_mb), 'GPU')}"
    if torch.error is not None:
        return ok("CUDA", text)
    if not torch.cuda:
        remedy = "pip install --force-reinstall torch torchvision    (the builds on PyPI have CUDA)"
        return warning("CUDA", f"{text}, and this torch is built without CUDA", remedy)
    if visible_gpus(environ) == ():
        return warning("CUDA", f"{text}, and {setting} hides them all", f"unset {setting.partition('=')[0]}")
    remedy = f"update the driver, or install a torch for an older CUDA than {torch.cuda}: https://pytorch.org"
    return error("CUDA", f"{text}, and torch sees none: {torch.gpu_error or 'it does not say why'}", remedy)


def gpu_platform(torch: TorchFacts) -> str:
    """Return the platform that this PyTorch is built for: `CUDA 13.2`, `ROCm 6.4`, `xpu`; empty if for none."""
    return f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else torch.kind or ""


def judge_gpu(number: int, gpu: Gpu, torch: TorchFacts, driver: Driver) -> Finding:
    """Return whether this PyTorch has code for a GPU, as a finding."""
    name = f"GPU {number}"
    free_mb = driver.free_mb.get(gpu.uuid)
    free = f" ({size(free_mb * 2**20)} free)" if free_mb is not None else ""
    text = f"{gpu.name}, {size(gpu.memory)}{free}"
    text += f", compute capability {gpu.capability}" if gpu.capability else ""
    if not torch.cuda or has_code(torch.architectures, gpu.capability):
        return ok(name, text)
    known = ", ".join(torch.architectures)
    remedy = (
        "pip install --upgrade torch torchvision    (an old GPU: a torch for an older CUDA, https://pytorch.org)"
    )
    return error(name, f"{text}, for which this torch has no code (it has {known})", remedy)


def has_code(architectures: Sequence[str], capability: str) -> bool:
    """Return whether one of these architectures' code runs on a GPU of this capability, as it is or translated by
    the driver.

    sm_80       8.0 and later capabilities of generation 8
    sm_90a      9.0 only
    sm_100f     as sm_100
    compute_90  all from 9.0 on, translated when it is loaded
    """
    target = tuple(map(int, capability.split(".")))
    for kind, major, minor, suffix in re.findall(r"\b(sm|compute)_(\d+)(\d)([af]?)\b", " ".join(architectures)):
        of = int(major), int(minor)
        reaches = of[0] == target[0] or (kind == "compute" and not suffix)
        if of == target or (of < target and reaches and suffix != "a"):
            return True
    return False


def check_nccl(context: Context) -> list[Finding]:
    """Check that NCCL, by which NVIDIA's GPUs exchange tensors, is there where it is needed, and is not slowed."""
    torch, environ = context.facts.torch, context.environ
    if torch.gpus and torch.kind != "cuda":
        return [ok("NCCL", f"not needed: devices of type {torch.kind} have a library of their own")]
    if torch.error is not None:
        return [warning("NCCL", "not known: torch cannot be asked", "see the line of torch")]
    if torch.nccl is None and len(torch.gpus) > 1:
        remedy = "pip install --force-reinstall torch torchvision    (or train with --transport gloo)"
        return [error("NCCL", f"{len(torch.gpus)} GPUs, and this torch is built without it", remedy)]
    if torch.nccl is None:
        return [ok("NCCL", "none in this torch: CPUs exchange by Gloo")]
    version = torch.nccl_version or torch.nccl
    slowing = [name for name in SLOWING_VARIABLES if environ.get(name) not in (None, "", "0")]
    if len(torch.gpus) > 1 and slowing:
        text = f"{version}, and {', '.join(slowing)} in this shell slows it down"
        return [warning("NCCL", text, f"unset {' '.join(slowing)}    (unless you need it)")]
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
    """Describe the links in groups, the fastest first: `GPU0-GPU1 NV12 (NVLink); GPU0-GPU2 SYS (PCIe ...)`."""
    order = list(LINK_MEANINGS)
    pairs: dict[str, list[str]] = {}
    for (one, other), kind in links.items():
        pairs.setdefault(kind, []).append(f"{one}-{other}")
    groups = []
    for kind in sorted(pairs, key=lambda kind: order.index(kind) if kind in order else -1):
        meaning = LINK_MEANINGS.get(kind.rstrip("0123456789"))
        which = "all GPUs to all others" if len(pairs[kind]) == len(links) > 1 else ", ".join(pairs[kind])
        groups.append(f"{which} {kind} ({meaning})" if meaning else f"{which} {kind}")
    return "; ".join(groups)
