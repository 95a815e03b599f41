"""How the doctor makes its checks, chooses engines and prints what it finds."""

from __future__ import annotations

import io
import os
import re
import threading
import time
from dataclasses import replace
from functools import partial

import process_tree
import pytest
import torch
from doctor_checks import TORCH, run_checks

from hvd_trainer.backends import EngineOptions, create
from hvd_trainer.errors import BackendError
from hvd_trainer.horovod_build.facts import Facts, Gpu, HorovodFacts, TorchFacts
from hvd_trainer.jobs import all_reduce
from hvd_trainer.measure.start import MARK
from hvd_trainer.tools.doctor import cli, engines
from hvd_trainer.tools.doctor.context import Context, ending_programs
from hvd_trainer.tools.doctor.findings import Finding, error, ok, print_findings, summary, warning
from hvd_trainer.utils.process import start_in_thread


def test_engines_and_devices_of_run() -> None:
    gpu = Gpu("A", 1, "9.0")
    devices = engines.devices_of_engines
    assert devices(Facts(TORCH, HorovodFacts())) == {"ddp": "cpu", "horovod": "cpu"}
    assert devices(Facts(TORCH)) == devices(Facts(TORCH, ended="killed")) == {"ddp": "cpu"}
    assert devices(Facts(TorchFacts(error="broken"))) == {}
    each = [devices(Facts(replace(TORCH, gpus=[gpu] * number)))["ddp"] for number in range(3)]
    assert each == ["cpu", "cpu", "cuda"]
    pair = replace(TORCH, gpus=[gpu] * 2)
    assert devices(Facts(pair, HorovodFacts()))["horovod"] == "cpu"
    assert devices(Facts(pair, HorovodFacts(record={"cuda": "13.0"})))["horovod"] == "cuda"
    assert devices(Facts(replace(pair, kind="xpu"), HorovodFacts()))["ddp"] == "xpu"


def test_check_sum_refuses_wrong_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    with create(EngineOptions(backend="single"), {}) as backend:
        all_reduce.check_sum(backend)
        right = backend.collectives.all_reduce
        monkeypatch.setattr(
            backend.collectives, "all_reduce", lambda tensor: right(tensor).index_fill(0, torch.tensor([3]), 7.0)
        )
        with pytest.raises(BackendError, match="element 3 of the sum of 1 ranks is 7 instead of 3"):
            all_reduce.check_sum(backend)


def test_failing_and_endless_checks_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = threading.Event()

    def broken(context: Context) -> list[Finding]:
        raise KeyError("planted")

    def endless(context: Context) -> list[Finding]:
        ending.wait()
        return []

    monkeypatch.setattr(
        cli, "CHECKS", {"broken": broken, "endless": endless, "open files": cli.CHECKS["open files"]}
    )
    found = run_checks("broken", "endless", "open files", limit_s=1.0)
    ending.set()
    assert [finding.name for finding in found] == ["broken", "endless", "open files"]
    assert re.fullmatch(r"the check itself failed: KeyError: 'planted' \(line \d+ in broken\)", found[0].found)
    assert [finding.status for finding in found[:2]] == ["error", "error"]
    assert found[1].found == "no answer in 30 s"
    assert found[1].remedy.startswith("python -m hvd_trainer doctor --timeout-s 150")


def test_programs_end_with_their_children() -> None:
    mark = f"{os.environ[process_tree.MARK]}/programs"
    environ = {**os.environ, process_tree.MARK: mark, MARK: "of a run that has started the doctor"}
    with ending_programs(environ, time.monotonic() + 30) as programs:
        quick = programs.ask("sh", "-c", "echo out; echo err >&2; exit 3")
        assert (quick.code, quick.out, quick.last_line) == (3, "out\nerr\n", "err")
        late = programs.ask("sh", "-c", "echo first; sleep 60 & sleep 60", limit_s=0.5)
        assert (late.code, late.out, late.last_line) == (None, "first\n", "no answer in time")
        assert process_tree.wait_for_end(process_tree.marked(mark), limit_s=5) == []
        slow = start_in_thread(partial(programs.ask, "sleep", "60"), "slow")
        deadline = time.monotonic() + 5
        while not process_tree.marked(mark) and time.monotonic() < deadline:
            time.sleep(0.02)
    assert process_tree.wait_for_end(process_tree.marked(mark), limit_s=5) == []
    slow.exception(5)  # its folder may be gone before its output is read
    # A check that is late starts nothing more.
    with pytest.raises(FileNotFoundError):
        programs.ask("true")
    assert process_tree.marked(mark) == []


class Terminal(io.StringIO):
    """A text buffer that passes for a terminal."""

    def isatty(self) -> bool:
        return True


def printed(finding: Finding, out: io.StringIO) -> list[str]:
    print_findings([finding], 10, out)
    return out.getvalue().splitlines()


def test_lines_are_aligned_and_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = warning("/dev/shm", "64 MB free of 64 MB", "docker run --shm-size 8g")
    assert printed(finding, io.StringIO()) == [
        "warning  /dev/shm    64 MB free of 64 MB",
        "                     type: docker run --shm-size 8g",
    ]
    findings = [finding, ok("a", "b"), ok("c", "d"), error("e", "f", "g")]
    assert summary(findings) == "4 checks: 2 ok, 1 warning, 1 error"
    assert summary([ok("a", "b")]) == "1 check: 1 ok, 0 warnings, 0 errors"
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    long = ok("torch", "many words " * 9)
    lines = printed(long, Terminal())
    assert lines[0].startswith("\x1b[32mok     \x1b[0m  torch       many")
    assert len(lines) == 2
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed(long, Terminal())[0].startswith("ok       torch       many")
