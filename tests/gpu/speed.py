"""How fast: a step beside a raw loop's, MNIST to 99 %, ResNet-50, CUDA graphs, saving, batch norm over ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gpu import table
from gpu.bench import HERE, IMDB, Bench, Check, FailedError, ended_well
from gpu.memory import sizes
from gpu.ranks import needs_of

OVERHEAD_US = 50.0
"""More than a raw loop a step may cost; the README has it."""
OF_RAW = 0.98
"""Of the raw loop's images a second."""


def speed(bench: Bench) -> Iterable[Check]:
    for model in ("quick", "mlp")[: 1 if bench.quick else None]:
        for engine in ("single", "ddp", "horovod")[: 1 if bench.quick else None]:
            yield Check(f"step of {model}, {engine}", "S1 S3 S4 S17", overhead(model, engine), needs_of(engine))
    if bench.quick:
        return
    yield Check("CUDA graph of a whole step, by hand", "", captured, ("gpu",))
    for name, text in table.SPEED.items():
        yield Check(
            f"step of quick: {name}",
            table.findings_in(text),
            overhead("quick", "single", text),
            table.needs_in(text),
        )
        yield Check(
            f"MNIST to 99 %: {name}", table.findings_in(text), to_target(text), ("mnist", *table.needs_in(text))
        )
    for name, text in table.RESNET.items():
        yield Check(
            f"ResNet-50: {name}", table.findings_in(text), resnet(text), ("torchvision", *table.needs_in(text))
        )
    yield Check("batch norm over two ranks", "S2", batch_norm)
    yield Check("stall of a save", "S12 W6", save_stall)
    yield Check("deterministic fill", "S13", fill)


def measured(bench: Bench, *words: str, limit_s: float = 120) -> dict[str, float]:
    """Run speed_job.py; return its figures."""
    ran = bench.ok(str(HERE / "speed_job.py"), *words, "--on", bench.device, limit_s=limit_s)
    return figures_in(ran.output)


def figures_in(output: str) -> dict[str, float]:
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if not lines:
        raise FailedError("it printed no figures")
    figures: dict[str, float] = json.loads(lines[-1])
    return figures


def block(bench: Bench, steps: int) -> tuple[str, str]:
    return "--block", str(steps if bench.on_gpu else 5)


def beside(raw: dict[str, float], ours: dict[str, float]) -> dict[str, Any]:
    """Return both loops' figures, by name."""
    return {f"{name}, {who}": its[name] for name in raw for who, its in (("raw", raw), ("ours", ours))}


def overhead(model: str, engine: str, text: str = "") -> Any:
    def prove(bench: Bench) -> dict[str, Any]:
        common = ("steps", "--model", model, *block(bench, 200))
        raw = measured(bench, *common, "--loop", "raw")
        ours = measured(bench, *common, "--loop", "trainer", "--backend", engine, *text.split())
        more = ours["us"] - raw["us"]
        bench.judge(more <= OVERHEAD_US, f"{more:.0f} us more than a raw loop: {beside(raw, ours)}")
        return beside(raw, ours) | {"overhead, us": round(more, 1)}

    return prove


def captured(bench: Bench) -> dict[str, Any]:
    return measured(bench, "graph")


def to_target(text: str) -> Any:
    def prove(bench: Bench) -> dict[str, Any]:
        seeds = ("--seeds", "5" if bench.on_gpu else "1")
        gpus = ("--gpus",) if bench.on_gpu else ()
        job = ("-m", "benchmarks.to_target", "--data-dir", str(bench.data_dir), *seeds, *gpus)
        output = bench.ok(*job, "--", "--device", bench.device, *text.split(), limit_s=120).output
        found = re.findall(r"^\| (seconds after the first step|first step, s) \| ([\d.e-]+)", output, re.MULTILINE)
        reached = re.search(r"^(\d+) of (\d+) seeds reached", output, re.MULTILINE)
        if reached is None or reached[1] != reached[2]:
            raise FailedError(reached[0] if reached else "no table")
        return {name: float(value) for name, value in found} | {"seeds": int(reached[2])}

    return prove


def resnet(text: str) -> Any:
    def prove(bench: Bench) -> dict[str, Any]:
        common = ("steps", "--model", "resnet", *block(bench, 10), "--precision", "bf16", *text.split())
        batch = 256 if bench.on_gpu else 4
        raw = batch * 1e6 / measured(bench, *common, "--loop", "raw")["us"]
        ours = batch * 1e6 / measured(bench, *common, "--loop", "trainer", "--backend", "single")["us"]
        bench.judge(ours >= OF_RAW * raw, f"{ours:.0f} images/s, a raw loop {raw:.0f}")
        return {"images/s, raw": round(raw), "images/s, ours": round(ours), "ours of raw": round(ours / raw, 3)}

    return prove


def batch_norm(bench: Bench) -> dict[str, Any]:
    ran = bench.ranks(str(HERE / "speed_job.py"), "norm", "--backend", "ddp", "--device", bench.device)
    for its in ran:
        ended_well(its)
    figures = figures_in(ran[0].output)
    if len(figures) == 2:
        ours, theirs = figures.values()
        bench.judge(ours <= 1.3 * theirs, f"ours takes {ours / theirs:.1f} times as long as PyTorch's: {figures}")
    return figures


def save_stall(bench: Bench) -> dict[str, Any]:
    """Of the first save, which takes the memory, and of a later one; weights and Adam's state of 3 GB on a GPU."""
    stalls = {}
    words, parameters = sizes(bench)
    for saves in (1, 4):
        log_dir = bench.folder("save")
        job = (*IMDB, *words, "--backend", "single", "--device", bench.device, "--log-dir", log_dir)
        every = ("--save-every-steps", "5", "--save-every-epochs", "None", "--keep-best", "None")
        ended_well(bench.run(*job, *every, "--max-steps", str(5 * saves), limit_s=120))
        lines = [json.loads(line) for line in (Path(log_dir) / "metrics.jsonl").read_text().splitlines()]
        stalls[saves] = next(line for line in lines if line["event"] == "end")["save_stall_s"]
    later = (stalls[4] - stalls[1]) / 3
    floor = 12 * parameters / 50e9
    bench.judge(later < 2 * floor + 0.01, f"a later save stalls {later:.3f} s; a copy at 50 GB/s is {floor:.3f} s")
    return {"first, s": round(stalls[1], 3), "later, s": round(later, 3), "copy at 50 GB/s, s": round(floor, 3)}


def fill(bench: Bench) -> dict[str, Any]:
    common = ("steps", "--loop", "trainer", "--backend", "single", "--reproducible", "4", *block(bench, 50))
    without = measured(bench, *common)["us"]
    return {"without, us": without, "with, us": measured(bench, *common, "--fill")["us"]}
