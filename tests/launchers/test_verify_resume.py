"""`verify-resume` with real kills, of scripts and of a job that is built on the Trainer."""

from __future__ import annotations

import random
import re
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from combinations import case
from compared import RAN
from launchers import SCRIPTS, launch, start
from waiting import wait_for

from hvd_trainer.errors import LaunchError
from hvd_trainer.measure.start import Start
from hvd_trainer.measure.tool_folder import locked_folder
from hvd_trainer.measure.trials import RunRecord, TrialRunner
from hvd_trainer.tools.verify_resume.cli import ResumedTrial, verify
from hvd_trainer.tools.verify_resume.kills import Killed
from hvd_trainer.tools.verify_resume.report import Campaign

SCRIPT = str(SCRIPTS / "torch_ddp.py")
SAME = "the final weights are the same, to the last bit."
SAVES = """
import os, sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

way, steps = sys.argv[1], 60
dist.init_process_group("gloo")
file = "snapshot.pt"
torch.manual_seed(0)
model, made = torch.nn.Linear(4, 1), 0
if os.path.exists(file):
    saved = torch.load(file)
    made = saved["made"]
    model.load_state_dict(saved["model"])
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(made + 1, steps + 1):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    optimizer.zero_grad()
    model(torch.randn(8, 4, generator=generator)).square().mean().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        saved = {"made": step, "model": model.module.state_dict()}
        if way == "torn":
            torch.save(saved, file)
        else:
            torch.save(saved, f"{file}.new")
            os.replace(f"{file}.new", file)
dist.destroy_process_group()
"""
DIGITS = [
    *("-m", "hvd_trainer.mnist", "--dataset", "digits", "--repeat", "1", "--epochs", "3", "--batch-size", "64"),
    *("--save-every-steps", "2"),
]
RESUMING = ["--log-dir", "{folder}/log", "--resume", "auto"]


@pytest.mark.parametrize(
    ("backend", "kills", "snapshot", "code", "texts"),
    [
        case("ddp", 2, "snapshot.pt", 0, ["with 2 kills: about 2.5 times", "rank ", "the launcher", SAME]),
        case("horovod", 2, "{folder}/snapshot.pt", 0, ["the launcher", SAME], when="long"),
        case("ddp", 1, "", 2, ["The script does not resume: started again after 1 kill"], when="long"),
    ],
)
def test_verify_resume_kills_a_script_and_its_launcher(
    backend: str, kills: int, snapshot: str, code: int, texts: list[str], tmp_path: Path
) -> None:
    job = [SCRIPT, "--epochs", "8", "--snapshot", snapshot]
    options = ["--kills", str(kills), "--backend", backend, "--out", str(tmp_path)]
    result = launch("python", 1, ["-m", "hvd_trainer", "verify-resume", *options, "--", *job], check=False)
    said = result.stdout + result.stderr
    assert not [text for text in texts if text not in said], said
    assert "left behind" not in said
    assert result.returncode == code
    assert (tmp_path / "resume.html").exists() == (code == 0)
    line = r"^recovery, from a start to its first step: median (\S+) s, maximum (\S+) s$"
    recovery = re.search(line, said, re.MULTILINE)
    assert (recovery is not None) == (code == 0)
    assert recovery is None or 0 < float(recovery[1]) <= float(recovery[2])


@pytest.mark.parametrize(
    ("way", "ranks", "code", "texts"),
    [
        (
            "torn",
            "3",
            1,
            ["The job did not run again after rank 0 killed inside a save of snapshot.pt", "os.replace"],
        ),
        pytest.param("whole", "3", 0, [f"1 of them inside a save, {SAME}"], marks=pytest.mark.long),
    ],
)
def test_a_kill_inside_a_save_shows_a_torn_one(
    way: str, ranks: str, code: int, texts: list[str], tmp_path: Path
) -> None:
    """A save of a few kilobytes is over before any look at it, and NOTHING LOST was said of such a script."""
    (tmp_path / "train.py").write_text(SAVES)
    options = ["--np", ranks, "--kills", "1", "--backend", "ddp", "--out", str(tmp_path / "out")]
    words = ["-m", "hvd_trainer", "verify-resume", *options, "--", "train.py", way]
    result = launch("python", 1, words, check=False, cwd=tmp_path)
    said = result.stdout + result.stderr
    assert not [text for text in texts if text not in said], said
    assert result.returncode == code


def ended(steps: int, weights: str) -> RunRecord:
    """Return the record of a start that has come to its end, with these weights on its ranks."""
    figures = {"work": {"steps": steps}, "step_s": 0.1, "first_step_at": 1.0, "weights": [*weights]}
    return RunRecord({}, 1, "done", 1.0, figures=figures)


def killed(*fields: Any) -> RunRecord:
    return RunRecord({}, 1, "killed", 1.0, figures=Killed(*fields)._asdict())


TRIAL = ResumedTrial(job=[SCRIPT], engine="ddp", ranks=2)


@pytest.mark.parametrize(("last", "badge"), [("ab", "NOTHING LOST"), ("ba", "OTHER WEIGHTS")])
def test_ranks_with_weights_of_their_own_are_compared_one_by_one(
    last: str, badge: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Such weights were not those of the undisturbed run, although each rank had the same in both."""
    runs = iter([ended(20, "ab"), killed("rank 1", 5, 1.0, 0, "last.pt"), ended(9, last)])
    monkeypatch.setattr(TrialRunner, "run", lambda *_, **__: next(runs))
    report = verify(TRIAL, TrialRunner(tmp_path), kills=1, draw=random.Random(0)).report(RAN)
    assert report.answer.badge == badge
    assert report.warnings[0].startswith("in the undisturbed run, too, ranks end with other weights")


@pytest.mark.parametrize("code", [0, 1])
def test_a_job_that_has_no_step_left_is_not_told_to_have_failed(
    code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ranks that notice late that their launcher is killed make all steps: "did not run again" was said."""
    ending = Start([sys.executable, "-c", f"raise SystemExit({code})"])
    runs, run = iter([ended(60, "aa"), killed("the launcher", 5, 1.0, 0)]), TrialRunner.run

    def start(runner: TrialRunner, trial: Any, number: int, **how: Any) -> RunRecord:
        record = next(runs, None) or run(runner, trial, number, **how)
        return runner.last.setdefault((trial.key, number), record)

    monkeypatch.setattr(ResumedTrial, "start", lambda *_: ending)
    monkeypatch.setattr(TrialRunner, "run", start)
    with locked_folder(tmp_path, "verify-resume"):
        runner = TrialRunner(tmp_path)
        with pytest.raises(LaunchError, match="let it train longer") if code == 0 else nullcontext():
            assert verify(TRIAL, runner, kills=2, draw=random.Random(0)).failure == "exit code 1"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_what_was_started(number: signal.Signals, tmp_path: Path) -> None:
    """Its ranks ran on, as they are in sessions of their own: after SIGTERM, and in a terminal that was closed."""
    script = tmp_path / "train.py"
    script.write_text(f"import time\nopen({str(tmp_path / 'began')!r}, 'w')\ntime.sleep(600)\n")
    options = ["--np", "1", "--backend", "ddp", "--out", str(tmp_path / "out")]
    with start("python", 1, ["-m", "hvd_trainer", "verify-resume", *options, "--", str(script)]) as job:
        wait_for((tmp_path / "began").exists, lambda: job.report("the script was not started"))
        job.popen.send_signal(number)
        assert job.wait().returncode == 128 + number


def test_what_was_lost_is_said_first(capsys: pytest.CaptureFixture[str]) -> None:
    kills = [Killed("rank 1", 3, 1.0, 0, "last.pt"), Killed("the launcher", 4, 2.0, 2)]
    end: dict[str, Any] = {"last_steps": 4, "last_s": 4.0}
    (sure,) = Campaign(kills[:1], 3, **end, same=True).report(RAN).verdicts
    assert (sure.state, sure.badge) == ("sure", "NOTHING LOST")
    (unsure,) = Campaign([kills[1]._replace(left=0)], 3, **end, same=True).report(RAN).verdicts
    assert (unsure.state, unsure.badge) == ("unsure", "NOTHING LOST, NO SAVE HIT")
    assert unsure.text.startswith("After 1 kill at random moments, none of them inside a save, the final weights")
    report = Campaign(kills, 2, **end).report(RAN)
    report.show()
    assert report.has_failed
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == [
        "After 2 kills at random moments, 1 of them inside a save, the final weights are not those of the "
        "undisturbed run.",
        "Ranks or launchers outlived a kill: 2 processes left behind.",
    ]
    assert said[-3:-1] == [
        "after the last kill: 4 steps to the end",
        "recovery, from a start to its first step: median 3.0 s, maximum 4.0 s",
    ]
    assert "two ranks cannot show the order in which values are added" in said[-1]


@pytest.mark.long
@pytest.mark.parametrize("backend", [case("ddp"), case("horovod")])
def test_verify_resume_takes_a_trainer_job(backend: str, tmp_path: Path) -> None:
    options = ["--kills", "2", "--backend", backend, "--seed", "1", "--out", str(tmp_path)]
    result = launch("python", 1, ["-m", "hvd_trainer", "verify-resume", *options, "--", *DIGITS, *RESUMING])
    assert SAME in result.stdout
    (again,) = re.findall(r"^after the last kill: (\d+) steps to the end$", result.stdout, re.M)
    assert int(again) < 24
