"""The report in Markdown: the machine, what failed and why, what could not be shown here, and all figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hvd_trainer.measure.machine import describe_machine
from hvd_trainer.measure.report import Table


class MarkdownReport:
    """A plugin of pytest that writes what tests came to, again with each one: a run that is killed leaves it.

    Args:
        file: to write.
        facts: of the machine, by name.
    """

    def __init__(self, file: Path, facts: Mapping[str, Any]) -> None:
        self._file, self._facts = file, facts
        self._tests: dict[str, list[pytest.TestReport]] = {}
        file.parent.mkdir(parents=True, exist_ok=True)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Write which test has begun, and what the others came to."""
        self._tests[nodeid] = []
        self._write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take in one phase of a test."""
        self._tests[report.nodeid].append(report)

    def pytest_sessionfinish(self) -> None:
        """Write what all came to."""
        self._write()

    def _write(self) -> None:
        # Horovod may have been built meanwhile.
        self._file.write_text(markdown({**self._facts, **describe_machine()}, self._tests))


def markdown(facts: Mapping[str, Any], tests: Mapping[str, Sequence[pytest.TestReport]]) -> str:
    """Return the report of tests by their names, each in its phases."""
    rows, skipped = [], []
    failed: dict[str, list[str]] = {}
    for nodeid, phases in tests.items():
        name = nodeid.removeprefix("tests/gpu/")
        if not phases:
            rows.append((name, "has not ended", "", ""))
            continue
        last = next((phase for phase in phases if not phase.passed), phases[-1])
        figures = "; ".join(f"{figure}: {value}" for figure, value in phases[-1].user_properties)
        rows.append((name, last.outcome, figures, f"{sum(phase.duration for phase in phases):.1f}"))
        if last.failed:
            failed.setdefault(last.longreprtext, []).append(name)
        elif last.skipped and isinstance(last.longrepr, tuple):
            skipped.append(f"- {name}: {last.longrepr[2]}")
    counts = Counter(outcome for _, outcome, *_ in rows)
    table = Table("", ("test", "outcome", "figures", "s"), rows, words=(0, 1, 2))
    lines = ["# gpu-test", "", ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped")), ""]
    lines += [f"- {name}: {' '.join(str(value).split())}" for name, value in facts.items()]
    lines += ["", "## Failed", ""]
    for text, names in failed.items():  # Horovod that cannot be built fails many in one way
        lines += [f"### {', '.join(names)}", "", "````", text, "````", ""]
    lines += ["## Not shown here", "", *skipped, "", "## All tests", ""]
    return "\n".join([*lines, table.markdown(), ""])
