"""Training on one rank, and on two ranks of one GPU: by Gloo with tensors of the GPU, and by NCCL."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gpu import table
from gpu.bench import HERE, IMDB, MNIST, REPRODUCIBLE, Bench, Check, FailedError, MissingError, digest, ended_well

STEPS = ("--max-steps", "20")


def accuracy(output: str) -> dict[str, Any]:
    """Return the test accuracy that a job has printed, in percent."""
    found = re.search(r"test accuracy ([\d.]+)%", output)
    return {"test accuracy, %": float(found[1])} if found else {}


def trains(*options: str) -> Any:
    """Return a check's proof: one process trains to the end."""

    def prove(bench: Bench) -> dict[str, Any]:
        return accuracy(bench.ok(*MNIST, "--device", bench.device, *options, limit_s=150).output)

    return prove


def one_rank(bench: Bench) -> Iterable[Check]:
    """Each engine in each precision; options; host waits; the same bits twice; resume."""
    engines = table.ENGINES[:2] if bench.quick else table.ENGINES
    for engine in engines:
        for precision in table.PRECISIONS[: 1 if bench.quick else None]:
            options = ("--backend", engine, "--precision", precision, "--epochs", "2")
            yield Check(f"{engine} {precision}", "", trains(*options), needs_of(engine))
    yield Check("the same bits twice", "S13", the_same_bits)
    for name, text in list(table.NO_WAITS.items())[: 1 if bench.quick else None]:
        yield Check(f"no waits: {name}", "S5 S6 S7 W2", no_waits(text), table.needs_in(text))
    if bench.quick:
        return
    for name, text in table.ONE_RANK.items():
        device = "cpu" if not bench.on_gpu else bench.device
        words = text.format(device=device).replace("cpu:0", "cpu").split()
        yield Check(name, table.findings_in(text), trains(*words, *STEPS), table.needs_in(text))
    yield Check("a resume gives the same bits", "B5", resumed)
    # Of one rank it cannot see in which phase that is.
    yield Check("verify-resume", "B5", verify_resume, ("2 gpus",))
    yield Check("benchmarks' loop by hand", "B7", by_hand, ("mnist",))


def needs_of(engine: str, text: str = "") -> tuple[str, ...]:
    return (*(["horovod"] if engine == "horovod" else []), *table.needs_in(text))


def the_same_bits(bench: Bench) -> dict[str, Any]:
    wanted, log_dir = bench.reference(), bench.folder("again")
    bench.ok(*MNIST, *REPRODUCIBLE, "--backend", "single", "--device", bench.device, "--log-dir", log_dir)
    return equal({"one rank again": digest(log_dir)}, wanted)


def equal(found: dict[str, str], wanted: str) -> dict[str, Any]:
    """Return the digests as figures.

    Raises:
        FailedError: one of them is another one.
    """
    wrong = [name for name, its in found.items() if its != wanted]
    if wrong:
        raise FailedError(
            f"other weights than one rank's {wanted}: {', '.join(f'{n}: {found[n]}' for n in wrong)}"
        )
    return {"weights": wanted}


def no_waits(text: str) -> Any:
    """Return a proof that no step between two lines of the log waits: by counts at 10 and at 30 steps."""

    def prove(bench: Bench) -> dict[str, Any]:
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

    return prove


def verify_resume(bench: Bench) -> dict[str, Any]:
    bench.ok("-m", "hvd_trainer", "verify-resume", "--kills", "2", "--backend", "ddp", "-np", "2", limit_s=150)
    return {}


def resumed(bench: Bench) -> dict[str, Any]:
    log_dir = bench.folder("resumed")
    job = (*MNIST, *REPRODUCIBLE[:-2], "--backend", "single", "--device", bench.device, "--log-dir", log_dir)
    bench.ok(*job, "--max-steps", "10", "--save-every-steps", "10")
    bench.ok(*job, "--max-steps", "20", "--resume", "auto")
    return equal({"resumed after 10 of 20 steps": digest(log_dir)}, bench.reference())


def by_hand(bench: Bench) -> dict[str, Any]:
    job = ("-m", "benchmarks.ours.by_hand", "--data-dir", str(bench.data_dir), "--backend", "ddp")
    found = re.search(r"accuracy ([\d.]+)", bench.ok(*job).output)
    return {"accuracy": float(found[1])} if found else {}


# Two ranks on one GPU.


def gloo(bench: Bench) -> Iterable[Check]:
    """DDP over Gloo with tensors of the GPU, on one host."""
    shared = ("--backend", "ddp", "--transport", "gloo", "--device", bench.device)
    for name, text in list(table.GLOO.items())[: 1 if bench.quick else None]:
        job = (*MNIST, *shared, *STEPS, *text.split())
        yield Check(
            name, "B5", lambda its, job=job: accuracy(both(its, *job, own_hosts=False)), table.needs_in(text)
        )

    def same(bench: Bench) -> dict[str, Any]:
        log_dir = bench.folder("gloo")
        both(bench, *MNIST, *REPRODUCIBLE, *shared, "--log-dir", log_dir, own_hosts=False)
        return equal({"two ranks over Gloo": digest(log_dir)}, bench.reference())

    yield Check("the bits of one rank", "B5", same)

    def stages(bench: Bench) -> dict[str, Any]:
        ran = bench.ranks(*IMDB, *shared, "--stages", "2", "--max-steps", "3", own_hosts=False)
        refused = all(its.code == 2 for its in ran) and "NCCL" in ran[0].output
        if bench.on_gpu and not refused:
            raise FailedError(f"stages over Gloo are refused in one line that names NCCL; exit codes {codes(ran)}")
        return {"exit codes": codes(ran)}

    yield Check("stages are refused", "B9", stages, ("gpu",))


def nccl(bench: Bench) -> Iterable[Check]:
    """Both engines over NCCL (on CPUs over Gloo), each rank on a host of its own name."""
    for engine in ("ddp", "horovod")[: 1 if bench.quick else None]:

        def trains_as(words: str, job: tuple[str, ...] = MNIST, engine: str = engine) -> Any:
            options = ("--backend", engine, "--device", bench.device, *words.split())
            return lambda its: accuracy(both(its, *job, *STEPS, *options))

        proof = ("-m", "hvd_trainer.tools.doctor.proof_job", "--backend", engine, "--device", bench.device)
        yield Check(f"{engine}: sums", "B11", lambda its, proof=proof: both(its, *proof) and {}, needs_of(engine))
        rows = table.NCCL | table.NCCL_OF_ONE[engine]
        for name, text in list(rows.items())[: 1 if bench.quick else None]:
            yield Check(
                f"{engine}: {name}", f"B5 S9 {table.findings_in(text)}", trains_as(text), needs_of(engine, text)
            )

        def same(bench: Bench, engine: str = engine) -> dict[str, Any]:
            log_dir = bench.folder(engine)
            both(bench, *MNIST, *REPRODUCIBLE, "--backend", engine, "--device", bench.device, "--log-dir", log_dir)
            return equal({engine: digest(log_dir)}, bench.reference())

        yield Check(f"{engine}: the bits of one rank", "B5", same, needs_of(engine))
    if bench.quick:
        return
    for name, (engine, text) in table.TEXTS.items():
        words = ("--backend", engine, "--device", bench.device, *text.split())
        yield Check(
            f"texts: {name}", "B4 S11 S16", lambda its, w=words: accuracy(both(its, *IMDB, *w)), needs_of(engine)
        )
    yield Check("horovod: asynchronous completion", "S1", asynchronous, ("gpu", "horovod"))


def both(bench: Bench, *argv: str, own_hosts: bool = True) -> str:
    """Run two ranks; return what the first printed, once both have ended well."""
    ran = bench.ranks(*argv, own_hosts=own_hosts)
    # The one that ended first tells more than the one that missed it.
    for its in sorted(ran, key=lambda its: its.ended_at):
        ended_well(its)
    return ran[0].output


def codes(ran: Iterable[Any]) -> str:
    return ", ".join(str(its.code) for its in ran)


def asynchronous(bench: Bench) -> dict[str, Any]:
    """Equal weights with it and without; the median step of both."""
    from hvd_trainer.tools.step_figures import read_steps

    digests, figures = {}, {}
    for on in ("0", "1"):
        log_dir = bench.folder(f"async{on}")
        job = (*MNIST, "--backend", "horovod", "--device", bench.device, "--record-steps", "--log-dir", log_dir)
        for its in bench.ranks(*job, *STEPS, env={"HOROVOD_ENABLE_ASYNC_COMPLETION": on}):
            ended_well(its)
        digests[on] = digest(log_dir)
        ranks = read_steps(Path(log_dir))
        if not ranks:
            raise MissingError("records of the steps in --log-dir")
        seconds = sorted(ranks[0]["seconds"].sum(axis=1)[5:])
        figures[f"step, ms, {'with' if on == '1' else 'without'}"] = round(
            1000 * float(seconds[len(seconds) // 2]), 3
        )
    return equal(digests, digests["0"]) | figures
