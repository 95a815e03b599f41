"""`verify-resume` with real kills; unit/tools/test_verify_resume_audit.py has what it would notice."""

from __future__ import annotations

import re

import pytest
from combinations import case
from launchers import SCRIPTS, launch

SCRIPT = str(SCRIPTS / "torch_ddp.py")
SAME = "final weights: the same, to the last bit"


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "seed", "kills"),
    [case("ddp", 0, 2), case("horovod", 1, 4, when="nightly")],
)
def test_verify_resume_loses_nothing(backend: str, seed: int, kills: int) -> None:
    options = ["--kills", str(kills), "--backend", backend, "--seed", str(seed)]
    result = launch("python", 1, ["-m", "hvd_trainer", "verify-resume", *options], timeout_s=300)
    assert len(re.findall(r"^kill \d: in step", result.stdout, re.MULTILINE)) == kills
    for nothing in ("samples lost or repeated", "bits different", "processes left behind"):
        assert re.search(rf"^{nothing} +0$", result.stdout, re.MULTILINE), result.stdout
    assert re.search(r"^recovery, s, p95 +\d+\.\d$", result.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("backend", "kills", "snapshot", "code", "texts"),
    [
        case("ddp", 2, "snapshot.pt", 0, ["rank ", "the launcher", SAME]),
        case("horovod", 2, "{folder}/snapshot.pt", 0, ["the launcher", SAME], when="long"),
        case("ddp", 1, "", 2, ["The script does not resume: started again after 1 kill"], when="long"),
    ],
)
def test_verify_resume_kills_a_script_and_its_launcher(
    backend: str, kills: int, snapshot: str, code: int, texts: list[str]
) -> None:
    job = [SCRIPT, "--epochs", "8", "--snapshot", snapshot]
    options = ["--kills", str(kills), "--backend", backend]
    result = launch("python", 1, ["-m", "hvd_trainer", "verify-resume", *options, "--", *job], check=False)
    said = result.stdout + result.stderr
    assert not [text for text in texts if text not in said], said
    assert "left behind" not in said
    assert result.returncode == code
