"""Probe PyTorch, its GPUs and Horovod in a process of its own.

Their import takes seconds, may crash, and never ends where a GPU's driver hangs. So `doctor` runs
`python -m hvd_trainer.tools.doctor.torch_facts`, which prints a JSON object about PyTorch and its GPUs, and then
runs the installer's probe. The lines printed before a crash or a time-out are used.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from hvd_trainer.errors import first_line
from hvd_trainer.horovod_build import facts as horovod_probe
from hvd_trainer.horovod_build.facts import Facts, HorovodFacts, TorchFacts
from hvd_trainer.tools.doctor.programs import Answer, Programs


@dataclass(frozen=True)
class Gpu:
    """A GPU that PyTorch sees, of any maker."""

    name: str
    memory: int
    """bytes"""
    capability: str
    """`9.0`; the name of the architecture where it is AMD's; empty where it is Intel's"""
    uuid: str = ""


@dataclass(frozen=True)
class VisibleTorch:
    """PyTorch, and the GPUs that it sees."""

    error: str | None = None
    """why it cannot be imported; the rest then has no meaning"""
    version: str = ""
    cuda: str | None = None
    hip: str | None = None
    kind: str | None = None
    """the type of the devices that it is built for, such as `cuda`, if ranks train on them"""
    unsupported: str | None = None
    """the type of an accelerator that is here and that ranks cannot train on"""
    nccl: str | None = None
    """the version it was built with"""
    architectures: Sequence[str] = ()
    """the GPU architectures it has code for: sm_80, compute_90 ..."""
    gpus: Sequence[Gpu] = ()
    gpu_error: str | None = None
    """why it sees no GPU"""


@dataclass(frozen=True)
class ProbeResult:
    """The result of the probe."""

    torch: VisibleTorch
    facts: Facts | None = None
    """the installer's probe; None: the process ended before it"""
    ended: str = ""
    """how the process ended then"""
    is_timeout: bool = False
    """whether its time was up"""

    @property
    def horovod(self) -> HorovodFacts | None:
        return None if self.facts is None else self.facts.horovod


def run_probe(programs: Programs) -> ProbeResult:
    """Run the probe in a new process of this Python."""
    return parse_probe(programs.ask(sys.executable, "-m", __spec__.name if __name__ == "__main__" else __name__))


def parse_probe(answer: Answer) -> ProbeResult:
    """Parse what the probe printed, in whole or in part."""
    objects = []
    for line in answer.out.splitlines():
        # Horovod without its extension prints a warning, and the last line may be incomplete.
        with suppress(ValueError):
            objects.append(json.loads(line))
    code, ended = answer.code, answer.last_line
    if code is not None and code < 0:
        ended = f"it was killed by signal {-code}"
    if not objects:
        return ProbeResult(VisibleTorch(error=ended), ended=ended, is_timeout=code is None)
    torch = VisibleTorch(**{**objects[0], "gpus": [Gpu(**gpu) for gpu in objects[0]["gpus"]]})
    if len(objects) < 2:
        return ProbeResult(torch, ended=ended, is_timeout=code is None)
    horovod = objects[-1]["horovod"]
    return ProbeResult(torch, Facts(TorchFacts(**objects[-1]["torch"]), horovod and HorovodFacts(**horovod)))


def _visible_torch() -> VisibleTorch:
    try:
        import torch
    except Exception as error:  # a broken PyTorch raises anything from OSError to RuntimeError
        return VisibleTorch(error=f"{type(error).__name__}: {first_line(error)}")
    from hvd_trainer.utils import accelerator

    built_for = torch.accelerator.current_accelerator()
    kind = built_for.type if built_for is not None and built_for.type in accelerator.COLLECTIVES else None
    gpus, gpu_error = _gpus(torch, kind) if kind else ([], None)
    return VisibleTorch(
        version=str(torch.__version__),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        kind=kind,
        unsupported=accelerator.unsupported(),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
        architectures=torch.cuda.get_arch_list(),
        gpus=gpus,
        gpu_error=gpu_error,
    )


def _gpus(torch: Any, kind: str) -> tuple[list[Gpu], str | None]:
    module = torch.get_device_module(kind)
    try:
        module.init()
        found = [module.get_device_properties(number) for number in range(module.device_count())]
    except Exception as error:  # no driver, one that is too old, a broken GPU
        return [], first_line(error)
    return [
        Gpu(
            name=gpu.name,
            memory=gpu.total_memory,
            capability=_capability(gpu, kind, is_rocm=bool(torch.version.hip)),
            uuid=str(getattr(gpu, "uuid", "")),
        )
        for gpu in found
    ], None


def _capability(gpu: Any, kind: str, *, is_rocm: bool) -> str:
    # PyTorch fills in both attributes on CUDA and ROCm, and only one is meaningful on each.
    if is_rocm:
        return str(gpu.gcnArchName)
    return f"{gpu.major}.{gpu.minor}" if kind == "cuda" else ""


if __name__ == "__main__":
    print(json.dumps(asdict(_visible_torch())), flush=True)
    runpy.run_module(horovod_probe.__name__, run_name="__main__")
