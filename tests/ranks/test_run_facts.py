"""What a script sees under `python -m hvd_trainer run` is what it sees under `python`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from combinations import case
from launchers import SCRIPTS
from waiting import PATIENCE_S

from hvd_trainer.measure.message import SITE

GIVEN = re.compile(
    r"(WORLD_SIZE|RANK|LOCAL_RANK|LOCAL_WORLD_SIZE|HOROVOD_(LOCAL_)?(RANK|SIZE)|MASTER_(ADDR|PORT)|HVD_TRAINER_\w+)"
)
"""Variables that `run` adds for scripts that read them, and for their children."""
RUN = ("-m", "hvd_trainer", "run", "-np")


def observe(words: list[str], ending: str, folder: Path, size: int = 1) -> tuple[list[dict[str, Any]], int, str]:
    """Return the facts of each rank, the exit code, and what was printed to stderr."""
    folder.mkdir()
    words = [*words, str(folder), ending, "--backend", "gloo"]
    done = subprocess.run(
        [sys.executable, "-u", "-W", "ignore", *words],
        input="typed" if size == 1 else "",
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=SCRIPTS,
        check=False,
    )
    files = [folder / f"{rank}.json" for rank in range(size)]
    return [json.loads(file.read_text()) for file in files], done.returncode, done.stderr


def without_given(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that are not given by `run`; PYTHONPATH, too, as it was without."""
    kept = {name: value for name, value in environment.items() if not GIVEN.fullmatch(name)}
    before = [folder for folder in kept.pop("PYTHONPATH", "").split(os.pathsep) if folder != str(SITE)]
    return kept | {"PYTHONPATH": os.pathsep.join(before)}


@pytest.mark.parametrize(
    ("job", "size", "ending"),
    [
        (["facts.py"], 1, "end"),
        (["facts.py"], 2, "end"),
        case(["-m", "facts"], 1, "end"),
        case(["facts.py"], 1, "text"),
        case(["facts.py"], 1, "0", when="long"),
        case(["facts.py"], 1, "3", when="long"),
        case(["facts.py"], 1, "os._exit", when="long"),
        case(["facts.py"], 2, "text", when="long"),
        case(["facts.py"], 1, "raise"),
    ],
)
def test_script_sees_what_it_sees_under_python(job: list[str], size: int, ending: str, tmp_path: Path) -> None:
    """Late savers had lost `__main__`, `__file__` was relative, and the text of `sys.exit` was not printed."""
    (wanted,), code, stderr = observe(job, ending, tmp_path / "python")
    ranks, run_code, run_stderr = observe([*RUN, str(size), "--", *job], ending, tmp_path / "run", size)
    wanted["argv"][1] = str(tmp_path / "run")
    wanted["environment"] = without_given(wanted["environment"])
    if size > 1:
        wanted["stdin"] = ""
    for facts in ranks:
        facts["environment"] = without_given(facts["environment"])
        assert facts == wanted
    assert run_code == code
    said = [line for line in run_stderr.splitlines() if line and not line.startswith("warning: the script")]
    assert said[-1:] == stderr.splitlines()[-1:]
    assert wanted["events"][0] == "last line"
