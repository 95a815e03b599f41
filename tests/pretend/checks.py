"""What is shown on the pretend device, by functions that its ranks run; they raise where it is not so.

Each trains real jobs in one process after the other, and changes how streams run in between.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpu import table

from pretend import device

DIGITS = "--dataset digits --batch-size 32 --max-steps 5"
TEXTS = (
    "--dataset synthetic --synthetic-reviews 100 --layers 2 --d-model 16 --d-hid 32 --heads 2 --sequence-length 8 "
    "--vocabulary 300 --batch-size 8 --max-steps 4"
)
RANDOM = ("late side streams", "late default stream")


def rows(engine: str) -> dict[str, str]:
    """Return the ways in which two ranks train images: those of tests/gpu without CUDA's own, and some more."""
    shared = table.NCCL | table.NCCL_OF_ONE[engine] | table.PRETEND
    left_out = {"--compile", "--capture-step"}
    return {name: text for name, text in shared.items() if not left_out & set(text.split())}


def train(job: str, text: str, log_dir: str = "") -> int:
    """Train in this process; return its rank."""
    from hvd_trainer.config.parser import parse
    from hvd_trainer.jobs import imdb, mnist, options

    words = [*text.split(), "--quiet", *(["--log-dir", log_dir] if log_dir else [])]
    run, kind = {"mnist": (mnist.train, options.MnistOptions), "imdb": (imdb.train, options.ImdbOptions)}[job]
    run(parse(kind, words))
    assert device.library().late_writes() == 0, f"{text}: memory was written after it had been freed"
    return int(os.environ.get("RANK", "0"))


def digest(log_dir: str) -> str:
    return hashlib.sha256((Path(log_dir) / "model.safetensors").read_bytes()).hexdigest()[:12]


def same_bits(job: str, texts: Sequence[str], folder: str, orders: Sequence[str]) -> tuple[int, dict[str, str]]:
    """Train in each way, and let streams run in all orders; return the weights' digest of each way."""
    device.install()
    digests, rank = {}, 0
    for number, text in enumerate(texts):
        found = {}
        for order in orders:
            device.run_in_order(order)
            log_dir = f"{folder}/{number}-{order.replace(' ', '-')}"
            rank = train(job, text, log_dir)
            if rank == 0:
                found[order] = digest(log_dir)
        assert len(set(found.values())) <= 1, f"{text}: other weights in another order of streams: {found}"
        digests[text] = next(iter(found.values()), "")
    return rank, digests


def host_waits(engine: str, texts: Sequence[str]) -> tuple[int, None]:
    """Count where the host waits in 10 steps and in 20, within one line of the log: nowhere in a step."""
    device.install()
    rank = 0
    for text in texts:
        counts = []
        for steps in (10, 20):
            waits: Counter[str] = Counter()
            device.library().on_host_wait(partial(count_wait, waits))
            rank = train(
                "mnist", f"--dataset digits --backend {engine} --log-every 999 --max-steps {steps} {text}"
            )
            counts.append(waits)
        more = counts[1] - counts[0]
        assert not more, f"{text}: the host waits in each step: {dict(more)}"
    return rank, None


def count_wait(waits: Counter[str], reason: str) -> None:
    """Count a wait by its place; not that of the thread in which the monitor asks what the device has done."""
    if threading.current_thread().name != "exchange":
        waits.update([place(reason)])


def place(reason: str) -> str:
    """Return the innermost line of hvd_trainer that waits, and why."""
    import hvd_trainer

    package = f"{Path(hvd_trainer.__file__).parent}/"
    frame: Any = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith(package):
        frame = frame.f_back
    name = threading.current_thread().name
    where = f"{frame.f_code.co_filename.removeprefix(package)}:{frame.f_lineno}" if frame else f"thread {name}"
    return f"{where} ({reason})"


def resume(text: str, folder: str, order: str) -> tuple[int, None]:
    """Train six steps in one run, and in two with a checkpoint between; the same weights."""
    device.install(order)
    text = f"--dataset digits --batch-size 32 --optimizer adamw {text}"
    train("mnist", f"{text} --max-steps 6", f"{folder}/whole")
    train("mnist", f"{text} --max-steps 3 --save-every-steps 1", f"{folder}/parts")
    rank = train("mnist", f"{text} --max-steps 6 --resume auto", f"{folder}/parts")
    if rank == 0:
        assert digest(f"{folder}/parts") == digest(f"{folder}/whole"), f"{text}: other weights after a resume"
    return rank, None


def generators() -> tuple[int, None]:
    """Seeds and states are those of the rank's own device, and of no other."""
    device.install()
    import torch

    from hvd_trainer.utils import rng

    first, own = torch.device(device.NAME, 0), torch.device(device.NAME, 1)
    others = torch.pretend.default_generators[0].get_state()  # type: ignore[attr-defined]
    rng.seed_all(7, own)
    before = torch.rand(4, device=own).tolist()
    state = rng.rng_state(own)
    drawn = torch.rand(4, device=own).tolist()
    rng.set_rng_state(state, own)
    assert torch.rand(4, device=own).tolist() == drawn != before
    rng.seed_all(7, own)
    assert torch.rand(4, device=own).tolist() == before
    assert torch.equal(torch.pretend.default_generators[first.index].get_state(), others)  # type: ignore[attr-defined]
    return 0, None
