"""Run PyTorch's own tests of torch.distributed on Horovod and on Gloo, and compare.

    python -m benchmarks.torch_tests --size 2 [-k PART_OF_A_NAME ...]

The tests are in PyTorch's wheel (torch.testing._internal.distributed.distributed_test). Those for Gloo run on both
backends. Each forks its ranks from a process that has imported PyTorch, and lets them meet by a file. The table
has the number of tests for each pair of outcomes, and a line for each test that ends differently, with its reason
on Horovod. Beside Horovod and PyTorch it needs `expecttest`.
Exit code 1: a test passes on Gloo and fails on Horovod.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import unittest
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import NO_GPUS
from hvd_trainer.measure.report import Table

BACKENDS = ("horovod", "gloo")
MAX_TEST_S = 120
"""How long one test may take."""


class Outcomes(unittest.TestResult):
    """Record how each test ended, and print it.

    Attributes:
        found: by test: "passed", "skipped" or "failed", and why.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[str]] = {}

    def _record(self, test: unittest.TestCase, outcome: str, reason: str = "") -> None:
        name = test.id().rpartition(".")[2]
        self.found[name] = [outcome, reason]
        print(f"  {outcome:8}{name}  {reason[:100]}", file=sys.stderr, flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self._record(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self._record(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self._record(test, "failed", _first_error(str(err[1])))

    addError = addFailure  # noqa: N815


def _first_error(text: str) -> str:
    """Return the line of a ranks' report that says what went wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.partition(":")[0] and not line.startswith("File")]
    return next(iter(errors[-1:] or lines), "")


def run_tests(backend: str, parts: list[str]) -> dict[str, list[str]]:
    """Run the tests whose names contain one of some parts, in this process."""
    import torch

    # Which tests are skipped is decided while they are imported, by the variable BACKEND.
    from torch.testing._internal.distributed import distributed_test

    import hvd_trainer.c10d  # noqa: F401

    distributed_test.BACKEND = backend

    class ForkedTests(  # type: ignore[misc]
        distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase
    ):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def _test_accumulate_gradients_no_sync(self, *args: Any, **kwargs: Any) -> None:
            # In this rank's process, in which the group is made already. The test puts its model on the CPU for
            # backends that it knows by name, and makes none for others.
            distributed_test.BACKEND = "gloo"
            super()._test_accumulate_gradients_no_sync(*args, **kwargs)

    # Ranks find the class by it.
    globals()["ForkedTests"] = ForkedTests
    names = unittest.TestLoader().getTestCaseNames(ForkedTests)
    outcomes = Outcomes()
    for name in names:
        if not parts or any(part in name for part in parts):
            ForkedTests(name).run(outcomes)
    return outcomes.found


def run_backend(backend: str, size: int, parts: list[str]) -> dict[str, list[str]]:
    """Run the tests on a backend, in a process of their own."""
    print(f"{backend}, {size} ranks", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="hvd-torch-tests-") as folder:
        (Path(folder) / "barrier").mkdir()
        (Path(folder) / "test_dir").mkdir()
        environ = {
            **os.environ,
            **NO_GPUS,
            "BACKEND": "gloo",
            "WORLD_SIZE": str(size),
            "TEMP_DIR": folder,
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(MAX_TEST_S),
            "OMP_NUM_THREADS": "1",
        }
        out = Path(folder) / "outcomes.json"
        command = [sys.executable, "-m", "benchmarks.torch_tests", "--outcomes", str(out), backend]
        subprocess.run([*command, *(f"-k={part}" for part in parts)], env=environ, check=True)
        found: dict[str, list[str]] = json.loads(out.read_text())
        return found


def table(outcomes: dict[str, dict[str, list[str]]]) -> str:
    """Return the comparison as Markdown."""
    ours, theirs = (outcomes[backend] for backend in BACKENDS)
    counts = Counter((theirs[name][0], ours[name][0]) for name in ours)
    pairs = [[their, our, str(count)] for (their, our), count in sorted(counts.items())]
    differing = [
        [name, theirs[name][0], outcome, (reason or theirs[name][1])[:150]]
        for name, (outcome, reason) in sorted(ours.items())
        if outcome != theirs[name][0]
    ]
    tables = (
        Table("", ("on Gloo", "on Horovod", "tests"), pairs, words=(0, 1)),
        Table("", ("test", "on Gloo", "on Horovod", "reason"), differing, words=(0, 1, 2, 3)),
    )
    return "\n\n".join(table.markdown() for table in tables)


def main() -> int:
    """Run both backends and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=2, help="number of ranks")
    parser.add_argument("-k", action="append", default=[], metavar="PART", help="tests with this in their name")
    parser.add_argument("--outcomes", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.outcomes:
        file, backend = arguments.outcomes
        Path(file).write_text(json.dumps(run_tests(backend, arguments.k)))
        return 0
    outcomes = {backend: run_backend(backend, arguments.size, arguments.k) for backend in BACKENDS}
    print(table(outcomes))
    ours, theirs = (outcomes[backend] for backend in BACKENDS)
    return int(any(ours[name][0] == "failed" and theirs[name][0] == "passed" for name in ours))


if __name__ == "__main__":
    sys.exit(main())
