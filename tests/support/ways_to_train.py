"""Ways to train that are tried on a device, pretended (tests/pretend) or real (tests/gpu): tables of options."""

from __future__ import annotations

ENGINES = ("ddp", "horovod")

DIGITS = "--dataset digits --repeat 1 --batch-size 32 --max-steps 5"
TEXTS = (
    "--dataset synthetic --synthetic-reviews 100 --layers 2 --d-model 16 --d-hid 32 --heads 2 --sequence-length 8 "
    "--vocabulary 300 --batch-size 8 --max-steps 4"
)

ANY_NUMBER_OF_RANKS = "--dataset digits --repeat 1 --reproducible 4 --batch-size 32 --max-steps 20"
"""All of these train the same bits, on any number of ranks."""

PRECISIONS = ("fp32", "bf16", "fp16")
ONE_RANK = {
    "loader processes": "--backend ddp --workers 2",
    "CUDA graphs": "--backend single --compile reduce-overhead",
    "TF32, channels last": "--backend single --tf32 --channels-last",
}

TWO_RANKS = {
    "plain": "",
    "fp16 on the wire": "--compression fp16",
    "bf16 on the wire": "--compression bf16",
    "PowerSGD": "--compression powersgd",
    "fp16": "--precision fp16",
    "bf16": "--precision bf16",
    "batch norm over all ranks": "--sync-batch-norm --model quick",
    "accumulated": "--accumulate 2",
    "optimizer sharded": "--shard optimizer",
    "clipped": "--max-norm 1",
    "evaluated inside an epoch": "--evaluate-every-steps 2",
    "uneven last batches": "--batch-size 500 --max-steps 3",
    "loader processes": "--workers 1 --max-steps 3",
    "chunks": "--chunks 2 --batch-size 32",
    "reproducible": "--reproducible 4 --batch-size 8",
    "compiled": "--compile default",
}
TWO_RANKS_OF_TEXTS = (("horovod", "--stages 2"), ("ddp", "--stages 2"), ("ddp", "--shard full"))
"""Engines, each with further options."""

NO_WAITS = {
    "plain": "--batch-size 32",
    "fp16": "--batch-size 32 --precision fp16",
    "chunks": "--batch-size 32 --chunks 4",
    "reproducible": "--batch-size 8 --reproducible 4",
    "loader processes": "--batch-size 32 --workers 2",
    "clipped, accumulated": "--batch-size 16 --accumulate 2 --max-norm 1",
    "clipped, chunks": "--batch-size 32 --chunks 2 --max-norm 1",
}
"""All of 32 samples a step, so that 20 steps are within an epoch of the digits."""

FAULTS = {
    "is killed": (1, 0),
    "raises": (1,),
    "loops": (1,),
    "is stopped": (1,),
    "asserts on the device": (0, 1),
    "takes too much memory": (1,),
}
"""Faults of faulty_job.py, each with the ranks that fail."""


def needs_cuda(text: str) -> bool:
    """Return whether a row is for CUDA alone: what it compiles, or what only NVIDIA's matrix units do."""
    return not {"--compile", "--tf32"}.isdisjoint(text.split())


def two_ranks(engine: str) -> dict[str, str]:
    """Return the rows of `TWO_RANKS` that an engine has."""
    return {name: text for name, text in TWO_RANKS.items() if engine == "ddp" or "powersgd" not in text}
