"""Two and more GPUs: which process is on which, layouts of a model, and runs that are killed and resume."""

from __future__ import annotations

import threading
from pathlib import Path

import device_checks
import pytest
from ways_to_train import DIGITS, TEXTS

from gpu.machine import COUNT, SMI, InRanks, cuda_only, gpus, launch, output_of

pytestmark = [pytest.mark.gpu, gpus(2)]
APPS = (SMI, "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader")


@cuda_only
def test_process_is_on_no_gpu_but_its_own() -> None:
    """By the processes that the driver sees on each GPU while ranks train."""
    before, seen, done = set(output_of(*APPS).splitlines()), set(), threading.Event()

    def look() -> None:
        while not done.wait(0.5):
            seen.update(output_of(*APPS).splitlines())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        launch(
            "torchrun",
            COUNT,
            ["-m", "hvd_trainer.mnist", "--dataset", "digits", "--repeat", "1", "--backend", "ddp"],
        )
    finally:
        done.set()
        watcher.join()
    processes = [line.split(", ")[0] for line in seen - before]
    if not processes:
        pytest.skip("the driver shows no processes (in this container)")
    assert len(set(processes)) == len(processes), sorted(seen - before)


@gpus(4)
def test_stages_and_shards(in_ranks: InRanks, tmp_path: Path) -> None:
    texts = [f"{TEXTS} --backend ddp --stages 2 --shard full"]
    in_ranks(4, device_checks.same_bits, "imdb", texts, str(tmp_path), ["as queued"])


def test_resume_is_verified() -> None:
    job = ["-m", "hvd_trainer.mnist", *DIGITS.split(), "--max-steps", "30", "--save-every-steps", "2"]
    command = ["-m", "hvd_trainer", "verify-resume", "--kills", "2", "--backend", "ddp", "-np", "2", "--"]
    launch("python", 1, [*command, *job, "--log-dir", "{folder}/log", "--resume", "auto"])
