"""What this machine has, and Horovod on it: built with NCCL, and one built for CPUs that meets a GPU."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from typing import Any

from gpu.bench import MNIST, Bench, Check, FailedError, MissingError, ended_well

HOROVOD = "import horovod.torch.mpi_lib_v2 as its; print(its.__file__)"
TORCH = (
    "import torch; c = torch.cuda; print(torch.__version__, '| CUDA', torch.version.cuda, '| NCCL',"
    " '.'.join(map(str, c.nccl.version())) if c.is_available() else '-', '|', ' '.join(c.get_arch_list()))"
)


def said(command: Sequence[str]) -> str:
    """Return what a program prints, or that it is not there."""
    if shutil.which(command[0]) is None:
        return f"no {command[0]}"
    asked = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return (asked.stdout or asked.stderr).strip()


def opens(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def machine() -> dict[str, str]:
    """Return what a reader of the report must know of the machine."""
    gpus = said(
        ["nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_mode", "--format=csv,noheader"]
    )
    return {
        "GPUs": "; ".join(gpus.splitlines()),
        "nvcc": said(["nvcc", "--version"]).splitlines()[-1],
        "CPUs": str(len(os.sched_getaffinity(0))),
        "kernel": said(["uname", "-r"]),
    }


def facts(bench: Bench) -> Iterable[Check]:
    def libraries(bench: Bench) -> dict[str, Any]:
        return {"libcuda.so": opens("libcuda.so"), "libcuda.so.1": opens("libcuda.so.1")}

    def python(bench: Bench) -> dict[str, Any]:
        bench.ok("-m", "hvd_trainer.mnist", "--help")
        return {"torch": bench.ok("-c", TORCH).output.strip()}

    def host_names(bench: Bench) -> dict[str, Any]:
        own = bench.run("--uts", "true", program="unshare").code == 0
        return {"host names by": "a UTS namespace" if own else "NCCL_HOSTID"}

    yield Check("PyTorch, and the package starts", "", python)
    yield Check("the driver's library", "B2", libraries, ("gpu",))
    yield Check("hosts of their own names", "", host_names)


def build(bench: Bench) -> Iterable[Check]:
    yield Check("install-horovod --gpu nccl", "B10 B13", lambda its: install(its, "nccl"), ("gpu",))
    yield Check("doctor", "B14", doctor)
    yield Check("linked against PyTorch's NCCL", "B10", linked, ("horovod",))
    yield Check("works with libcuda.so.1 alone", "B2", without_libcuda_so, ("gpu", "horovod"))


def install(bench: Bench, kind: str) -> dict[str, Any]:
    # Which NCCL and CUDA it takes, the user may have said so.
    own = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}
    ran = bench.run("-m", "hvd_trainer", "install-horovod", "--gpu", kind, env=own, limit_s=420)
    bench.forget_horovod()
    if kind == "nccl" and ran.code != 0 and shutil.which("nvcc") is None:
        raise MissingError("nvcc, which compiles Horovod for NCCL")
    ended_well(ran)
    return {"seconds": round(ran.seconds, 1)}


def doctor(bench: Bench) -> dict[str, Any]:
    output = bench.run("-m", "hvd_trainer", "doctor", limit_s=120).output
    errors = [line for line in output.splitlines() if re.match(r"\s*(error|ERROR|FAIL|✗)", line)]
    bench.judge(not errors, "; ".join(errors))
    if not output.strip():
        raise FailedError("it printed nothing")
    return {"errors": len(errors)}


def linked(bench: Bench) -> dict[str, Any]:
    if shutil.which("readelf") is None:
        raise MissingError("readelf (apt-get install binutils)")
    library = bench.ok("-c", HOROVOD).output.strip().splitlines()[-1]
    output = bench.ok("-d", library, program="readelf").output
    needed = re.findall(r"NEEDED.*\[(.*?)\]", output)
    paths = re.findall(r"RU?N?PATH.*\[(.*?)\]", output)
    found = [name for name in needed if name.startswith("libnccl")]
    bench.judge(bool(found), f"no NCCL in what it needs: {' '.join(needed)}")
    bench.judge(not any(name.startswith("libcuda.so") for name in needed), "it needs the driver to be imported")
    return {"NCCL": " ".join(found) or "none", "path": " ".join(paths)}


def without_libcuda_so(bench: Bench) -> dict[str, Any]:
    if opens("libcuda.so"):
        raise MissingError("a machine whose driver brings only libcuda.so.1")
    bench.ok(*MNIST, "--backend", "horovod", "--device", bench.device, "--max-steps", "3")
    return {}


def cpu_horovod(bench: Bench) -> Iterable[Check]:
    """Last, for it needs another Horovod; in the end the first is back, from its wheel."""

    def refused(bench: Bench) -> dict[str, Any]:
        install(bench, "none")
        try:
            ran = bench.run(*MNIST, "--backend", "horovod", "--max-steps", "3", limit_s=60)
        finally:
            install(bench, "nccl")
        if ran.code is None:
            raise FailedError("it hangs")
        if ran.code == 0 or "Traceback" in ran.output or "install-horovod" not in ran.output:
            raise FailedError(f"it is refused in one line that names install-horovod; exit code {ran.code}")
        return {"exit code": ran.code, "seconds": round(ran.seconds, 1)}

    yield Check("a Horovod for CPUs meets a GPU", "B1", refused, ("gpu", "horovod"))
