"""How fast: saving, a step beside a raw loop's, MNIST to 99 %, ResNet-50, CUDA graphs, batch norm over ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from gpu import table
from gpu.bench import HERE, IMDB, Bench, Check, FailedError, figures_in, records
from gpu.memory import sizes
from gpu.table import needs_in

OVERHEAD_US = 50.0
"""More than a raw loop a step may cost."""
OF_RAW = 0.98
"""Of the raw loop's images a second."""
OF_PYTORCH = 1.3
"""Of the time that PyTorch's batch norm over ranks takes."""


def speed(bench: Bench) -> Iterable[Check]:
    yield Check("a save stalls for a copy's time", check_stall_of_save)
    for model in ("quick", "mlp"):
        for engine in table.ENGINES:
            text = f"--backend {engine}"
            yield Check(f"step of {model}, {engine}", check_overhead, (model, text), needs_in(text))
    yield Check("batch norm over two ranks", check_batch_norm)
    yield Check("MNIST to 99 %", check_target, ("",), ("mnist",))
    for name, row in table.SPEED.items():
        text = f"--backend single {row}"
        yield Check(f"step of quick: {name}", check_overhead, ("quick", text), needs_in(text))
        yield Check(f"MNIST to 99 %: {name}", check_target, (text,), ("mnist", *needs_in(text)))
    for name, text in table.RESNET.items():
        yield Check(f"ResNet-50: {name}", check_resnet, (text,), ("torchvision", *needs_in(text)))


def measure(bench: Bench, *words: str) -> dict[str, float]:
    """Run speed_job.py; return its figures."""
    return figures_in(bench.ok(str(HERE / "speed_job.py"), *words, "--on", bench.device, limit_s=120).output)


def block(bench: Bench, steps: int) -> tuple[str, str]:
    return "--block", str(steps if bench.on_gpu else 5)


def check_overhead(bench: Bench, model: str, text: str) -> dict[str, Any]:
    common = ("steps", "--model", model, *block(bench, 200))
    raw = measure(bench, *common, "--loop", "raw")
    ours = measure(bench, *common, "--loop", "trainer", *text.split())
    more = ours["us"] - raw["us"]
    figures = {f"{name}, {who}": its[name] for name in raw for who, its in (("raw", raw), ("ours", ours))}
    bench.judge(more <= OVERHEAD_US, f"{more:.0f} us more than a raw loop: {figures}")
    return figures | {"overhead, us": round(more, 1)}


def check_target(bench: Bench, text: str) -> dict[str, Any]:
    seeds = ("--seeds", "5" if bench.on_gpu else "1")
    gpus = ("--gpus",) if bench.on_gpu else ()
    job = ("-m", "benchmarks.to_target", "--data-dir", str(bench.data_dir), *seeds, *gpus)
    output = bench.ok(*job, "--", "--device", bench.device, *text.split(), limit_s=120).output
    found = re.findall(r"^\| (seconds after the first step|first step, s) \| ([\d.e-]+)", output, re.MULTILINE)
    reached = re.search(r"^(\d+) of (\d+) seeds reached", output, re.MULTILINE)
    if reached is None or reached[1] != reached[2]:
        raise FailedError(reached[0] if reached else "no table")
    return {name: float(value) for name, value in found} | {"seeds": int(reached[2])}


def check_resnet(bench: Bench, text: str) -> dict[str, Any]:
    common = ("steps", "--model", "resnet", *block(bench, 10), "--precision", "bf16", *text.split())
    batch = 256 if bench.on_gpu else 4
    raw = batch * 1e6 / measure(bench, *common, "--loop", "raw")["us"]
    ours = batch * 1e6 / measure(bench, *common, "--loop", "trainer", "--backend", "single")["us"]
    bench.judge(ours >= OF_RAW * raw, f"{ours:.0f} images/s, a raw loop {raw:.0f}")
    return {"images/s, raw": round(raw), "images/s, ours": round(ours), "ours of raw": round(ours / raw, 3)}


def check_batch_norm(bench: Bench) -> dict[str, Any]:
    job = (str(HERE / "speed_job.py"), "norm", "--backend", "ddp", "--device", bench.device)
    figures = figures_in(bench.two_ranks(*job))
    if len(figures) == 2:
        ours, theirs = figures.values()
        bench.judge(
            ours <= OF_PYTORCH * theirs, f"ours takes {ours / theirs:.1f} times as long as PyTorch's: {figures}"
        )
    return figures


def check_stall_of_save(bench: Bench) -> dict[str, Any]:
    """Of the first save, which takes the memory, and of a later one; weights and Adam's state of 3 GB on a GPU."""
    stalls = {}
    words, parameters = sizes(bench)
    for saves in (1, 4):
        log_dir = bench.folder("save")
        job = (*IMDB, *words, "--backend", "single", "--device", bench.device, "--log-dir", log_dir)
        every = ("--save-every-steps", "5", "--save-every-epochs", "None", "--keep-best", "None")
        bench.ok(*job, *every, "--max-steps", str(5 * saves), limit_s=120)
        stalls[saves] = records(log_dir, "end")[0]["save_stall_s"]
    later = (stalls[4] - stalls[1]) / 3
    copy = measure(bench, "copy", "--bytes", str(12 * parameters))["us"] / 1e6
    bench.judge(later < 2 * copy + 0.01, f"a later save stalls {later:.3f} s; one copy takes {copy:.3f} s")
    return {"first, s": round(stalls[1], 3), "later, s": round(later, 3), "one copy, s": round(copy, 3)}
