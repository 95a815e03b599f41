"""The most memory that tensors have taken on a GPU: in reproducible mode, after a resume, in shards."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gpu.bench import IMDB, Bench, Check, FailedError, ended_well

MB = 2**20


def memory(bench: Bench) -> Iterable[Check]:
    yield Check("reproducible mode lets tensors go", "B6", reproducible)
    yield Check("a resume takes no more than a start", "B5", resume)
    if not bench.quick:
        yield Check("shards never were a whole", "B4", shards)


def sizes(bench: Bench) -> tuple[list[str], int]:
    """Return a model's options, and how many parameters it has; on a GPU, 253 million."""
    layers, width = (20, 1024) if bench.on_gpu else (2, 64)
    words = ["--layers", str(layers), "--d-model", str(width), "--d-hid", str(4 * width), "--heads", "4"]
    words += ["--sequence-length", "32", "--vocabulary", "1000", "--batch-size", "4", "--dropout", "0"]
    return words, layers * (12 * width * width + 13 * width) + 1032 * width


def peak_mb(bench: Bench, log_dir: str, *options: str) -> float:
    """Return the peak of the rank that took most, of two."""
    words, _ = sizes(bench)
    device = ("--backend", "ddp", "--device", bench.device, "--optimizer", "sgd", "--momentum", "0")
    job = (*IMDB, *words, *device, "--log-dir", log_dir)
    for its in bench.ranks(*job, *options, limit_s=120):
        ended_well(its)
    lines = [json.loads(line) for line in (Path(log_dir) / "metrics.jsonl").read_text().splitlines()]
    ends = [line["peak_memory_mb"] for line in lines if line["event"] == "end"]
    if not ends:
        raise FailedError("no record of the end")
    return float(ends[-1])


def reproducible(bench: Bench) -> dict[str, Any]:
    gradients = 4 * sizes(bench)[1] / MB
    peak = peak_mb(bench, bench.folder("memory"), "--reproducible", "2", "--max-steps", "6")
    times = peak / gradients
    bench.judge(times < 9, f"the peak is {times:.1f} times the gradients; 9 would do, 14 is with all kept")
    return {"peak, MB": peak, "times the gradients": round(times, 1)}


def resume(bench: Bench) -> dict[str, Any]:
    log_dir = bench.folder("resume")
    start = peak_mb(bench, log_dir, "--max-steps", "3", "--save-every-steps", "3")
    again = peak_mb(bench, log_dir, "--max-steps", "6", "--resume", "auto")
    bench.judge(again < 1.1 * start, f"{again:.0f} MB after a resume, {start:.0f} MB after a start")
    return {"start, MB": start, "resume, MB": again}


def shards(bench: Bench) -> dict[str, Any]:
    whole = peak_mb(bench, bench.folder("whole"), "--max-steps", "3")
    cut = peak_mb(bench, bench.folder("cut"), "--max-steps", "3", "--shard", "full")
    # Weights and gradients of a half each, and one block's of both: with the whole at first it is 0.75 and more.
    bench.judge(cut < 0.7 * whole, f"{cut:.0f} MB with --shard full, {whole:.0f} MB without")
    return {"whole, MB": whole, "--shard full, MB": cut}
