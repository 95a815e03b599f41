"""Probe this Python's PyTorch, NCCL and Horovod in a process of its own.

Importing PyTorch takes 2 s and a broken Horovod can end its process, so the installer runs
`python -m hvd_trainer.horovod_build.facts` and reads the last line, a JSON object.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hvd_trainer.horovod_build.nccl import Nccl, find_nccl

PROBE_TIMEOUT_S = 300


@dataclass
class TorchFacts:
    """This Python's PyTorch; if it cannot be imported, `error` says why and the rest has no meaning."""

    error: str | None = None
    version: str = ""
    cuda: str | None = None
    hip: str | None = None
    cxx_standard: int = 0
    gpu_count: int = 0
    # Compute capabilities that this PyTorch has kernels for: "75,80,90".
    compute_capabilities: str = ""
    nccl_home: str | None = None
    nccl_version: str | None = None


@dataclass
class HorovodFacts:
    """An installed Horovod: why it cannot be used, and what it was built for if it is ours."""

    error: str | None = None
    path: str = ""
    record: dict[str, Any] = field(default_factory=dict)


@dataclass
class Facts:
    """The probe's result; `horovod` is None where none is installed."""

    torch: TorchFacts
    horovod: HorovodFacts | None


def probe() -> Facts:
    """Run the probe in a new process of this Python.

    A process that ends without an answer is reported as a PyTorch that cannot be imported.
    """
    command = [sys.executable, "-m", __spec__.name if __name__ == "__main__" else __name__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    try:
        found = json.loads(done.stdout.splitlines()[-1])
        horovod = found["horovod"]
        return Facts(TorchFacts(**found["torch"]), horovod and HorovodFacts(**horovod))
    except (IndexError, ValueError, TypeError):
        reason = done.stderr.strip()[-2000:] or f"the probe ended with status {done.returncode}"
        return Facts(TorchFacts(error=reason), None)


def _torch_facts() -> TorchFacts:
    try:
        import torch
    except Exception as error:  # a broken PyTorch raises anything from OSError to RuntimeError
        return TorchFacts(error=f"{type(error).__name__}: {error}")
    nccl = _nccl_wheel()
    return TorchFacts(
        version=str(torch.__version__),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        cxx_standard=_cxx_standard(Path(torch.__file__).parent),
        gpu_count=torch.cuda.device_count() if torch.version.cuda else 0,
        compute_capabilities=_compute_capabilities(torch),
        nccl_home=str(nccl.include.parent) if nccl else None,
        nccl_version=nccl.version if nccl else None,
    )


def _cxx_standard(torch_folder: Path) -> int:
    """Return the C++ standard with which this PyTorch compiles extensions: 17, or 20 of late."""
    text = (torch_folder / "utils/cpp_extension.py").read_text(encoding="utf-8")
    return max((int(found) for found in re.findall(r"-std=c\+\+(\d\d)\b", text)), default=17)


def _compute_capabilities(torch: Any) -> str:
    """Return the GPUs to compile for ("75,80,90"); without them nvcc compiles for every GPU that it knows."""
    if not torch.version.cuda:
        return ""
    flags = torch._C._cuda_getArchFlags() or ""
    return ",".join(sorted(set(re.findall(r"sm_(\d+)\b", flags)), key=int))


def _nccl_wheel() -> Nccl | None:
    """Return the NCCL wheel that PyTorch loads."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    return find_nccl((spec.submodule_search_locations or []) if spec else [])


def _horovod_facts() -> HorovodFacts | None:
    spec = importlib.util.find_spec("horovod")
    if spec is None:
        return None
    facts = HorovodFacts(path=str(spec.origin))
    try:
        # Horovod without its extension prints a warning, imports all the same, and has no `init`.
        import horovod.torch

        if not hasattr(horovod.torch, "init"):
            facts.error = "it has no PyTorch extension for this Python"
    except Exception as error:  # an extension for another PyTorch can raise anything
        facts.error = f"{type(error).__name__}: {error}"
    try:
        from horovod.hvd_trainer_build import RECORD

        facts.record = RECORD
    except ImportError:
        facts.record = {}
    return facts


if __name__ == "__main__":
    torch_facts = _torch_facts()
    found = Facts(torch_facts, None if torch_facts.error else _horovod_facts())
    print("\n" + json.dumps(asdict(found)), flush=True)
