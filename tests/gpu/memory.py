"""The most memory that tensors have taken on a GPU: in reproducible mode, after a resume, in shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gpu.bench import IMDB, Bench, Check, records

MB = 2**20
MOST_GRADIENTS = 9
"""The limit for two ranks in reproducible mode, in sizes of all gradients.

Weights 1, this rank's gradients 1, both ranks' 2 and their sum 1 are 5. If what an exchange takes (3) were kept
through four exchanges, it would be 14 with weights and sum. 9 leaves room for activations.
"""


def memory(bench: Bench) -> Iterable[Check]:
    yield Check("reproducible mode lets tensors go", check_reproducible)
    yield Check("a resume takes no more than a start", check_resume)
    yield Check("--shard full never has the whole model on a GPU", check_shards)


def sizes(bench: Bench) -> tuple[list[str], int]:
    """Return a model's options, and how many parameters it has; on a GPU, 253 million."""
    layers, width = (20, 1024) if bench.on_gpu else (2, 64)
    words = ["--layers", str(layers), "--d-model", str(width), "--d-hid", str(4 * width), "--heads", "4"]
    words += ["--sequence-length", "32", "--vocabulary", "1000", "--batch-size", "4", "--dropout", "0"]
    words += ["--synthetic-reviews", "400"]  # a test of thousands would gather the shards hundreds of times
    return words, layers * (12 * width * width + 13 * width) + 1032 * width


def peak_mb(bench: Bench, log_dir: str, *options: str) -> float:
    """Return the peak of the rank that took most, of two."""
    words, _ = sizes(bench)
    device = ("--backend", "ddp", "--device", bench.device, "--optimizer", "sgd", "--momentum", "0")
    bench.two_ranks(*IMDB, *words, *device, "--log-dir", log_dir, *options, limit_s=120)
    return float(records(log_dir, "end")[-1]["peak_memory_mb"])


def check_reproducible(bench: Bench) -> dict[str, Any]:
    gradients = 4 * sizes(bench)[1] / MB
    peak = peak_mb(bench, bench.folder("memory"), "--reproducible", "2", "--max-steps", "6")
    times = peak / gradients
    bench.judge(times < MOST_GRADIENTS, f"the peak is {times:.1f} times the gradients, not {MOST_GRADIENTS}")
    return {"peak, MB": peak, "times the gradients": round(times, 1)}


def check_resume(bench: Bench) -> dict[str, Any]:
    log_dir = bench.folder("resume")
    start = peak_mb(bench, log_dir, "--max-steps", "3", "--save-every-steps", "3")
    again = peak_mb(bench, log_dir, "--max-steps", "6", "--resume", "auto")
    bench.judge(again < 1.1 * start, f"{again:.0f} MB after a resume, {start:.0f} MB after a start")
    return {"start, MB": start, "resume, MB": again}


def check_shards(bench: Bench) -> dict[str, Any]:
    whole = peak_mb(bench, bench.folder("whole"), "--max-steps", "3")
    cut = peak_mb(bench, bench.folder("cut"), "--max-steps", "3", "--shard", "full")
    # Weights and gradients of a half each, and one block's of both: with the whole at first it is 0.75 and more.
    bench.judge(cut < 0.7 * whole, f"{cut:.0f} MB with --shard full, {whole:.0f} MB without")
    return {"whole, MB": whole, "--shard full, MB": cut}
