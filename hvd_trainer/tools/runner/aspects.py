"""List the properties of the work of a run that must be equal where runs are compared."""

from __future__ import annotations

from typing import NamedTuple


class Aspect(NamedTuple):
    """A property of the work that must be equal."""

    name: str
    text: str
    across: bool = True
    """also between different numbers of ranks"""
    advice: str = ""
    """a line of a script, or an option, that makes it equal"""


ASPECTS = (
    Aspect("train_data", "data set"),
    Aspect("train_samples", "samples per epoch"),
    Aspect("test_data", "test set"),
    Aspect("test_samples", "test samples"),
    Aspect("steps", "optimizer steps", across=False, advice="compare --steps N, which ends each run"),
    Aspect("samples", "samples", across=False, advice="DataLoader(..., sampler=DistributedSampler(dataset))"),
    Aspect("global_batch_size", "global batch", across=False),
    Aspect("passes", "passes per step", across=False),
    Aspect("rates", "learning rate", across=False),
    Aspect("precision", "precision"),
    Aspect("tf32", "TF32"),
    Aspect("channels_last", "channels last"),
    Aspect("cudnn_benchmark", "cuDNN's benchmark"),
    Aspect("capture_step", "captured step"),
    Aspect("skipped_steps", "skipped steps", across=False),
    Aspect("model", "model"),
    Aspect("parameters", "parameters"),
    Aspect("optimizer", "optimizer"),
    Aspect("device", "device"),
    Aspect("threads", "CPU threads per rank"),
)
