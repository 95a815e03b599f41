"""What this machine has, and Horovod on it: built with NCCL, and one built for CPUs that meets a GPU."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from gpu.bench import HELP, MNIST, Bench, Check, FailedError, MissingError, figures_in, require_success

HOROVOD = "import horovod.torch.mpi_lib_v2 as its; print(its.__file__)"
TORCH = """
import json, torch
gpus = torch.cuda
pairs = [(a, b) for a in range(gpus.device_count()) for b in range(gpus.device_count()) if a != b]
apart = [f"{a}-{b}" for a, b in pairs if not gpus.can_device_access_peer(a, b)]
nccl = ".".join(map(str, gpus.nccl.version())) if gpus.is_available() else "-"
facts = {"CUDA": torch.version.cuda, "NCCL": nccl, "built for": " ".join(gpus.get_arch_list())}
print(json.dumps(facts | {"GPUs without peer access": " ".join(apart) or "-"}))
"""
SENDS = ("-c", "import torch, horovod.torch as hvd; hvd.init(); hvd.allreduce(torch.ones(3, device='cuda'))")
TORCH_SENDS = (
    "-c",
    "import torch, torch.distributed as dist, hvd_trainer.c10d; "
    "dist.init_process_group('horovod'); dist.all_reduce(torch.ones(3, device='cuda'))",
)
"""A GPU's tensor sent by Horovod's API, and by torch.distributed on Horovod."""
RESTORE_S = 120.0


def output_of(command: Sequence[str]) -> str:
    """Return what a program prints, or that it is not there."""
    if shutil.which(command[0]) is None:
        return f"no {command[0]}"
    asked = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return re.sub(r"\x1b\[[0-9;]*m", "", asked.stdout or asked.stderr).strip()


def can_open(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def machine() -> dict[str, str]:
    """Return what a reader of the report must know of the machine."""
    query = "--query-gpu=name,memory.total,driver_version,compute_mode"
    return {
        "GPUs": "; ".join(output_of(["nvidia-smi", query, "--format=csv,noheader"]).splitlines()),
        "nvcc": output_of(["nvcc", "--version"]).splitlines()[-1],
        "CPUs": str(len(os.sched_getaffinity(0))),
        "kernel": output_of(["uname", "-r"]),
    }


def facts(bench: Bench) -> Iterable[Check]:
    yield Check("the package starts", lambda its: its.ok(*HELP) and {})
    yield Check("driver, PyTorch, links between GPUs, host names", measure_machine, measures=True)


def measure_machine(bench: Bench) -> dict[str, Any]:
    own = bench.run("--uts", "true", program="unshare").code == 0
    return {
        **figures_in(bench.ok("-c", TORCH).output),
        **{name: can_open(name) for name in ("libcuda.so", "libcuda.so.1")},
        "host names by": "a UTS namespace" if own else "NCCL_HOSTID",
        "links": output_of(["nvidia-smi", "topo", "-m"]),
    }


def build(bench: Bench) -> Iterable[Check]:
    yield Check("install-horovod --gpu nccl", install, ("nccl",), ("gpu",))
    yield Check("doctor", check_doctor)
    yield Check("Horovod is linked to PyTorch's NCCL", check_linking, needs=("horovod",))
    yield Check("Horovod works with libcuda.so.1 alone", check_without_libcuda_so, needs=("gpu", "horovod"))


def install(bench: Bench, kind: str) -> dict[str, Any]:
    # Which NCCL and CUDA it takes, the user may have said so.
    own = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}
    ran = bench.run("-m", "hvd_trainer", "install-horovod", "--gpu", kind, env=own, limit_s=420)
    bench.forget_horovod()
    if kind == "nccl" and ran.code != 0 and shutil.which("nvcc") is None:
        raise MissingError("nvcc, which compiles Horovod for NCCL")
    require_success(ran)
    return {"seconds": round(ran.seconds, 1)}


def check_doctor(bench: Bench) -> dict[str, Any]:
    output = bench.run("-m", "hvd_trainer", "doctor", limit_s=120).output
    errors = [line for line in output.splitlines() if re.match(r"\s*(error|ERROR|FAIL|✗)", line)]
    bench.judge(not errors, "; ".join(errors))
    if not output.strip():
        raise FailedError("it printed nothing")
    return {"errors": len(errors)}


def check_linking(bench: Bench) -> dict[str, Any]:
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


def check_without_libcuda_so(bench: Bench) -> None:
    if can_open("libcuda.so"):
        raise MissingError("a machine whose driver brings only libcuda.so.1")
    bench.ok(*MNIST, "--backend", "horovod", "--device", bench.device, "--max-steps", "3")


def cpu_horovod(bench: Bench) -> Iterable[Check]:
    yield Check("a Horovod for CPUs is refused on a GPU", check_refusal, needs=("gpu", "horovod"))


def check_refusal(bench: Bench) -> dict[str, Any]:
    try:
        install(bench, "none")
        ran = bench.run(*MNIST, "--backend", "horovod", "--max-steps", "3", limit_s=60)
        scripts = [bench.run(*SENDS, limit_s=60), *bench.ranks(*TORCH_SENDS, limit_s=60)]
    finally:
        # From its wheel, for the stages that follow, also when this one's time is over.
        install(replace(bench, until=time.monotonic() + RESTORE_S), "nccl")
    if ran.code is None:
        raise FailedError("it hangs")
    if ran.code == 0 or "Traceback" in ran.output or "install-horovod" not in ran.output:
        raise FailedError(f"it is refused in one line that names install-horovod; exit code {ran.code}")
    for script in scripts:
        if script.code in (None, 0) or "install-horovod" not in script.output:
            raise FailedError(f"a script's tensor is refused, and install-horovod named; exit code {script.code}")
    return {"exit code": ran.code, "seconds": round(ran.seconds, 1)}
