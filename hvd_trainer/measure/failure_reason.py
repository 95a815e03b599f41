"""Tell why a run failed, by what its programs have printed."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

from hvd_trainer.measure.figures import read_steps
from hvd_trainer.measure.message import NO_STEPS
from hvd_trainer.measure.trial_files import FOLDER, LOADED

REASONS = (
    r"^(?:\[rank \d+\] )?(?:error|failure): (.*(?:\n[ \t].*)*\n?.*)",  # run_job's
    r"^\S+: error: (.*)",  # argparse's
    r"^\u256d[^\n]*\n\u2502 (.*?) *\u2502$",  # tyro's box
)
"""Patterns of the lines in which a run's programs state why they failed, the likeliest first."""
RANK = r"^(?:\[(\d+)\]<std\w+>:|\[rank(\d+)\]: )"
"""What horovodrun, and PyTorch in a traceback, write before each line of a rank."""
EXCEPTION = r"^((?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?:: \S.*)?)$"
IGNORED = r"^Exception ignored in.*\n(?:Traceback.*\n(?:[ \t].*\n)*.*\n?)?"
"""What Python prints of an exception at which it does not end."""
TRACEBACK = "Traceback (most recent call last):"


def why_it_failed(place: Path, code: int) -> str:
    """Return in one line why a run failed: in the words of the failed rank, or else of the launcher."""
    if code == 0:
        return why_no_figures(place)
    with suppress(OSError, ValueError, KeyError, TypeError):
        if reason := _reason(str(json.loads((place / "error.json").read_text())["message"]["message"])):
            return reason
    # A rank that is alone has no watch over it that would tell torchrun.
    printed = (place / "output").read_text(errors="replace")
    said = re.sub(RANK, "", printed, flags=re.MULTILINE)
    matches = (re.search(pattern, said, re.MULTILINE) for pattern in REASONS)
    reasons = (_reason(match[1]) for match in matches if match is not None)
    return next(filter(None, reasons), "") or _last_exception(printed) or f"exit code {code}"


def _last_exception(printed: str) -> str:
    """Return the last exception of the rank that has ended first; empty without any.

    Those that it printed before did not end it. Of lines that name no rank, the launcher's may be among them, so
    that they count only where none does.
    """
    lines: dict[str, list[tuple[int, str]]] = {}
    for number, line in enumerate(printed.splitlines()):
        match = re.match(RANK, line)
        lines.setdefault("" if match is None else match[1] or match[2], []).append((number, line))
    last = []
    for rank, own in lines.items():
        text = re.sub(IGNORED, "", "\n".join(re.sub(RANK, "", line) for _, line in own), flags=re.MULTILINE)
        if exceptions := re.findall(EXCEPTION, text, re.MULTILINE):
            place = max(number for number, line in own if re.sub(RANK, "", line) == exceptions[-1])
            last.append((rank == "", place, exceptions[-1]))
    return min(last, default=(False, 0, ""))[2]


def why_no_figures(place: Path) -> str:
    """Return why a run in `place` that came to its end has no figures."""
    with suppress(OSError, ValueError, KeyError):
        counts = sorted({len(rank["step"]) for rank in read_steps(place / "log")})
        if len(counts) > 1:
            return (
                f"ranks took {' and '.join(map(str, counts))} steps: give each as many batches, such as by "
                f"DataLoader(..., sampler=DistributedSampler(dataset))"
            )
    text, loaded, seen = "it took no optimizer step that counts", place / LOADED, place / "log" / NO_STEPS
    if not loaded.exists():
        return text + (f": {seen.read_text()}" if seen.exists() else "")
    names = ", ".join(dict.fromkeys(Path(line).name for line in loaded.read_text().splitlines()))
    return (
        f"{text}. Your script resumed from a checkpoint ({names}): write {FOLDER} where it is told its place, so "
        f"that each run has an empty folder for it; or let it train longer, or move the checkpoint away"
    )


def _reason(text: str) -> str:
    """Return one line of a report, the exception if it has a traceback, else the first; empty without any."""
    text = text.encode(errors="replace").decode()  # JSON may hold halves of characters, which no file takes
    # Behind a traceback, and the exception that follows its indented lines, are lines about other ranks.
    has_traceback = TRACEBACK in text
    lines = (line for line in text.rpartition(TRACEBACK)[2].splitlines() if line.strip())
    return next((line.strip() for line in lines if not (has_traceback and line[0].isspace())), "")
