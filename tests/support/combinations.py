"""Combinations of launchers and engines for tests that launch ranks, and when each one runs.

`make test` runs a selection, and `make test LONG=1` also what is marked `long`.
"""

from __future__ import annotations

from typing import Any

import pytest
from requirements import LAUNCHERS, requires

PAIRS = (
    # Each launcher once, and both engines.
    ("horovodrun", "horovod"),
    ("torchrun", "ddp"),
    ("mpirun", "horovod"),
    ("srun", "ddp"),
    ("python", "ddp"),
    # Each launcher with the other engine.
    ("srun", "horovod"),
    ("horovodrun", "ddp"),
    ("torchrun", "horovod"),
    ("mpirun", "ddp"),
    ("python", "horovod"),
)
"""Launchers with engines. A test takes the first ones."""


def case(*values: Any, when: str = "", name: str | None = None) -> Any:
    """Return a case of a test that is skipped where a launcher or Horovod is missing that its values name.

    Args:
        when: "long", or empty: on each push.
        name: of the case, where its values do not make a good one.
    """
    needed = [value for value in values if isinstance(value, str) and value in (*LAUNCHERS, "horovod")]
    marks = [requires(*needed), *([getattr(pytest.mark, when)] if when else [])]
    return pytest.param(*values, marks=marks, id=name)


def each_launcher(*names: str) -> pytest.MarkDecorator:
    """Run the test once per launcher, as its argument `launcher`; all of them unless named.

    The first half of them on each push, and the others as long tests.
    """
    chosen = names or LAUNCHERS
    quick = chosen[: (len(chosen) + 1) // 2]
    return pytest.mark.parametrize("launcher", [case(it, when="" if it in quick else "long") for it in chosen])


def each_pair(push: int, long: int = 0, *, alone: bool = False) -> pytest.MarkDecorator:
    """Run the test with so many of `PAIRS` on each push, and so many more as long tests.

    It gets them as its arguments `launcher` and `backend`; plain Python, which starts one rank, only if `alone`.
    """
    times = [*[""] * push, *["long"] * long]
    pairs = [pair for pair in PAIRS if alone or pair[0] != "python"]
    cases = [case(*pair, when=when) for pair, when in zip(pairs, times, strict=False)]
    return pytest.mark.parametrize(("launcher", "backend"), cases)
