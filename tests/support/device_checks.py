"""Checks of training on a device, called in each rank; they raise AssertionError.

Each trains real jobs in one process after the other. On the pretend device it changes how streams run in between.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ways_to_train import TEXTS

SMALL = "--layers 6 --d-model 64 --d-hid 256"
LARGE = "--layers 20 --d-model 1024 --d-hid 4096 --synthetic-reviews 400"
"""Options of models whose parameters dominate the memory: for the pretend device, and for a GPU, with 253 million
parameters. A test of thousands of samples would gather shards hundreds of times."""


def kind() -> str:
    """Return the type of the device, such as `cuda`."""
    import torch

    device = torch.accelerator.current_accelerator()
    assert device is not None, "no device to check"
    return device.type


def controls() -> Any:
    """Return the module of functions that only tests call on the device."""
    return importlib.import_module("pretend.device" if kind() == "pretend" else "gpu_controls")


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def train(job: str, text: str, log_dir: str = "") -> None:
    """Train in this process."""
    from hvd_trainer import imdb, mnist
    from hvd_trainer.config.parser import parse

    words = [*text.format(device=kind()).split(), "--quiet", *(["--log-dir", log_dir] if log_dir else [])]
    run, options_of = {
        "mnist": (mnist.train, mnist.MnistOptions),
        "imdb": (imdb.train, imdb.ImdbOptions),
    }[job]
    run(parse(options_of, words))
    assert controls().num_late_writes() == 0, f"{text}: memory was written after it had been freed"


def digest(log_dir: str) -> str:
    """Return the SHA-256 of a run's final weights, in short."""
    return hashlib.sha256((Path(log_dir) / "model.safetensors").read_bytes()).hexdigest()[:12]


def same_bits(job: str, texts: Sequence[str], folder: str, orders: Sequence[str]) -> tuple[int, dict[str, str]]:
    """Train in each way, and let streams run in all orders; return the weights' digest of each way."""
    digests = {}
    for number, text in enumerate(texts):
        trained = []
        for turn, order in enumerate(orders):
            controls().run_in_order(order)
            log_dir = f"{folder}/{number}-{turn}"
            train(job, text, log_dir)
            trained.append(digest(log_dir) if rank() == 0 else "")
        assert len(set(trained)) == 1, f"{text}: other weights in another of {orders}: {trained}"
        digests[text] = trained[0]
    return rank(), digests


def host_waits(engine: str, texts: Sequence[str]) -> tuple[int, None]:
    """Count where the host waits in 10 steps and in 20, within one line of the log: nowhere in a step."""
    for text in texts:
        counts = []
        for steps in (10, 20):
            waits: Counter[str] = Counter()
            controls().on_host_wait(partial(count_wait, waits))
            train(
                "mnist",
                f"--dataset digits --repeat 1 --backend {engine} --log-every 999 --max-steps {steps} {text}",
            )
            counts.append(waits)
        more = counts[1] - counts[0]
        assert not more, f"{text}: the host waits in each step: {dict(more)}"
    return rank(), None


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
    controls().run_in_order(order)
    text = f"--dataset digits --repeat 1 --batch-size 32 --optimizer adamw {text}"
    train("mnist", f"{text} --max-steps 6", f"{folder}/whole")
    train("mnist", f"{text} --max-steps 3 --save-every-steps 1", f"{folder}/parts")
    train("mnist", f"{text} --max-steps 6 --resume auto", f"{folder}/parts")
    if rank() == 0:
        assert digest(f"{folder}/parts") == digest(f"{folder}/whole"), f"{text}: other weights after a resume"
    return rank(), None


def generators() -> tuple[int, None]:
    """Seeds and states are those of the rank's own device, and of no other."""
    import torch

    from hvd_trainer.utils import rng

    first, own = torch.device(kind(), 0), torch.device(kind(), 1)
    torch.ones(1, device=own)  # CUDA's generators are made with the first context
    generator = torch.get_device_module(first).default_generators[first.index]
    state_of_first = generator.get_state()
    rng.seed_all(7, own)
    before = torch.rand(4, device=own).tolist()
    state = rng.rng_state(own)
    drawn = torch.rand(4, device=own).tolist()
    rng.set_rng_state(state, own)
    assert torch.rand(4, device=own).tolist() == drawn != before
    rng.seed_all(7, own)
    assert torch.rand(4, device=own).tolist() == before
    assert torch.equal(generator.get_state(), state_of_first)
    return 0, None


def peak(text: str, limit: float, over: str) -> tuple[int, float]:
    """The peak of memory is at most so many times that of another way to train; return it, in MB."""
    import torch

    device = torch.device(kind(), rank() % torch.accelerator.device_count())
    size, peaks = SMALL if kind() == "pretend" else LARGE, []
    torch.ones(1, device=device)  # CUDA counts from its first context on
    for way in (over, text):
        before = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        train("imdb", f"{TEXTS} {size} --optimizer sgd {way}")
        peaks.append(torch.accelerator.max_memory_allocated(device) - before)
    assert peaks[1] <= limit * peaks[0], f"{peaks[1]} bytes with {text}, {peaks[0]} with {over}"
    return rank(), peaks[1] / 2**20
