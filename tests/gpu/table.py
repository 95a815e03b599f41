"""Which options are tried: data, to be corrected where options come or go. One that is missing is said so."""

from __future__ import annotations

ENGINES = ("single", "ddp", "horovod")
PRECISIONS = ("fp32", "bf16", "fp16")

ONE_RANK = {
    "compiled into CUDA graphs": "--backend single --compile --compile-mode reduce-overhead",
    "TF32, channels last": "--backend single --tf32 --channels-last",
    "a GPU and the CPU": "--backend single --devices {device}:0 cpu --chunks 2",
    "loader processes": "--backend ddp --workers 2",
}

NO_WAITS = {
    "plain": "--batch-size 32",
    "fp16": "--batch-size 32 --precision fp16",
    "chunks": "--batch-size 32 --chunks 4",
    "reproducible": "--batch-size 8 --reproducible 4",
    "loader processes": "--batch-size 32 --workers 2",
    "clipped, accumulated": "--batch-size 16 --accumulate 2 --max-norm 1",
}
"""All of 32 samples a step, so that 30 steps are within an epoch of the digits."""

GLOO = {
    "plain": "",
    "accumulated": "--accumulate 2",
    "bf16": "--precision bf16",
}

NCCL = {
    "plain": "",
    "fp16 on the wire": "--compression fp16",
    "fp16": "--precision fp16",
    "bf16": "--precision bf16",
    "batch norm over all ranks": "--sync-batch-norm --model quick",
    "accumulated": "--accumulate 2",
    "optimizer sharded": "--shard optimizer",
    "clipped": "--max-norm 1",
    "bf16 on the wire": "--compression bf16",
    "compiled": "--compile",
}
NCCL_OF_ONE: dict[str, dict[str, str]] = {
    "horovod": {},
    "ddp": {"PowerSGD": "--compression powersgd"},
}
PRETEND = {
    "uneven last batches": "--batch-size 500 --max-steps 3",
    "loader processes": "--workers 1 --max-steps 3",
    "chunks": "--chunks 2 --batch-size 32",
    "reproducible": "--reproducible 4 --batch-size 8",
}
"""Beside those of NCCL, where tests/pretend trains."""
TEXTS = {
    "two stages": "--backend horovod --stages 2 --max-steps 5",
    "two stages on ddp": "--backend ddp --stages 2 --max-steps 5",
    "all sharded": "--backend ddp --shard full --max-steps 5",
}

SCRIPTS = ("plain_ddp", "plain_horovod")
"""Of examples/mnist, written by hand for one engine each; `run` puts both on either."""

FAULTS = {
    "is killed": (1, 0),
    "raises": (1,),
    "loops": (1,),
    "is stopped": (1,),
    "asserts on the device": (0, 1),
    "takes too much memory": (1,),
}
"""Faults of tests/support/faulty_job.py, each with the ranks that fail."""

SPEED = {
    "compiled into CUDA graphs": "--compile --compile-mode reduce-overhead",
}
"""Other ways to train MNIST to 99 %, and to take steps of `quick`."""

RESNET = {
    "plain": "",
    "channels last": "--channels-last",
    "channels last, compiled": "--channels-last --compile",
}
"""Each beside a raw loop with the same."""


GPUS_ONLY = {"--tf32"}


def needs_in(text: str) -> tuple[str, ...]:
    """Return what a row of these tables needs, as in `Bench.lacks`: its options, Horovod, a GPU for some."""
    words = text.split()
    options = tuple(word for word in words if word.startswith("--"))
    return (*options, *(["horovod"] if "horovod" in words else []), *(["gpu"] if GPUS_ONLY & {*options} else []))
