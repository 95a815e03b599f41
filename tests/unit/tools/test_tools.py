"""All tools that run jobs refuse mistakes before a run, lock their folder, and end on Ctrl-C.

Resume, torn lines and time limits belong to the runner that they share: test_runs.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hvd_trainer.errors import OptionError
from hvd_trainer.measure.tool_folder import MARKER, locked_folder
from hvd_trainer.tools import show
from hvd_trainer.tools.compare import cli as compare
from hvd_trainer.tools.diagnose import cli as diagnose
from hvd_trainer.tools.parity import cli as parity
from hvd_trainer.tools.verify_resume import cli as verify_resume

JOB = ("-m", "hvd_trainer.mnist")
TOOLS = (compare, diagnose, parity)
every_tool = pytest.mark.parametrize("tool", [*TOOLS, verify_resume, show], ids=lambda tool: name_of(tool))
PLAIN = "examples/mnist/plain_ddp.py"


def name_of(tool: ModuleType) -> str:
    return tool.__name__.removeprefix("hvd_trainer.tools.").removesuffix(".cli").replace("_", "-")


def words_for(tool: ModuleType, folder: Path) -> list[str]:
    """Return the words behind the options: a run that is there, or a job."""
    if tool is not show:
        return ["--", *JOB]
    (folder / "run").mkdir()
    known = {"event": "epoch", "step": 1, "time": 2.0, "started_at": 1.0, "train_loss": 0.5}
    (folder / "run" / "metrics.jsonl").write_text(json.dumps(known) + "\n")
    return [str(folder / "run")]


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        *((tool, ["--"], "Name the job behind --") for tool in TOOLS),
        (compare, ["--np", "1,x"], "type numbers of ranks with commas"),
        (compare, ["--np", "0"], "type numbers of ranks with commas"),
        (
            compare,
            ["--rounds", "-1", "--threads", "0", "--timeout-s", "0"],
            "--rounds must .*; --threads must .*; --timeout",
        ),
        (compare, ["--steps", "0"], "--steps must be a whole number, 1 or more"),
        (compare, ["--least", "-1"], "--least must be a number, 0 or more"),
        (compare, ["--backend", "mpi"], "--backend mpi: name horovod, ddp, single"),
        (compare, ["--backend", "ddp,ddp"], "each once"),
        (compare, ["--baseline", PLAIN], "say what starts it"),
        (compare, ["--baseline", "ddp"], "say what starts it"),
        (compare, ["--baseline", ""], "say what starts it"),
        (compare, ["--baseline", "ddp -m"], "say what starts it"),
        (compare, ["--baseline", "ddp nowhere.py"], "there is no file nowhere.py"),
        (compare, ["--baseline", "ddp plain.py --name 'a b"], "No closing quotation. Close each quote"),
        (compare, ["--vary", "chunks=1,,2"], "--vary chunks=1,,2: type an option of the job and its values with"),
        (compare, ["--vary", "seed"], "--vary seed: type an option of the job and its values"),
        # Eight jobs were started for it.
        (compare, ["--vary", "batchsize=1,2"], r"no option --batchsize: did you mean batch-size\? See"),
        (compare, ["--vary", "chunks=1", "--vary", "chunks=2"], "--vary chunks is given twice"),
        (compare, ["--vary", "threads=1,1"], "--vary threads=1,1: a value is there twice"),
        (compare, ["--vary", "ranks=1,2"], "--vary ranks=1,2: type --np 1,2,4"),
        (compare, ["--vary", "backend=ddp"], "--vary backend=ddp: type --backend horovod,ddp"),
        (compare, ["--vary", "threads=1,x"], "--vary threads=x: type numbers of CPU threads"),
        (compare, ["--vary", "chunks=1", "--baseline", "ddp x.py"], "which a --baseline has not: leave one out"),
        (compare, ["--backend", "single", "--np", "2", "--vary", "seed=1,2"], "has one rank. Type: --np 1"),
        (diagnose, ["--np", "1", "--budget-s", "0"], "--np must be a whole number, 2 or more.*; --budget-s must"),
        (parity, ["--np", "0", "--steps", "0", "--timeout-s", "0"], "--np must .*; --steps must .*; --timeout-s"),
        (parity, ["--tolerance", "-1"], "--tolerance must be a number, 0 or more"),
        *((parity, ["--backend", names], "name 2 or more of") for names in ("ddp", "ddp,ddp", "ddp,mpi", "")),
    ],
)
def test_mistakes_are_refused_before_anything_runs(
    tool: Any, arguments: list[str], message: str, tmp_path: Path
) -> None:
    job = [] if "--" in arguments else ["--", *JOB]
    with pytest.raises(OptionError, match=message):
        tool.main(["--out", str(tmp_path / "out"), *arguments, *job])
    assert not (tmp_path / "out").exists()


@every_tool
def test_a_folder_that_another_command_uses_is_refused(tool: Any, tmp_path: Path) -> None:
    code = (
        "import fcntl, sys; lock = open(sys.argv[1], 'a'); fcntl.lockf(lock, fcntl.LOCK_EX); "
        "print('locked', flush=True); sys.stdin.read()"
    )
    words, out = words_for(tool, tmp_path), tmp_path / "out"
    with locked_folder(out, name_of(tool)):
        pass
    command = [sys.executable, "-c", code, str(out / MARKER)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(OptionError, match="another one is using it"):
            tool.main(["--out", str(out), *words])
        other.communicate()


@every_tool
def test_a_folder_with_files_of_others_is_refused(tool: Any, tmp_path: Path) -> None:
    """All tools removed and overwrote what was there: `show --out proj` removed proj/running."""
    words = words_for(tool, tmp_path)
    (tmp_path / "user" / "running").mkdir(parents=True)
    (tmp_path / "user" / "running" / "notes").write_text("of the user")
    with pytest.raises(OptionError, match="has files that .* did not write, such as running"):
        tool.main(["--out", str(tmp_path / "user"), *words])
    with locked_folder(tmp_path / "out", "another"):
        pass
    with pytest.raises(OptionError, match="it belongs to another tool"):
        tool.main(["--out", str(tmp_path / "out"), *words])
    # The file itself was answered by "[Errno 17] File exists".
    with pytest.raises(OptionError, match=r"^--out .*notes/out: .*notes is a file, and no folder\. Name another"):
        tool.main(["--out", str(tmp_path / "user" / "running" / "notes" / "out"), *words])
    assert (tmp_path / "user" / "running" / "notes").read_text() == "of the user"
    assert [path.name for path in (tmp_path / "user").iterdir()] == ["running"]


@pytest.mark.parametrize("tool", [*TOOLS, verify_resume], ids=lambda tool: name_of(tool))
def test_ctrl_c_leaves_no_run_behind(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hvd_trainer.measure.trials.run_to_end", interrupt)
    # Where a tool passes it on, the command line ends with 130; diagnose ended with 2, as after a mistake.
    with suppress(KeyboardInterrupt):
        assert tool.main(["--out", str(tmp_path), "--", *JOB]) == 130
    assert not list(tmp_path.rglob("running"))
