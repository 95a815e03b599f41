"""`python -m hvd_trainer diagnose` on real jobs and scripts, each with a planted cause of slowness."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from launchers import SCRIPTS, SUPPORT, launch, requires, start, write_script

JOB, SCRIPT = SUPPORT / "planted_job.py", SUPPORT / "planted_script.py"
OF_THE_MACHINE = ("programs", "contention", "throttled", "stolen")
"""Kinds of causes that other programs of this machine may add."""
TEMPLATES = {
    "with_accelerate.py": "        accelerator.backward(loss)\n",
    "with_fabric.py": "        fabric.backward(loss)\n",
    "with_lightning.py": "        return cross_entropy(self.layers(inputs), targets)\n",
}
"""Scripts for other libraries, and the line before which a slow one is planted."""


class Planted(NamedTuple):
    """A cause in a job or a script, and what is demanded of the verdict."""

    planted: str
    kind: str
    advice: str
    """part of the advice"""
    options: tuple[str, ...] = ("--batch-size", "32", "--workers", "0")
    """of the job"""
    rank: int | None = None
    line: bool = True
    budget: int = 60
    script: str = JOB.name
    tool: tuple[str, ...] = ()
    """options of `diagnose`"""
    is_largest: bool = True
    """whether no other cause may be larger, but those of the machine"""

    def job(self, folder: Path) -> list[str]:
        """Return the words behind `--`; the first one is the file with the planted line."""
        if self.script == JOB.name:
            return [str(JOB), "--planted", self.planted, *self.options]
        if self.script == SCRIPT.name:
            return [str(SCRIPT), self.planted]
        text, before = (SCRIPTS / self.script).read_text(), TEMPLATES[self.script]
        slow = before[: len(before) - len(before.lstrip())] + f"time.sleep(0.03)  # planted: {self.planted}\n"
        file = folder / f"slow_{self.script}"
        file.write_text("import time\n" + text.replace(before, slow + before))
        return [str(file), "--epochs", "1000"]


LARGE = ("--batch-size", "512")
PLANTED = (
    # Run on each push.
    Planted("callback", "callback", "do this every few steps only"),
    Planted("update", "update", "update all parameters at once"),
    # Long tests.
    Planted("gil", "gil", "move the thread 'prefetch' of rank 1 to a process", rank=1),
    Planted("decode", "data computes", "cheaper, or store its results"),
    Planted("other programs", "programs", "end the other programs", line=False),
    Planted("disk", "data waits", "--workers"),
    Planted("worker decode", "data computes", "cheaper", ("--batch-size", "32", "--workers", "1")),
    Planted("forward", "model", "the model waits there in each forward pass"),
    Planted("loss", "loss", "by operations on whole tensors", LARGE),
    Planted("backward", "backward", "it runs in each backward pass"),
    Planted("metric", "metric", "compute this metric less often"),
    Planted("rank 0 evaluates", "lone", "only rank 0 does this", rank=0),
    Planted("collective", "collective", "send them as one tensor, not 10 a step"),
    Planted("callback hiccups", "hiccups", "do it less often"),
    Planted("one rank has more", "more work", "give all ranks the same", rank=1, line=False),
    Planted("slow rank", "slow rank", "look at rank 1's machine", LARGE, rank=1, line=False),
    Planted("overhead", "overhead", "--batch-size", ("--batch-size", "4"), line=False, budget=170),
    Planted("limit", "throttled", "raise the CPU limit", ("--batch-size", "4096"), line=False, budget=120),
    Planted("swap", "swap", "the machine swaps", line=False, budget=120),
    Planted("slow network", "exchange", "--accumulate 4", line=False, budget=170),
    Planted("one bucket", "overlap", "--bucket-mb", LARGE, line=False, budget=240, is_largest=False),
    Planted(
        *("one core", "pinned", "3 ranks may use core"),
        *(("--batch-size", "4096"), None, False, 170),
        tool=("--np", "3", "--threads", "2"),
    ),
    Planted("logging", "script", "do this every few steps only", script=SCRIPT.name),
    Planted("update", "update", "update all parameters at once", script=SCRIPT.name),
    Planted("disk", "data waits", "num_workers=", script=SCRIPT.name),
    Planted("two slow workers", "data waits", "num_workers=8", script=SCRIPT.name, budget=45),
    Planted("slow decode", "data computes", "cheaper, or store its results", script=SCRIPT.name, budget=45),
    Planted("rank 0 evaluates", "lone", "only rank 0 does this", rank=0, script=SCRIPT.name),
    Planted("per parameter", "collective", "send them as one tensor, not 44 a step", script=SCRIPT.name),
    Planted(
        "metric each batch", "collective", "do this every few steps only", script=SCRIPT.name, is_largest=False
    ),
    Planted("workers each epoch", "loader starts", "persistent_workers=True", script=SCRIPT.name),
    Planted("line", "script", "do this every few steps only", script="with_accelerate.py"),
    Planted("line", "script", "do this every few steps only", script="with_fabric.py"),
    Planted("line", "model", "the model waits there in each forward pass", script="with_lightning.py"),
)
EACH_PUSH = 2


# What is around a job.


@contextmanager
def other_programs() -> Iterator[list[str]]:
    """Keep the first core busy with two other programs."""
    burn = f"import os; os.sched_setaffinity(0, [{min(os.sched_getaffinity(0))}])\nwhile True: pass"
    burning = [subprocess.Popen([sys.executable, "-c", burn]) for _ in range(2)]
    try:
        yield []
    finally:
        for program in burning:
            program.kill()
            program.wait()


@contextmanager
def one_core() -> Iterator[list[str]]:
    yield ["taskset", "-c", str(min(os.sched_getaffinity(0)))]


def slow_network(rate: str) -> Callable[[], Any]:
    """Return a network of its own with a rate such as 200mbit."""

    @contextmanager
    def made() -> Iterator[list[str]]:
        if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
            pytest.skip("needs root and its tools: apt-get install iproute2")
        name = f"hvd-diagnose-{os.getpid()}"
        inside = ["ip", "netns", "exec", name]
        subprocess.run(["ip", "netns", "add", name], check=True)
        try:
            subprocess.run([*inside, "ip", "link", "set", "lo", "up"], check=True)
            limit = ["tbf", "rate", rate, "burst", "256kb", "latency", "400ms"]
            slow = subprocess.run([*inside, "tc", "qdisc", "add", "dev", "lo", "root", *limit], check=False)
            if slow.returncode != 0:
                pytest.skip("this kernel cannot limit a network's rate: modprobe sch_tbf")
            yield inside
        finally:
            subprocess.run(["ip", "netns", "delete", name], check=True)

    return made


@contextmanager
def control_group(kind: str, limits: dict[str, int]) -> Iterator[list[str]]:
    """Yield the words by which a command is started in a control group of its own (cgroup 1) with limits."""
    group = Path("/sys/fs/cgroup", kind, f"hvd-diagnose-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        for name, value in limits.items():
            (group / name).write_text(str(value))
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        time.sleep(0.5)
        group.rmdir()


@contextmanager
def limit() -> Iterator[list[str]]:
    """Limit the job to 0.4 cores."""
    with control_group("cpu", {"cpu.cfs_quota_us": 40_000}) as inside:
        yield inside


@contextmanager
def swap() -> Iterator[list[str]]:
    """Limit the job's memory, and give it a file to swap to."""
    folder = Path("/var/tmp", f"hvd-diagnose-{os.getpid()}")
    folder.mkdir()
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        file = folder / "swap"
        with file.open("wb") as empty:
            os.posix_fallocate(empty.fileno(), 0, 2**31)
        file.chmod(0o600)
        subprocess.run(["mkswap", file], check=True, stdout=subprocess.DEVNULL)
        if subprocess.run(["swapon", file], check=False).returncode != 0:
            pytest.skip("no file can be swapped to here: root, and a kernel with CONFIG_SWAP")
        stack.callback(subprocess.run, ["swapoff", file], check=True)
        yield stack.enter_context(control_group("memory", {"memory.limit_in_bytes": MEMORY}))


MEMORY = 500 * 2**20
"""Bytes of memory of a job that needs more: with less, a step takes many seconds."""
AROUND = {
    **{"other programs": other_programs, "one core": one_core, "limit": limit, "swap": swap},
    **{"slow network": slow_network("200mbit"), "one bucket": slow_network("1gbit")},
}
"""Context managers that disturb the machine while a job runs, by the name of the planted cause."""


def line_of(planted: str, file: Path) -> int:
    """Return the number of the line with a planted cause."""
    lines = file.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# planted: {planted}"))


def diagnose_job(planted: Planted, backend: str, tmp_path: Path) -> tuple[dict[str, Any], str]:
    """Diagnose a job with a planted cause; return the diagnosis and the output."""
    tool = ["-m", "hvd_trainer", "diagnose", "--backend", backend, "--out", str(tmp_path / "out")]
    words = [*tool, "--budget-s", str(planted.budget), *planted.tool, "--", *planted.job(tmp_path)]
    with ExitStack() as stack:
        inside = stack.enter_context(AROUND[planted.planted]()) if planted.planted in AROUND else []
        if inside:
            code = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
            words = ["-c", code, *inside, sys.executable, *words]
        said = launch("python", 1, words, timeout_s=planted.budget + 60, check=False).stdout
    result: dict[str, Any] = json.loads((tmp_path / "out" / "diagnosis.json").read_text())
    return result, said


def cases() -> list[Any]:
    """Return each planted cause on both engines: on one of them on each push, if it is among the first."""
    found = []
    for number, planted in enumerate(PLANTED):
        for place, backend in enumerate(("ddp", "horovod")):
            marks = [requires("horovod")] if backend == "horovod" else []
            if number >= EACH_PUSH or number % 2 != place:
                marks.append(pytest.mark.long)
            found.append(
                pytest.param(planted, backend, id=f"{planted.script}, {planted.planted}, {backend}", marks=marks)
            )
    return found


@pytest.mark.parametrize(("planted", "backend"), cases())
def test_planted_cause_is_found(planted: Planted, backend: str, tmp_path: Path) -> None:
    result, said = diagnose_job(planted, backend, tmp_path)
    others = [] if planted.is_largest else ["exchange"]
    causes = [
        c for c in result["causes"] if c["kind"] == planted.kind or c["kind"] not in (*OF_THE_MACHINE, *others)
    ]
    assert causes, said
    cause = max(causes, key=lambda cause: cause["seconds"])
    assert cause["kind"] == planted.kind, said
    if planted.rank is not None:
        assert cause["rank"] == planted.rank, said
    if planted.line:
        file = Path(planted.job(tmp_path)[0])
        number = line_of(planted.planted.removeprefix("worker "), file)
        assert number in (cause["line"]["frame"]["line"], cause["line"]["entry"]["line"]), said
        assert f"{file.name}:{number} " in said
    assert any(planted.advice in action["text"] for action in result["actions"]), said
    if planted.planted == "slow network":
        assert result["exchange"]["bytes_per_s"] < 50e6
        assert any(action["text"].startswith("--compression fp16") for action in result["actions"])


SWITCHES = (
    Planted("anomaly", "anomaly", "", script=SCRIPT.name),
    Planted("anomaly", "anomaly", ""),
    Planted("float64", "float64", "", script=SCRIPT.name),
    Planted("search", "search", "", script=SCRIPT.name),
    Planted("deterministic", "deterministic", "", script=SCRIPT.name),
)


@pytest.mark.parametrize(
    "planted",
    [
        pytest.param(one, id=f"{one.script}, {one.planted}", marks=[pytest.mark.long] if place else [])
        for place, one in enumerate(SWITCHES)
    ],
)
def test_switch_that_slows_every_step_is_told(planted: Planted, tmp_path: Path) -> None:
    """Anomaly detection was not seen: in the stacks it is nowhere."""
    result, said = diagnose_job(planted, "ddp", tmp_path)
    file = JOB if planted.script == JOB.name else SCRIPT
    where = {switch["kind"]: switch["where"] for switch in result["switches"]}
    assert where.get(planted.kind) == f"{file.name}:{line_of(planted.planted, file)}", said
    assert f"On in every step: {where[planted.kind]}: " in said


def test_a_job_that_does_not_train_is_named(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text("raise ValueError('it does not train')\n")
    words = ["-m", "hvd_trainer", "diagnose", "--backend", "ddp", "--out", str(tmp_path / "out"), "--", str(job)]
    said = launch("python", 1, words, timeout_s=90, check=False).stderr
    assert "ValueError: it does not train; its output is in" in said


def test_a_budget_that_ends_before_the_first_step_is_told_on_the_page(tmp_path: Path) -> None:
    """It was an error, and no page: so a busy machine ended a diagnosis of 30 s."""
    job = write_script(tmp_path / "job.py", "import time; time.sleep(60)\n")
    tool = ["-m", "hvd_trainer", "diagnose", "--backend", "ddp", "--budget-s", "2", "--out", str(tmp_path / "out")]
    result = launch("python", 1, [*tool, "--", str(job)], timeout_s=90, check=False)
    assert result.returncode == 1, result.stderr
    told = r"--budget-s 2 did not suffice for the first run, of 45 steps: it had not ended .* Type --budget-s 4"
    assert re.search(told, (tmp_path / "out" / "diagnosis.html").read_text())
    assert re.search(told, result.stdout)


def test_a_job_that_fails_has_a_verdict_from_what_it_did_until_then(tmp_path: Path) -> None:
    job = Planted("callback, then failure", "callback", "do this every few steps only")
    result, said = diagnose_job(job, "ddp", tmp_path)
    (failure,) = [verdict["text"] for verdict in result["verdicts"] if verdict["state"] == "failed"]
    assert "The job ended early when it was run normal: ValueError: planted" in failure, said
    assert result["causes"][0]["kind"] == "callback", said


def test_ctrl_c_ends_with_a_verdict(tmp_path: Path) -> None:
    """An interrupted diagnosis lost what ten of its twelve runs had shown."""
    job = [str(JOB), "--planted", "callback", "--batch-size", "32"]
    words = ["-m", "hvd_trainer", "diagnose", "--backend", "ddp", "--out", str(tmp_path / "out"), "--", *job]
    with start("python", 1, words) as diagnosis:
        deadline = time.monotonic() + 90
        while not list((tmp_path / "out").glob("running/log/stacks/*1.json")) and time.monotonic() < deadline:
            time.sleep(0.05)
        diagnosis.popen.send_signal(signal.SIGINT)
        result = diagnosis.wait()
    assert result.returncode == 130, result.stderr
    found = json.loads((tmp_path / "out" / "diagnosis.json").read_text())
    assert "interrupted: what is told is from the runs until then" in found["warnings"]
    assert found["causes"], result.stdout
