"""Check the GPUs: the driver, PyTorch's code for each GPU, and NCCL."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hvd_trainer.horovod_build.facts import Gpu, TorchFacts
from hvd_trainer.launch.slurm import GPU_VARIABLES, visible_gpus
from hvd_trainer.measure.machine import read_text
from hvd_trainer.tools.doctor.context import Context
from hvd_trainer.tools.doctor.findings import Finding, error, ok, size, warning
from hvd_trainer.utils.text import plural

DRIVER_FILE = Path("/proc/driver/nvidia/version")
SLOWING_VARIABLES = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")


def check_cuda(context: Context) -> Iterator[Finding]:
    """Check whether PyTorch sees the GPUs of this machine, and each GPU in a finding of its own."""
    torch, program = context.facts.torch, context.programs.find("nvidia-smi")
    # Kernel Module for x86_64  570.124.06  Release Build
    version = re.search(r"\d+\.\d[\d.]*", read_text(DRIVER_FILE))
    if (
        program is not None
        and not torch.gpus
        and (answer := context.programs.ask(program, "--list-gpus")).code != 0
    ):
        remedy = "nvidia-smi    (after an update of the driver: reboot; in a container: docker run --gpus all)"
        yield error("CUDA", f"nvidia-smi says: {answer.last_line}", remedy)
        return
    yield judge_cuda(version[0] if version else None, torch, context.environ)
    yield from (judge_gpu(number, gpu, torch) for number, gpu in enumerate(torch.gpus))


def judge_cuda(driver: str | None, torch: TorchFacts, environ: Mapping[str, str]) -> Finding:
    """Return whether PyTorch sees the GPUs of this machine, as a finding.

    Args:
        driver: the version of NVIDIA's; None: there is none.
    """
    setting = next((f"{name}={environ[name]}" for name in GPU_VARIABLES if name in environ), "")
    if torch.gpus:
        kind = f"driver {driver or 'of unknown version'}" if torch.cuda else gpu_platform(torch)
        visible = f"torch sees {plural(len(torch.gpus), 'GPU')}"
        return ok("CUDA", f"{kind}, {visible}{f' ({setting})' if setting else ''}")
    if torch.unsupported is not None:
        found = f"{torch.unsupported} is here, and ranks cannot train on it, so training runs on the CPU"
        remedy = "--device cpu    (to say so; ranks train on NVIDIA's, AMD's and Intel's GPUs)"
        return warning("CUDA", found, remedy)
    if driver is None:
        return ok("CUDA", "no NVIDIA driver, so training runs on the CPU")
    if torch.error is not None:
        return ok("CUDA", f"driver {driver}")
    if not torch.cuda:
        remedy = "pip install --force-reinstall torch torchvision    (the builds on PyPI have CUDA)"
        return warning("CUDA", f"driver {driver}, and this torch is built without CUDA", remedy)
    if visible_gpus(environ) == ():
        return warning(
            "CUDA", f"driver {driver}, and {setting} hides all GPUs", f"unset {setting.partition('=')[0]}"
        )
    remedy = f"update the driver, or install a torch for an older CUDA than {torch.cuda}: https://pytorch.org"
    why = torch.gpu_error or "it does not say why"
    return error("CUDA", f"driver {driver}, and torch sees no GPU: {why}", remedy)


def gpu_platform(torch: TorchFacts) -> str:
    """Return the platform that this PyTorch is built for: `CUDA 13.2`, `ROCm 6.4`, `xpu`; empty if for none."""
    return f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else torch.kind or ""


def judge_gpu(number: int, gpu: Gpu, torch: TorchFacts) -> Finding:
    """Return whether this PyTorch has code for a GPU, as a finding."""
    name, found = f"GPU {number}", f"{gpu.name}, {size(gpu.memory)}"
    found += f", compute capability {gpu.capability}" if gpu.capability else ""
    if not torch.cuda or has_code(torch.architectures, gpu.capability):
        return ok(name, found)
    known = ", ".join(torch.architectures)
    remedy = (
        "pip install --upgrade torch torchvision    (an old GPU: a torch for an older CUDA, https://pytorch.org)"
    )
    return error(name, f"{found}, for which this torch has no code (it has {known})", remedy)


def has_code(architectures: Sequence[str], capability: str) -> bool:
    """Return whether one of these architectures' code runs on a GPU of this capability, as it is or translated by
    the driver.

    sm_80       8.0 and later capabilities of generation 8
    sm_90a      9.0 only
    sm_100f     as sm_100
    compute_90  all from 9.0 on, translated when it is loaded
    """
    wanted = tuple(map(int, capability.split(".")))
    for kind, major, minor, suffix in re.findall(r"\b(sm|compute)_(\d+)(\d)([af]?)\b", " ".join(architectures)):
        built_for = int(major), int(minor)
        reaches = built_for[0] == wanted[0] or (kind == "compute" and not suffix)
        if built_for == wanted or (built_for < wanted and reaches and suffix != "a"):
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
        found = f"{version}, and {', '.join(slowing)} in this shell slows it down"
        return [warning("NCCL", found, f"unset {' '.join(slowing)}    (unless you need it)")]
    return [ok("NCCL", f"{version}{'' if torch.gpus else ', for GPUs only: CPUs exchange by Gloo'}")]
