"""Install a Horovod that fits this PyTorch, and prove it by running it (`install-horovod`).

Horovod's published source does not compile against any PyTorch from 2.1 on. The installer fetches it by pip,
applies the patches in patches/, compiles it, keeps the wheel for the next environment, installs it, and runs real
collectives on two ranks under horovodrun.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hvd_trainer.config.command_line import read_words
from hvd_trainer.horovod_build.build_plan import VERSION, BuildPlan, default_jobs, python_tag
from hvd_trainer.horovod_build.build_steps import pip, run_logged
from hvd_trainer.horovod_build.errors import InstallError
from hvd_trainer.horovod_build.facts import Facts, HorovodFacts, TorchFacts, probe
from hvd_trainer.horovod_build.patch_set import PATCH_SET
from hvd_trainer.horovod_build.self_test import prove
from hvd_trainer.horovod_build.toolchain import CudaToolkit, find_cuda, find_mpi, nccl_for
from hvd_trainer.horovod_build.wheel import build_wheel, cached_wheel, lock_wheels
from hvd_trainer.measure.start import Start, exit_on_signals
from hvd_trainer.utils.files import default_wheel_dir
from hvd_trainer.utils.text import INSTALL_HOROVOD


@dataclass(frozen=True)
class Options:
    """Build, install and prove a Horovod that fits this PyTorch."""

    gpu: Literal["auto", "nccl", "none"] = "auto"
    """nccl: GPU collectives by PyTorch's NCCL; none: CPU only; auto: nccl where there is a GPU for it"""
    mpi: bool = False
    """also build for MPI, which --transport mpi needs"""
    wheel_dir: Path = field(default_factory=default_wheel_dir)
    """folder for built wheels and logs"""
    force: bool = False
    """build and install again, even if a usable one is there"""
    jobs: int | None = None
    """compilers at once; None: by cores and memory"""


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Raises:
        InstallError: something that a user can mend.
    """
    options = read_words(Options, argv, program=INSTALL_HOROVOD)
    with exit_on_signals():  # so that the compilers end with the installer
        install(options)
    return 0


def install(options: Options) -> None:
    """Build, install and prove a Horovod, unless a usable one is installed.

    Raises:
        InstallError: no usable one could be installed.
    """
    facts = _probe_torch()
    if not options.force and _already_usable(options, facts):
        return
    wheel_dir = options.wheel_dir.expanduser().resolve()
    with lock_wheels(wheel_dir) as waited:
        if waited and not options.force and _already_usable(options, _probe_torch()):
            return  # the other installer was working in this environment
        plan = make_plan(options, facts.torch)
        wheel = None if options.force else cached_wheel(wheel_dir, plan.name)
        if wheel is not None:
            print(f"installing the wheel built earlier: {wheel}", flush=True)
        else:
            wheel = _build(plan, wheel_dir)
        log = wheel_dir / f"{plan.name}.install.log"
        log.unlink(missing_ok=True)
        command = pip("install", "--force-reinstall", "--no-deps", str(wheel))
        run_logged("The built wheel must be installed.", Start(command), log)
        prove(plan, log)
        if plan.cuda is None:
            _suggest_gpu_build(options, facts.torch)


def _build(plan: BuildPlan, wheel_dir: Path) -> Path:
    print(
        f"building {plan.name} with --jobs {plan.jobs}\n"
        f"  takes several minutes on few cores; to watch it, type: tail -f {wheel_dir / plan.name}.log",
        flush=True,
    )
    started = time.monotonic()
    wheel = build_wheel(plan, wheel_dir)
    print(f"built in {time.monotonic() - started:.0f} s: {wheel}", flush=True)
    return wheel


def _probe_torch() -> Facts:
    facts = probe()
    if facts.torch.error is not None and facts.is_timeout:
        raise InstallError(
            "Horovod is built for one PyTorch, which must be imported to know which.",
            f"{sys.executable}: {facts.torch.error}",
            'python -c "import torch; torch.cuda.init()"    (it hangs: ask who keeps this machine about its GPU '
            "driver, and the disk that Python is on)",
        )
    if facts.torch.error is not None:
        raise InstallError(
            "Horovod is built for one PyTorch, and here none can be imported.",
            f"{sys.executable}: {facts.torch.error}",
            "pip install torch torchvision, then run the same command again",
        )
    return facts


def make_plan(options: Options, torch: TorchFacts) -> BuildPlan:
    """Decide what to build, by the options and by what is there.

    Raises:
        InstallError: something that was asked for is missing.
    """
    cuda = choose_cuda(options.gpu, torch)
    if isinstance(cuda, str):
        print(f"building for the CPU: {cuda}", flush=True)
    return BuildPlan(
        torch=torch,
        cuda=cuda if isinstance(cuda, CudaToolkit) else None,
        nccl=nccl_for(torch) if isinstance(cuda, CudaToolkit) else None,
        mpi=find_mpi() if options.mpi else None,
        jobs=options.jobs or default_jobs(),
    )


def choose_cuda(gpu: str, torch: TorchFacts) -> CudaToolkit | str:
    """Return the toolkit for an NCCL build, or the reason why the build is for the CPU."""
    if gpu == "none":
        return "as asked (--gpu none)"
    try:
        toolkit = find_cuda(torch)
    except InstallError as error:
        if gpu == "nccl":
            raise
        return error.found
    # CUDA's part takes most of a build, and the whole of it would be for nothing.
    return "no GPU is visible here" if gpu == "auto" and torch.gpu_count == 0 else toolkit


def _suggest_gpu_build(options: Options, torch: TorchFacts) -> None:
    """Print that this build is for the CPU, if nobody has asked for that and PyTorch can use GPUs."""
    reason = choose_cuda(options.gpu, torch)
    if options.gpu == "auto" and isinstance(reason, str) and (torch.cuda or torch.hip):
        print(
            f"This Horovod is for CPUs only: {reason}\n"
            f"For GPUs type: {INSTALL_HOROVOD} --gpu nccl    (also on a login node without any; it says what is "
            f"missing)",
            flush=True,
        )


def _already_usable(options: Options, facts: Facts) -> bool:
    if facts.horovod is None:
        if facts.ended:
            print(f"the installed Horovod cannot be imported: {facts.ended}", flush=True)
        return False
    reason = find_mismatch(facts.horovod, facts.torch, options)
    if reason is None:
        record = facts.horovod.record
        kind = f"NCCL {record['nccl']}" if record["cuda"] else "CPU only"
        mpi = f", MPI {record['mpi']}" if record["mpi"] else ""
        print(f"Horovod {VERSION} for torch {facts.torch.version} ({kind}{mpi}) is installed already")
        if not record["cuda"]:
            _suggest_gpu_build(options, facts.torch)
        return True
    print(f"the installed Horovod does not fit: {reason}", flush=True)
    return False


def find_mismatch(horovod: HorovodFacts, torch: TorchFacts, options: Options) -> str | None:
    """Return why the installed Horovod is not what `options` ask for; None if it is.

    The CUDA toolkit and the processor do not count: an environment that was built on one node of a cluster and is
    used on another, perhaps without compilers, stays as it is.
    """
    record = horovod.record
    if not record:
        return horovod.error or "it was not built by this tool, so CVE-2024-10190 is open in it"
    wanted = {"horovod": VERSION, "patch_set": PATCH_SET, "torch": torch.version, "python": python_tag()}
    if record.get("cuda") and torch.nccl_version:
        wanted["nccl"] = torch.nccl_version
    for name, value in wanted.items():
        if record.get(name) != value:
            return f"it was built for {name} {record.get(name)}, and this is {value}"
    if horovod.error:
        return horovod.error
    if not record.get("proved"):
        return "no ranks have exchanged tensors by it yet: it was not proved, or that failed"
    if bool(record.get("mpi")) != options.mpi:
        return f"it was built {'with' if record.get('mpi') else 'without'} MPI"
    if options.gpu == "none":
        return "it was built with NCCL" if record.get("cuda") else None
    if record.get("cuda") or (options.gpu == "auto" and isinstance(choose_cuda("auto", torch), str)):
        return None
    return "it was built for the CPU only"
