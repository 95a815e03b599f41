"""Format the lines for people: the start-up summary, one line per epoch, and the last line."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hvd_trainer.utils import accelerator
from hvd_trainer.utils.text import plural

if TYPE_CHECKING:
    from hvd_trainer.training.trainer import Trainer


KERNELS = {
    "tf32": "TF32",
    "channels_last": "channels last",
    "cudnn_benchmark": "cuDNN's quickest",
    "capture_step": "steps captured as a graph",
}
"""Options on how a device computes, with what is said of them."""


def startup_summary(trainer: Trainer) -> str:
    """Return the lines that show the derived arithmetic of a run, so that a wrong set-up is seen at once."""
    backend, plan, options = trainer.backend, trainer.plan, trainer.options
    world, train = backend.world, options.train
    is_host = accelerator.is_host(backend.device)
    threads = f", {plural(torch.get_num_threads(), 'thread')} each" if is_host else ""
    device = _device(trainer)
    unused = accelerator.unsupported() if is_host else None
    if unused is not None and options.engine.device == "auto":
        device += f" (ranks cannot train on the {unused} device of this machine)"
    factor = plan.lr_factor(train.lr_scaling)
    scaled = f" (scaled: {train.lr_scaling}, x {factor:g})" if train.lr_scaling != "none" else ", not scaled"
    steps = "an unknown number of" if trainer.steps_per_epoch is None else f"{trainer.steps_per_epoch:,}"
    parts = plural(plan.size, "virtual rank" if train.reproducible else "rank")
    if plan.size < world.size:
        parts = plural(plan.size, "copy of the model", "copies of the model")
    parameters = sum(p.numel() for p in trainer.model.parameters())
    lines = {
        "backend": f"{backend.name}: {backend.version}",
        "world": f"{plural(world.size, 'rank')} on {plural(world.num_nodes, 'node')}, started by {world.launcher}"
        f"; {device}{threads}",
        "batch": f"{plan.batch_size} x {parts} x {plural(plan.accumulate, 'pass', 'passes')}"
        f" = {plan.global_batch_size} per step, {steps} {'step' if steps == '1' else 'steps'} per epoch",
        "rate": f"{type(trainer.optimizer).__name__}, lr {trainer.rate.full:g}{scaled}"
        + (f", warm-up over {plural(train.warmup_epochs, 'epoch')}" if train.warmup_epochs else "")
        + (f", decay to 0 ({train.lr_decay})" if train.lr_decay != "none" else "")
        + (f", gradient norm at most {train.max_norm:g}" if train.max_norm else ""),
        "numbers": f"{train.precision}, seed {train.seed}"
        + (f", gradients sent as {options.engine.compression}" if options.engine.compression != "none" else "")
        + "".join(f", {words}" for name, words in KERNELS.items() if getattr(train, name))
        + (", compiled" if train.compile else "")
        + (f" ({train.compile_mode})" if train.compile_mode != "default" else ""),
        "data": _data(trainer),
        "model": f"{type(trainer.model).__name__}, {parameters:,} parameters",
        "log": options.log.log_dir or "nothing is kept; to keep metrics and weights add --log-dir DIR",
    }
    lines |= trainer.layout.lines()
    if options.measure.leave_out:
        lines["measure"] = (
            f"without {' and '.join(options.measure.leave_out)}: nothing is saved, for it is of no use"
        )
    if options.log.verbose:
        lines["hosts"] = ", ".join(f"{i}: {peer.host}" for i, peer in enumerate(backend.peers))
        lines["torch"] = f"{torch.__version__}, {accelerator.built_for()}"
    return "\n".join(f"{name:8} {text}" for name, text in lines.items())


def facts(trainer: Trainer) -> dict[str, Any]:
    """Return the set-up for programs, as run.json has it."""
    backend, plan, world = trainer.backend, trainer.plan, trainer.world
    train, test = trainer.train_loader, trainer.test_loader
    parameters = list(trainer.model.parameters())
    return {
        "backend": backend.name,
        "engine": backend.version,
        "launcher": world.launcher,
        "world_size": world.size,
        "num_nodes": world.num_nodes,
        "device": "cpu" if accelerator.is_host(backend.device) else _device(trainer),
        "threads": torch.get_num_threads(),
        "batch_size": plan.batch_size,
        "passes": plan.passes,
        "global_batch_size": plan.global_batch_size,
        "steps_per_epoch": trainer.steps_per_epoch,
        "optimizer": type(trainer.optimizer).__name__,
        "lr": trainer.rate.full,
        "precision": trainer.options.train.precision,
        **{name: getattr(trainer.options.train, name) for name in KERNELS},
        "compression": trainer.options.engine.compression,
        "bucket_mb": trainer.options.engine.bucket_mb,
        "in_memory": train.in_memory,
        "workers": train.num_workers,
        "train_data": train.name,
        "train_samples": train.num_samples,
        "test_data": None if test is None else test.name,
        "test_samples": None if test is None else test.num_samples,
        "model": type(trainer.model).__name__,
        "parameters": sum(p.numel() for p in parameters),
        "parameter_tensors": len(parameters),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def epoch_line(record: dict[str, Any], epochs: int) -> str:
    """Format an epoch's averages over all samples of all ranks."""
    parts = [f"epoch {record['epoch']}/{epochs}"]
    for split in ("train", "test"):
        figures = {k.partition("_")[2]: v for k, v in record.items() if k.startswith(f"{split}_")}
        if figures:
            parts.append(" ".join([split, *(_figure(name, value) for name, value in figures.items())]))
    parts.append(f"{record['samples_per_s']:,.0f} samples/s")
    if record["skipped_steps"]:
        parts.append(f"{plural(record['skipped_steps'], 'step')} skipped")
    return "  ".join(parts)


def summary_line(record: dict[str, Any], seconds: float, folder: Path | None) -> str:
    """Format the last line of a run."""
    if not record:
        return "done: nothing left to train"
    result = f", test accuracy {record['test_accuracy']:.2%}" if "test_accuracy" in record else ""
    kept = f"; weights and metrics in {folder}" if folder else ""
    return f"done: {plural(record['step'], 'step')} in {seconds:.1f} s{result}{kept}"


def _device(trainer: Trainer) -> str:
    """Return `CPU`, or the GPU's name."""
    device = trainer.device
    return accelerator.name(device)


def _data(trainer: Trainer) -> str:
    """Format the data: `MNIST: 60,000 samples to train on, 10,000 to test on`."""
    train, test = trainer.train_loader, trainer.test_loader
    size = "a stream of samples" if train.num_samples is None else plural(train.num_samples, "sample")
    text = f"{train.name}: {size} to train on"
    if test is None:
        return f"{text}, none to test on{_whereabouts(trainer)}"
    name = "" if test.name == train.name else f"{test.name}: "
    size = "a stream" if test.num_samples is None else f"{test.num_samples:,}"
    return f"{text}, {name}{size} to test on{_whereabouts(trainer)}"


def _whereabouts(trainer: Trainer) -> str:
    """Return which data an accelerator's memory has no room for; on the CPU nothing."""
    if accelerator.is_host(trainer.device):
        return ""
    loaders = {"to train on": trainer.train_loader, "to test on": trainer.test_loader}
    sent = " and ".join(name for name, loader in loaders.items() if loader is not None and loader.is_sent)
    return f"; those {sent} are sent from the host" if sent else "; all in the GPU's memory"


def _figure(name: str, value: float) -> str:
    return f"{name} {value:.2%}" if name == "accuracy" else f"{name} {value:.5f}"
