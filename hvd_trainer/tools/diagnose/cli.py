"""`python -m hvd_trainer diagnose`: find out where a step's time goes, and what to change.

python -m hvd_trainer diagnose --np 2 --backend ddp -- -m hvd_trainer.mnist

The job is started as it is, while the stacks of all ranks are sampled: that shows the lines that the time goes to,
and what the machine did meanwhile. If that leaves much of a step unexplained, it is also started without
exchanging gradients, and on one rank alone with the same batch and with twice of it. The differences tell what
each part costs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from hvd_trainer.errors import OptionError
from hvd_trainer.launch.engine import choose_engine
from hvd_trainer.measure.command import read_command
from hvd_trainer.measure.formats import check_installed
from hvd_trainer.measure.machine import Ran, busy_warning
from hvd_trainer.measure.measured import MeasuredTrial
from hvd_trainer.measure.tool_folder import locked_folder
from hvd_trainer.tools.diagnose.evidence import NORMAL
from hvd_trainer.tools.diagnose.options import Options
from hvd_trainer.tools.diagnose.report import Diagnosis, conclude
from hvd_trainer.tools.diagnose.speedscope import speedscope
from hvd_trainer.tools.diagnose.trials import WARMUP_STEPS, Trials
from hvd_trainer.utils.text import COMMAND, plural


def main(argv: Sequence[str]) -> int:
    """Run the command, and return the exit code: 0; 130 if it was interrupted.

    1 if the job failed or hung, or if the budget did not suffice for its first run.

    Raises:
        OptionError: an option is out of its range, or the job failed before it had trained.
    """
    ran = Ran.now(f"{COMMAND} diagnose", argv)
    options, job = read_command("diagnose", Options, argv)
    check_installed()
    with locked_folder(options.out, "diagnose") as folder:
        normal = MeasuredTrial(
            label=NORMAL,
            job=job,
            engine=choose_engine(options.backend, os.environ),
            ranks=options.np,
            threads=options.threads,
            warmup_steps=WARMUP_STEPS,
        )
        trials, failure, code = Trials(normal, folder, options.budget_s), "", 130
        if text := busy_warning():
            trials.runner.warn(text)
        print(
            f"this takes {options.budget_s:g} s at most (--budget-s): {plural(options.np, 'rank')} on "
            f"{normal.engine}, as they are; then, if that explains too little, with parts left out",
            flush=True,
        )
        try:
            failure = trials.measure()
            code = int(bool(failure))
        except KeyboardInterrupt:
            if not trials.profiles:  # in the first run: nothing is known yet
                raise
            trials.runner.warn("interrupted: what is told is from the runs until then")
        if not trials.profiles and not trials.is_spent:
            raise OptionError(failure)
        diagnosis = Diagnosis(
            ran=ran, evidence=trials.evidence(), failure=failure, warnings=trials.runner.warnings, normal=normal
        )
        report = conclude(diagnosis)
        report.show(trials.runner.warnings)
        stacks = [folder / "stacks.speedscope.json"] if trials.profiles else []
        for file in stacks:
            file.write_text(json.dumps(speedscope(diagnosis.evidence.profiles, ran.command)))
        report.write(folder, "diagnosis", stacks)
    return code
