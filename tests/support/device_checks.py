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

import torch
from ways_to_train import TEXTS

SMALL = "--layers 6 --d-model 64 --d-hid 256"
LARGE = "--layers 20 --d-model 1024 --d-hid 4096 --synthetic-reviews 400"
"""Options of models whose parameters dominate the memory: for the pretend device, and for a GPU, with 253 million
parameters. A test of thousands of samples would gather shards hundreds of times."""


def kind() -> str:
    """Return the type of the device, such as `cuda`."""
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
    run, options_of = {"mnist": (mnist.train, mnist.MnistOptions), "imdb": (imdb.train, imdb.ImdbOptions)}[job]
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


def same_bits_of_all(*args: Any) -> tuple[int, dict[str, str]]:
    """Do as `same_bits` with ways that give the same weights, such as cuts of one model at other places."""
    number, digests = same_bits(*args)
    assert len(set(digests.values())) == 1, digests
    return number, digests


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


def sent_from_host(*args: Any) -> tuple[int, dict[str, str]]:
    """Do as `same_bits` with data that are too large for the device."""
    from hvd_trainer.data.loader import TensorLoader

    TensorLoader.MAX_FRACTION_OF_FREE_GPU = 0.0
    return same_bits(*args)


def samples_and_rate(engine: str) -> tuple[int, None]:
    """No step waits for a batch that is made of samples, its weight, or a rate that is a tensor.

    The rate is written to, as a captured optimizer reads it.
    """
    _samples_and_rate(engine, {})
    _samples_and_rate(engine, {"accumulate": 2})
    # Ranks agree on what a function makes of samples.
    _samples_and_rate(engine, {"chunks": 2}, torch.utils.data.default_collate)
    return rank(), None


def _samples_and_rate(engine: str, way: dict[str, int], collate: Any = None) -> None:
    from trainings import fit, options_of

    from hvd_trainer import accuracy

    samples = [
        (sample, number % 2) for number, sample in enumerate(torch.rand(160 * way.get("accumulate", 1), 4096))
    ]
    gpu, counts = torch.device(kind(), rank()), []
    for steps in (10, 20):
        waits: Counter[str] = Counter()
        controls().on_host_wait(partial(count_wait, waits))
        lr, model = torch.tensor(0.5, device=gpu), torch.nn.Sequential(torch.nn.Linear(4096, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=lr, capturable=True)
        rates: list[Any] = []
        optimizer.register_step_pre_hook(lambda *_, lr=lr, seen=rates: seen.append(lr.clone()))
        options = options_of(
            engine, log_every=999, max_steps=steps, batch_size=8, epochs=2, warmup_epochs=1.0, workers=0, **way
        )
        how = {"metrics": {"accuracy": accuracy}, "weight": lambda batch: batch[1].sum(), "collate": collate}
        fit(options, model, samples, optimizer=optimizer, **how)
        counts.append(waits)
        warm = [0.5 * (step + 1) / 21 for step in range(steps)]
        assert torch.allclose(torch.stack(rates).cpu(), torch.tensor(warm)), "not the rates of a warm-up"
        assert optimizer.param_groups[0]["lr"] is lr, "the tensor has been replaced"
        assert lr.item() == 0.5, "the user's rate has changed"
    assert not (more := counts[1] - counts[0]), f"{way}: the host waits in each step: {dict(more)}"


class Noting(torch.nn.Linear):
    """Notes in which type its products come out."""

    def __init__(self, types: set[Any]) -> None:
        super().__init__(6, 6)
        self.types = types

    def forward(self, inputs: Any) -> Any:
        product = super().forward(inputs)
        self.types.add(product.dtype)
        return product


def precisions(engine: str) -> tuple[int, None]:
    """Products are computed in the type that is asked for; of fp16 the norm is clipped as of fp32."""
    from trainings import fit, options_of, signs

    smallest: dict[str, float] = {}
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        for way in ({}, {"chunks": 2}):
            types: set[Any] = set()
            torch.manual_seed(0)
            model = torch.nn.Sequential(Noting(types), torch.nn.Linear(6, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            norms: list[Any] = []  # a step in which fp16 overflows updates nothing
            optimizer.register_step_pre_hook(lambda it, *_, seen=norms: seen.append(norm_of_gradient(it)))
            options = options_of(engine, precision=precision, max_steps=5, max_norm=0.01, batch_size=8, **way)
            fit(options, model, signs(64), signs(64), optimizer=optimizer)
            assert types == {dtype}, f"{precision} {way}: products of {types}"
            assert norms, f"{precision} {way}: no step was made"
            assert all(abs(float(norm) - 0.01) < 1e-3 for norm in norms), f"{precision} {way}: clipped to {norms}"
            norms.clear()
            options = options_of(engine, precision=precision, max_steps=1, batch_size=8, **way)
            fit(options, model, signs(64), signs(64), optimizer=optimizer, loss=small_loss)
            small = smallest.setdefault(str(way), float(norms[0]))
            assert 0.5 < float(norms[0]) / small < 2, f"{precision} {way}: {norms[0]} of a gradient of {small}"
    return rank(), None


def small_loss(outputs: Any, targets: Any) -> Any:
    """Have a gradient that is 0 in fp16 unless it is scaled."""
    return torch.nn.functional.cross_entropy(outputs.float(), targets) * 1e-7


def norm_of_gradient(optimizer: Any) -> Any:
    """Return the norm of what an optimizer is about to subtract."""
    return torch.nn.utils.get_total_norm([p.grad for group in optimizer.param_groups for p in group["params"]])


class Overflowing(torch.nn.Linear):
    """Has a gradient that is infinite, and passes on one that is not."""

    def forward(self, inputs: Any) -> Any:
        bias = self.bias.clone()
        bias.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
        return torch.nn.functional.linear(inputs, self.weight, bias)


def overflow_of_one_stage(engine: str) -> tuple[int, None]:
    """If gradients overflow on one stage, all stages skip the step."""
    from trainings import fit, options_of, signs

    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6), Overflowing(6, 2))
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=1.0), []
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    options = options_of(engine, precision="fp16", max_steps=8, batch_size=8, stages=2, balance="2,1")
    fit(options, model, signs(64), optimizer=optimizer)
    assert not steps, "this stage has updated its parameters"
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
    from hvd_trainer.parallel.stage_module import MicroBatchRNG, StageModule
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
    # Those of a block depend on the micro-batch alone, whatever was drawn before.
    stage = StageModule([(0, torch.nn.Dropout(0.5))], device=own)
    stage.rng_of = partial(MicroBatchRNG, 1, 2, 3, 4)
    ones = torch.ones(100, device=own)
    assert torch.equal(stage(ones), stage(ones)), "a block's dropout is another one the second time"
    assert torch.equal(generator.get_state(), state_of_first)
    return 0, None


class Drawing(torch.nn.Module):
    """Notes what it draws on its device, as a part of a model or as a transform, and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Any] = []

    def forward(self, inputs: Any) -> Any:
        self.drawn.append(torch.rand(1, device=inputs.device))
        return inputs

    def numbers(self) -> list[float]:
        return [float(number) for number in self.drawn]


def seed_device(number: int) -> None:
    torch.get_device_module(kind()).manual_seed(number)


def drawn_numbers(engine: str) -> tuple[int, None]:
    """Transforms and virtual ranks draw the same numbers after any others, and transforms change no others."""
    from trainings import fit, options_of, signs

    from hvd_trainer import TensorData

    def draw(*, disturbs: bool = False, transforms: bool = True, **way: Any) -> tuple[list[float], list[float]]:
        of_model, of_samples, data = Drawing(), Drawing(), signs(64)
        model = torch.nn.Sequential(torch.nn.Linear(6, 2), of_model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if disturbs:
            optimizer.register_step_pre_hook(lambda *_: seed_device(len(of_model.drawn)))
        data = TensorData(data.inputs, data.targets, of_samples if transforms else None)
        fit(options_of(engine, max_steps=4, batch_size=4, **way), model, data, optimizer=optimizer)
        return of_model.numbers(), of_samples.numbers()

    of_model, of_samples = draw()
    assert of_samples == draw(disturbs=True)[1], "samples are other ones after other numbers were drawn"
    assert of_model == draw(transforms=False)[0], "a transform changes what the model draws"
    virtual = {"reproducible": 2}
    assert draw(**virtual)[0] == draw(disturbs=True, **virtual)[0], "a virtual rank draws what is left by another"
    return rank(), None


def peak(
    text: str, limit: float, over: str, of_large: float | None = None, at_start: float = 1.5
) -> tuple[int, float]:
    """The peak of memory is at most so many times that of another way to train; return it, in MB.

    Args:
        of_large: the limit for a large model.
        at_start: that of the peak before the first forward pass: a model that is cut need not fit on a device.
    """
    device = torch.device(kind(), rank() % torch.accelerator.device_count())
    size, limit = (SMALL, limit) if kind() == "pretend" else (LARGE, of_large or limit)
    peaks: list[list[int]] = []
    torch.ones(1, device=device)  # CUDA counts from its first context on
    for way in (over, text):
        before = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        seen: list[int] = []
        hook = torch.nn.modules.module.register_module_forward_pre_hook(
            lambda *_, seen=seen: seen.append(torch.accelerator.max_memory_allocated(device))
        )
        train("imdb", f"{TEXTS} {size} --optimizer sgd {way}")
        hook.remove()
        peaks.append([peak - before for peak in (seen[0], torch.accelerator.max_memory_allocated(device))])
    for own, others, times in zip(peaks[1], peaks[0], (at_start, limit), strict=True):
        assert own <= times * others, f"{own} bytes with {text}, {others} with {over}"
    return rank(), peaks[1][-1] / 2**20
