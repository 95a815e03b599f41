"""Format the lines that a person reads: the set-up, each epoch, the result."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hvd_trainer.config.options import ParallelOptions, TrainerOptions
from hvd_trainer.config.parser import are_typed
from hvd_trainer.launch.engine import usual_engine
from hvd_trainer.observe.callback import RunView
from hvd_trainer.observe.log_handler import in_notebook
from hvd_trainer.utils import accelerator
from hvd_trainer.utils.process import cpu_ids
from hvd_trainer.utils.text import plural

KERNELS = {"tf32": "TF32", "channels_last": "channels last"}
"""Options on how a device computes, and the words for them in the start-up summary."""


def startup_summary(run: RunView, layout: Mapping[str, str]) -> str:
    """Return the lines that show what was set up, so that a mistake is seen at once.

    Args:
        layout: lines on models in parts, by their names.
    """
    backend, options = run.backend, run.options
    parameters = sum(p.numel() for p in run.model.parameters())
    lines = {
        "backend": f"{backend.name}: {backend.version}{_why_engine(run)}",
        "world": _world(run),
        "batch": _batch(run),
        "rate": _rate(run),
        "numbers": _numbers(options),
        "data": _data(run),
        "model": f"{type(run.model).__name__}, {parameters:,} parameters",
        "log": options.log.log_dir or "nothing is kept; to keep metrics and weights add --log-dir DIR",
        **layout,
    }
    if command := _launch_command(run):
        lines["launch"] = f"one rank; with one for each {command}"
    return "\n".join(f"{name:8} {text}" for name, text in lines.items())


def _why_engine(run: RunView) -> str:
    """Return `, the default under horovodrun`; nothing for an engine that has to be asked for."""
    engine, why = usual_engine(run.world.launcher)
    return f", {why}" if run.backend.name == engine else ""


def _world(run: RunView) -> str:
    """Return `2 ranks on 1 node, started by torchrun; CPU, 1 thread each`."""
    world, device = run.world, accelerator.name(run.device)
    is_host = accelerator.is_host(run.device)
    unused = accelerator.unsupported() if is_host else None
    if unused is not None and run.options.engine.device == "auto":
        device += f" (ranks cannot train on the {unused} device of this machine)"
    threads = f", {plural(torch.get_num_threads(), 'thread')} each" if is_host else ""
    ranks = f"{plural(world.size, 'rank')} on {plural(world.num_nodes, 'node')}"
    return f"{ranks}, started by {world.launcher}; {device}{threads}"


def _launch_command(run: RunView) -> str | None:
    """Return `core: horovodrun -np 2 python train.py` for a rank that plain `python` started alone."""
    launcher = {"horovod": "horovodrun -np {} python", "ddp": "torchrun --nproc-per-node {}"}.get(run.backend.name)
    is_host = accelerator.is_host(run.device)
    places = len(cpu_ids()) if is_host else accelerator.count(accelerator.kind())
    lone = run.world.launcher == "python" and run.options.parallel == ParallelOptions()
    if launcher is None or not lone or places < 2:
        return None
    if in_notebook():  # the process's own command is the kernel's
        return f"{'core' if is_host else 'GPU'}: hvd_trainer.run(function, num_processes={places})"
    return f"{'core' if is_host else 'GPU'}: {launcher.format(places)} {shlex.join(sys.orig_argv[1:])}"


def _batch(run: RunView) -> str:
    """Return `64 x 2 ranks x 1 pass = 128 per step, 469 steps per epoch`."""
    plan, steps = run.plan, "an unknown number of" if run.steps_per_epoch is None else f"{run.steps_per_epoch:,}"
    parts = plural(plan.size, "virtual rank" if run.options.train.reproducible else "rank")
    if plan.size < run.world.size:
        parts = plural(plan.size, "copy of the model", "copies of the model")
    passes = plural(plan.accumulate, "pass", "passes")
    per_epoch = f"{steps} {'step' if steps == '1' else 'steps'} per epoch"
    bound = "" if plan.whole in (None, plan.size * plan.batch_size) else "at most "
    return f"{bound}{plan.batch_size} x {parts} x {passes} = {plan.global_batch_size} per step, {per_epoch}"


def _rate(run: RunView) -> str:
    """Return `SGD, lr 0.02 (scaled: linear, x 2), warm-up over 1 epoch`."""
    train, factor = run.options.train, run.plan.lr_factor(run.options.train.lr_scaling)
    scaled = f" (scaled: {train.lr_scaling}, x {factor:g})" if train.lr_scaling != "none" else ", not scaled"
    return (
        f"{type(run.optimizer).__name__}, lr {run.rate.full:g}{scaled}"
        + (f", warm-up over {plural(train.warmup_epochs, 'epoch')}" if train.warmup_epochs else "")
        + (f", decay to 0 ({train.lr_decay})" if train.lr_decay != "none" else "")
        + (f", gradient norm at most {train.max_norm:g}" if train.max_norm else "")
    )


def _numbers(options: TrainerOptions) -> str:
    """Return `bf16, seed 1, gradients sent as fp16, compiled`."""
    train, compression = options.train, options.engine.compression
    return (
        f"{train.precision}, seed {train.seed}"
        + (f", gradients sent as {compression}" if compression != "none" else "")
        + "".join(f", {words}" for name, words in KERNELS.items() if getattr(train, name))
        + ("" if train.compile == "none" else f", compiled ({train.compile})")
    )


def facts(run: RunView) -> dict[str, Any]:
    """Return what was set up, for programs: the contents of run.json."""
    backend, plan, world = run.backend, run.plan, run.world
    train, val = run.train_loader, run.val_loader
    parameters = list(run.model.parameters())
    return {
        "backend": backend.name,
        "engine": backend.version,
        "launcher": world.launcher,
        "world_size": world.size,
        "num_nodes": world.num_nodes,
        "device": "cpu" if accelerator.is_host(backend.device) else accelerator.name(run.device),
        "threads": torch.get_num_threads(),
        "batch_size": plan.batch_size,
        "passes": plan.passes,
        "global_batch_size": plan.global_batch_size,
        "steps_per_epoch": run.steps_per_epoch,
        "optimizer": type(run.optimizer).__name__,
        "lr": run.rate.full,
        "precision": run.options.train.precision,
        **{name: getattr(run.options.train, name) for name in KERNELS},
        "compression": run.options.engine.compression,
        "bucket_mb": run.options.engine.bucket_mb,
        "in_memory": train.in_memory,
        "has_own_loader": train.has_own_loader,
        "workers": train.num_workers,
        "train_data": train.name,
        "train_samples": train.num_samples,
        "val_data": None if val is None else val.name,
        "val_samples": None if val is None else val.num_samples,
        "model": type(run.model).__name__,
        "parameters": sum(p.numel() for p in parameters),
        "reads_options": are_typed(run.options),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def epoch_line(record: dict[str, Any], epochs: int) -> str:
    """Return the line of an epoch: averages over all samples of all ranks."""
    parts = [f"epoch {record['epoch']}/{epochs}", *_figures_of_splits(record)]
    parts.append(f"{record['samples_per_s']:,.0f} samples/s")
    if record["skipped_steps"]:
        parts.append(f"{plural(record['skipped_steps'], 'step')} skipped")
    return "  ".join(parts)


def evaluation_line(record: dict[str, Any]) -> str:
    """Return the line of an evaluation inside of an epoch."""
    return "  ".join([f"step {record['step']:,}", *_figures_of_splits(record)])


def _figures_of_splits(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield `train loss 1.41307 accuracy 64.67%`, and the same of `val`."""
    for split in ("train", "val"):
        figures = {k.partition("_")[2]: v for k, v in record.items() if k.startswith(f"{split}_")}
        if figures:
            yield " ".join([split, *(_figure(name, value) for name, value in figures.items())])


def summary_line(record: dict[str, Any], seconds: float, folder: Path | None) -> str:
    """Return the last line of a run."""
    if not record:
        return "done: nothing left to train"
    result = f", val accuracy {record['val_accuracy']:.2%}" if "val_accuracy" in record else ""
    kept = f"; weights and metrics in {folder}" if folder else ""
    return f"done: {plural(record['step'], 'step')} in {seconds:.1f} s{result}{kept}"


def _data(run: RunView) -> str:
    """Return `MNIST: 60,000 samples to train on, 10,000 to validate on`."""
    train, val = run.train_loader, run.val_loader
    size = "a stream of samples" if train.num_samples is None else plural(train.num_samples, "sample")
    text = f"{train.name}: {size} to train on"
    if val is None:
        return f"{text}, none to validate on{_whereabouts(run)}"
    name = "" if val.name == train.name else f"{val.name}: "
    size = "a stream" if val.num_samples is None else f"{val.num_samples:,}"
    return f"{text}, {name}{size} to validate on{_whereabouts(run)}"


def _whereabouts(run: RunView) -> str:
    """Return which data an accelerator's memory has no room for; on the CPU nothing."""
    if accelerator.is_host(run.device):
        return ""
    loaders = {"to train on": run.train_loader, "to validate on": run.val_loader}
    sent = " and ".join(name for name, loader in loaders.items() if loader is not None and loader.is_sent)
    return f"; those {sent} are sent from the host" if sent else "; all in the GPU's memory"


def _figure(name: str, value: float) -> str:
    return f"{name} {value:.2%}" if name == "accuracy" else f"{name} {value:.5f}"
