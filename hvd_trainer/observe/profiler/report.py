"""The end of a profile: the ranks bring together what they have recorded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch

from hvd_trainer.backends import Backend
from hvd_trainer.errors import first_line
from hvd_trainer.observe.profiler.breakdown import Figures, breakdown, steps_of
from hvd_trainer.observe.profiler.merge import MERGED, Ahead, Written, bring, compare_clocks, merge
from hvd_trainer.observe.profiler.operators import operators
from hvd_trainer.observe.profiler.recorder import Recorder
from hvd_trainer.observe.profiler.trace import file_of, write_rank
from hvd_trainer.observe.run_log import RunLog
from hvd_trainer.utils.text import plural

FOLDER, TEXT = "profile", "breakdown.txt"
HEAD_NS = 1_000_000
"""The trace begins so long before the first of its steps."""


class Report:
    """Write one rank's part of the report.

    Args:
        folder: of the profile, on this rank's node.
    """

    def __init__(self, backend: Backend, log: RunLog, folder: Path) -> None:
        self._backend, self._log, self._folder = backend, log, folder
        self._host = backend.session.peers[backend.world.rank].host

    def clear(self) -> None:
        """Remove an earlier profile, whose files might be taken for this one's."""
        for pattern in ("rank-*.json.gz", MERGED, TEXT):
            for file in self._folder.glob(pattern):
                with suppress(OSError):
                    file.unlink()

    def make(self, recorder: Recorder, unprofiled_s: float | None) -> None:
        """Write, merge and print what was recorded. A collective.

        What fails is said, and the training goes on.
        """
        backend, began = self._backend, time.perf_counter()
        trace: dict[str, Any] | str
        try:
            recorder.stop()
            trace = recorder.read()
        except Exception as error:  # whatever it is, the others wait for this rank
            trace = first_line(error)
        clocks = compare_clocks(backend)
        mine = self._figures(recorder, trace, unprofiled_s)
        ranks = [Figures(**values) for values in backend.collectives.all_gather_object(vars(mine))]
        origin_ns = min(its.window[0] - clock.by_ns for its, clock in zip(ranks, clocks, strict=True)) - HEAD_NS
        shift_ns = origin_ns + clocks[backend.world.rank].by_ns
        written = self._write(recorder, trace, shift_ns)
        files = [Written(*values) for values in backend.collectives.all_gather_object(astuple(written))]
        bring(backend, self._folder, files)
        if backend.world.is_first:
            lines = [*breakdown(ranks, whole=False), *self._publish(ranks, clocks, files, origin_ns)]
            lines.append(f"the training stood still for {time.perf_counter() - began:.1f} s meanwhile")
            self._log.info(
                "\n".join(f"{'' if number else 'profile':8} {line}" for number, line in enumerate(lines))
            )
        backend.collectives.barrier()

    def _figures(self, recorder: Recorder, trace: dict[str, Any] | str, unprofiled_s: float | None) -> Figures:
        phases = recorder.phases
        plain: dict[str, Any] = {"traceEvents": ()} if isinstance(trace, str) else trace
        base_ns = plain.get("baseTimeNanoseconds", 0)
        most = operators(plain["traceEvents"], lambda at_us: phases.in_step(base_ns + 1000 * at_us))
        seconds = torch.from_numpy(phases.seconds())
        return Figures(self._host, phases.numbers, phases.window, seconds, most, unprofiled_s)

    def _write(self, recorder: Recorder, trace: dict[str, Any] | str, shift_ns: int) -> Written:
        """Write this rank's trace."""
        rank, (began_ns, ended_ns) = self._backend.world.rank, recorder.phases.window
        if isinstance(trace, str):
            return Written(0, 0, trace)
        engine = [span for span in recorder.engine if began_ns <= span.began_ns and span.ended_ns <= ended_ns]
        rows = {self._host: recorder.phases.spans(), self._backend.version.partition(",")[0]: engine}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_rank(file_of(self._folder, rank), rank, trace, rows, shift_ns)
            return Written.of(file_of(self._folder, rank).read_bytes())
        except Exception as error:  # as above
            return Written(0, 0, first_line(error))

    def _publish(
        self, ranks: Sequence[Figures], clocks: Sequence[Ahead], files: Sequence[Written], origin_ns: int
    ) -> list[str]:
        """Rank 0 writes what is for all; returns what there is to say of it."""
        merged, lines = self._folder / MERGED, []
        unsure_ns = max(clock.unsure_ns for clock in clocks)
        if unsure_ns:
            lines.append(f"the hosts' clocks were compared: their times agree to within {unsure_ns / 1e6:.2f} ms")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / TEXT).write_text("\n".join([*breakdown(ranks), *lines]) + "\n")
            hosts = [its.host for its in ranks]
            missing = merge(self._folder, files, hosts, origin_ns, self._about(ranks, clocks))
        except Exception as error:  # what was recorded is not worth the training
            return [*lines, f"the ranks' traces could not be put together in {merged}: {first_line(error)}"]
        if len(missing) < len(ranks):
            there, size = plural(len(ranks) - len(missing), "rank"), merged.stat().st_size / 1e6
            lines.append(f"trace of {there}: {merged} ({size:.1f} MB), for https://ui.perfetto.dev")
        return lines + [f"rank {rank} is not in it: {why}" for rank, why in missing.items()]

    def _about(self, ranks: Sequence[Figures], clocks: Sequence[Ahead]) -> dict[str, str]:
        """Return what a viewer shows about the whole trace."""
        about = {"steps": steps_of(ranks), "engine": self._backend.version}
        for rank, (its, clock) in enumerate(zip(ranks, clocks, strict=True)):
            ahead = f"{clock.by_ns / 1e6:.3f} ms ahead of rank 0's, known to within {clock.unsure_ns / 1e6:.3f} ms"
            about[f"rank {rank}"] = (
                f"on {its.host}, whose clock is {ahead if clock.unsure_ns else 'that of rank 0'}"
            )
        return about
