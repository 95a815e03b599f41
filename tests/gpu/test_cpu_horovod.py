"""A Horovod that was built for CPUs refuses a GPU's tensors; last, since it is installed meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ways_to_train import DIGITS

from gpu.machine import cuda_only, launch, variables_of

pytestmark = [pytest.mark.gpu, cuda_only]
IMPORTS = "import torch, torch.distributed as dist, horovod.torch as hvd, hvd_trainer.c10d\n"
HOROVOD_API = "hvd.init(); hvd.allreduce(torch.ones(3, device='cuda'))"
TORCH_DISTRIBUTED = "dist.init_process_group('horovod'); dist.all_reduce(torch.ones(3, device='cuda'))"


@pytest.fixture(scope="module", autouse=True)
def _horovod_is_for_cpus(horovod: float, install_horovod: Any) -> Iterator[None]:
    try:
        with install_horovod("none") as wait:
            wait()
            yield
    finally:
        with install_horovod("nccl") as wait:
            wait()


def test_job_is_refused() -> None:
    job = ["-m", "hvd_trainer.mnist", *DIGITS.split(), "--backend", "horovod"]
    result = launch("python", 1, job, check=False)
    assert result.returncode != 0
    assert "install-horovod" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("script", "ranks"), [(HOROVOD_API, 1), (TORCH_DISTRIBUTED, 2)])
def test_script_is_refused(script: str, ranks: int, tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(IMPORTS + script)
    launcher = "python" if ranks == 1 else "torchrun"
    result = launch(launcher, ranks, [str(file)], env=variables_of(ranks), check=False)
    assert result.returncode != 0
    assert "install-horovod" in result.stderr
