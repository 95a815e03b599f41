"""Training on one rank, and on two ranks of one GPU: by Gloo with tensors of the GPU, and by NCCL."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gpu import table
from gpu.bench import (
    DETERMINISTIC,
    HERE,
    IMDB,
    MNIST,
    REPRODUCIBLE,
    Bench,
    Check,
    FailedError,
    MissingError,
    digest,
)
from gpu.table import needs_in

STEPS = ("--max-steps", "20")
GLOO_DDP = "--backend ddp --transport gloo"


def accuracy(output: str) -> dict[str, Any]:
    """Return the test accuracy that a job has printed, in percent."""
    found = re.search(r"test accuracy ([\d.]+)%", output)
    return {"test accuracy, %": float(found[1])} if found else {}


def equal(found: dict[str, str], wanted: str) -> dict[str, Any]:
    """Return the digests as figures.

    Raises:
        FailedError: one of them is another one.
    """
    wrong = [f"{name}: {its}" for name, its in found.items() if its != wanted]
    if wrong:
        raise FailedError(f"other weights than one rank's {wanted}: {', '.join(wrong)}")
    return {"weights": wanted}


def one_rank(bench: Bench) -> Iterable[Check]:
    """The same bits twice; host waits; each engine in each precision; options; resume."""
    yield Check("the same bits twice", check_same_bits_twice)
    for name, text in table.NO_WAITS.items():
        yield Check(f"no waits: {name}", check_no_waits, (text,), needs_in(text))
    for engine in table.ENGINES:
        for precision in table.PRECISIONS:
            text = f"--backend {engine} --precision {precision} --epochs 2"
            yield Check(f"{engine} {precision}", train_one, (text,), needs_in(text))
    for name, row in table.ONE_RANK.items():
        text = f"{row.format(device=bench.device).replace('cpu:0', 'cpu')} --max-steps 20"
        yield Check(name, train_one, (text,), needs_in(text))
    yield Check("a resume gives the same bits", check_resume)
    # Of one rank it cannot see in which phase that is.
    yield Check("verify-resume", verify_resume, needs=("2 gpus",))
    yield Check("benchmarks' loop by hand", train_by_hand, needs=("mnist",))


def train_one(bench: Bench, text: str) -> dict[str, Any]:
    return accuracy(bench.ok(*MNIST, "--device", bench.device, *text.split(), limit_s=150).output)


def check_same_bits_twice(bench: Bench) -> dict[str, Any]:
    return equal({"one rank again": bench.train_reproducibly()}, bench.reference())


def check_no_waits(bench: Bench, text: str) -> dict[str, Any]:
    """Prove by counts at 10 and at 30 steps that no step between two lines of the log waits."""
    counts = []
    job = (str(HERE / "waits.py"), bench.device, "hvd_trainer.mnist", *MNIST[2:], "--device", bench.device)
    for steps in (10, 30):
        more = ("--backend", "single", "--log-every", "999", "--max-steps", str(steps), *text.split())
        counts.append(Counter(re.findall(r"^waits at (.*)$", bench.ok(*job, *more).output, re.MULTILINE)))
    new = counts[1] - counts[0]
    waits = (counts[1].total() - counts[0].total()) / 20
    figures = {"waits per step": waits, "most at": "; ".join(f"{at} x{n}" for at, n in new.most_common(4))}
    bench.judge(waits <= 0, f"{waits:g} waits per step: {figures['most at']}")
    return figures


def verify_resume(bench: Bench) -> None:
    job = (*MNIST, "--max-steps", "30", "--save-every-steps", "2", "--log-dir", "{folder}/log", "--resume", "auto")
    command = ("-m", "hvd_trainer", "verify-resume", "--kills", "2", "--backend", "ddp", "-np", "2", "--")
    bench.ok(*command, *job, limit_s=150)


def check_resume(bench: Bench) -> dict[str, Any]:
    log_dir = bench.folder("resumed")
    job = (*MNIST, *REPRODUCIBLE[:-2], "--backend", "single", "--device", bench.device, "--log-dir", log_dir)
    bench.ok(*job, "--max-steps", "10", "--save-every-steps", "10")
    bench.ok(*job, "--max-steps", "20", "--resume", "auto")
    return equal({"resumed after 10 of 20 steps": digest(log_dir)}, bench.reference())


def train_by_hand(bench: Bench) -> dict[str, Any]:
    job = ("-m", "benchmarks.ours.by_hand", "--data-dir", str(bench.data_dir), "--backend", "ddp")
    found = re.search(r"accuracy ([\d.]+)", bench.ok(*job).output)
    return {"accuracy": float(found[1])} if found else {}


# Two ranks on one GPU.


def gloo(bench: Bench) -> Iterable[Check]:
    """DDP over Gloo with tensors of the GPU, on one host."""
    yield Check("the bits of one rank", check_same_bits, (GLOO_DDP, False))
    for name, text in table.GLOO.items():
        yield Check(name, train_two, (MNIST, f"{GLOO_DDP} --max-steps 20 {text}", False), needs_in(text))
    yield Check("stages are refused", check_refusal_of_stages, needs=("gpu",))


def nccl(bench: Bench) -> Iterable[Check]:
    """Both engines over NCCL (on CPUs over Gloo), each rank on a host of its own name."""
    for engine in ("ddp", "horovod"):
        use = f"--backend {engine}"
        proof = ("-m", "hvd_trainer.jobs.all_reduce")
        yield Check(f"{engine}: sums", train_two, (proof, use), needs_in(use))
        yield Check(f"{engine}: the bits of one rank", check_same_bits, (use,), needs_in(use))
        for name, row in (table.NCCL | table.NCCL_OF_ONE[engine]).items():
            text = f"{use} --max-steps 20 {row}"
            yield Check(f"{engine}: {name}", train_two, (MNIST, text), needs_in(text))
    for name, text in table.TEXTS.items():
        needs = ("horovod",) if "horovod" in text else ()
        yield Check(f"texts: {name}", train_two, (IMDB, text), needs)
    yield Check("the same bits on both engines", check_engines, needs=("horovod",))


def scripts(bench: Bench) -> Iterable[Check]:
    """Scripts written for Horovod and for torch.distributed, on either engine over NCCL, by `run`."""
    for engine in ("ddp", "horovod"):
        use = f"--backend {engine}"
        for script in table.SCRIPTS:
            yield Check(f"{script}.py on {engine}", run_script, (script, use), ("mnist", *needs_in(use)))


def run_script(bench: Bench, script: str, text: str) -> dict[str, Any]:
    job = (f"examples/mnist/{script}.py", "--data-dir", str(bench.data_dir), *STEPS)
    return accuracy(bench.two_ranks("-m", "hvd_trainer", "run", *text.split(), "--", *job))


def train_two(bench: Bench, job: tuple[str, ...], text: str, own_hosts: bool = True) -> dict[str, Any]:
    return accuracy(bench.two_ranks(*job, "--device", bench.device, *text.split(), own_hosts=own_hosts))


def check_same_bits(bench: Bench, text: str, own_hosts: bool = True) -> dict[str, Any]:
    log_dir = bench.folder("same")
    train_two(bench, (*MNIST, *REPRODUCIBLE, "--log-dir", log_dir), text, own_hosts)
    return equal({f"two ranks, {text}": digest(log_dir)}, bench.reference())


def check_refusal_of_stages(bench: Bench) -> dict[str, Any]:
    options = (*GLOO_DDP.split(), "--device", bench.device, "--stages", "2", "--max-steps", "3")
    ran = bench.ranks(*IMDB, *options, own_hosts=False)
    codes = ", ".join(str(its.code) for its in ran)
    if codes != "2, 2" or "nccl" not in ran[0].output:
        raise FailedError(f"stages over Gloo are refused in one line that names nccl; exit codes {codes}")
    return {"exit codes": codes}


def check_engines(bench: Bench) -> dict[str, Any]:
    """Equal weights on DDP, and on Horovod with asynchronous completion and without; the median step of each."""
    from hvd_trainer.measure.figures import read_steps
    from hvd_trainer.measure.message import Message

    digests, figures = {}, {}
    for name, text, on in (("ddp", "ddp", "1"), ("horovod", "horovod", "1"), ("it waits", "horovod", "0")):
        log_dir = bench.folder(name)
        job = (*DETERMINISTIC, "--backend", text, "--device", bench.device, "--log-dir", log_dir)
        env = Message(log_dir=log_dir).variables() | {
            "HOROVOD_ENABLE_ASYNC_COMPLETION": on,
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        }
        bench.two_ranks(*job, *STEPS, env=env)
        digests[name] = digest(log_dir)
        ranks = read_steps(Path(log_dir))
        if not ranks:
            raise MissingError("records of the steps")
        seconds = sorted(ranks[0]["seconds"].sum(axis=1)[5:])
        figures[f"step, ms, {name}"] = round(1000 * float(seconds[len(seconds) // 2]), 3)
    return equal(digests, digests["ddp"]) | figures
