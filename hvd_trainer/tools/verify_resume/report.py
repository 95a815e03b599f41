"""The report of `verify-resume`: what the undisturbed run and the killed one have shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from statistics import median

from hvd_trainer.measure.machine import Ran
from hvd_trainer.measure.measured import SAME_SUMS
from hvd_trainer.measure.report import Report, Table, Verdict
from hvd_trainer.tools.verify_resume.kills import Killed
from hvd_trainer.utils.text import COMMAND, plural

TWO_RANKS = (
    "two ranks cannot show the order in which values are added (a + b = b + a): if the job has more, type -np 3"
)
ORDER_OF_SUMS = (
    f"in both runs each gradient of a script was a message of its own (`{COMMAND} run {' '.join(SAME_SUMS)}`); "
    "without, three ranks or more add values in another order after a resume. A job on the Trainer needs no option"
)
RANKS_APART = (
    "in the undisturbed run, too, ranks end with other weights than each other: the script may not exchange "
    "gradients. Each rank was compared with itself"
)
COLUMNS = ("start", "steps, at least", "s to its first step", "end", "left")


@dataclass(frozen=True)
class Campaign:
    """Results of a run without kills, and of the same job with kills."""

    kills: Sequence[Killed]
    ranks: int
    ranks_differ: bool = False
    """whether the ranks of the undisturbed run have other weights than each other"""
    warnings: Sequence[str] = ()
    """of the runs"""
    _: KW_ONLY
    last_steps: int = 0
    """that were left after the last kill"""
    last_s: float = 0.0
    """from the start after it to the end of its first step"""
    same: bool = False
    """whether each rank has trained the same weights in both"""
    failure: str = ""
    """why the job did not run again after the last kill; empty if it did"""

    @property
    def tried(self) -> str:
        """The number of kills, and of those inside a save, for the verdict."""
        in_saves = sum(bool(killed.saving) for killed in self.kills)
        return f"{plural(len(self.kills), 'kill')} at random moments, {in_saves or 'none'} of them inside a save"

    def report(self, ran: Ran) -> Report:
        """Return what it proves."""
        verdicts = [self._verdict()]
        if left := sum(killed.left for killed in self.kills):
            processes = plural(left, "process", "processes")
            text = f"Ranks or launchers outlived a kill: {processes} left behind."
            verdicts.append(Verdict(text, "failed", badge=f"{processes} LEFT".upper()))
        starts = [(each.steps, each.first_step_s, str(each), str(each.left)) for each in self.kills]
        notes = []
        if not self.failure:
            starts.append((self.last_steps, self.last_s, "the end", ""))
            notes.append(f"after the last kill: {plural(self.last_steps, 'step')} to the end")
        if recoveries := [seconds for _, seconds, _, _ in starts[1:]]:
            times = f"median {median(recoveries):.1f} s, maximum {max(recoveries):.1f} s"
            notes.append(f"recovery, from a start to its first step: {times}")
        rows = [
            (str(number), str(steps), f"{seconds:.1f}", end, others)
            for number, (steps, seconds, end, others) in enumerate(starts, 1)
        ]
        return Report(
            ran=ran,
            verdicts=verdicts,
            tables=[Table("Each start", COLUMNS, rows, words=(3,), is_open=True)],
            warnings=[*([RANKS_APART] if self.ranks_differ else []), *self.warnings],
            notes=[*notes, TWO_RANKS if self.ranks == 2 else ORDER_OF_SUMS],
        )

    def _verdict(self) -> Verdict:
        if self.failure:
            last = f"after {self.kills[-1]}"
            text = f"The job did not run again {last}: {self.failure.rstrip('.')}."
            details = [f"Tried: {self.tried}."]
            if self.kills[-1].saving:
                details.append(
                    "Write a checkpoint beside the last one, and give it its name when it is whole (os.replace)."
                )
            return Verdict(text, "failed", details, badge="DID NOT RESUME")
        after = f"After {self.tried}, the final weights are"
        if not self.same:
            return Verdict(f"{after} not those of the undisturbed run.", "failed", badge="OTHER WEIGHTS")
        if any(killed.saving for killed in self.kills):
            return Verdict(f"{after} the same, to the last bit.", "sure", badge="NOTHING LOST")
        more = "No save was seen, or each was too short: what a kill inside one leaves was not tried."
        return Verdict(f"{after} the same, to the last bit.", "unsure", [more], badge="NOTHING LOST, NO SAVE HIT")
