"""Only a self-test that passes makes an installed Horovod count, and one that fails names its cause."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from install_checks import NO_NETWORK, ROOT, installed_record, record_of
from launchers import requires
from waiting import PATIENCE_S

from hvd_trainer.horovod_build import self_test
from hvd_trainer.horovod_build.build_plan import BuildPlan
from hvd_trainer.horovod_build.errors import InstallError
from hvd_trainer.horovod_build.facts import TorchFacts
from hvd_trainer.horovod_build.patch_set import RECORD_FILE, RECORD_TEMPLATE

FOR_CPUS = BuildPlan(torch=TorchFacts(version="2.15.0"), cuda=None, nccl=None, mpi=None, jobs=1)
SSH = "horovodrun: could not connect to some hosts via ssh"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file with the record of a Horovod of ours that pip has just installed."""
    package = tmp_path / "site/horovod"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    record = tmp_path / "site" / RECORD_FILE
    record.write_text(RECORD_TEMPLATE.format(record='{"mpi": null}'), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "site")
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    return record


def fail(asked: str, *args: object, **options: object) -> None:
    raise InstallError(asked, SSH, "look at the log")


def test_only_a_passed_self_test_marks_the_record(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "run_logged", fail)
    with pytest.raises(InstallError, match="2 ranks could not exchange cpu tensors"):
        self_test.prove(FOR_CPUS, tmp_path / "log")
    assert record_of(installed) == {"mpi": None}
    monkeypatch.setattr(self_test, "run_logged", lambda *args, **options: None)
    self_test.prove(FOR_CPUS, tmp_path / "log")
    assert record_of(installed) == {"mpi": None, "proved": True}


def test_self_test_names_an_unknown_localhost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new chroot without /etc/hosts, horovodrun only said that it could not connect by ssh."""

    def unknown(host: str) -> str:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(self_test, "run_logged", fail)
    with pytest.raises(InstallError, match=SSH):
        self_test.prove(FOR_CPUS, tmp_path / "log")
    monkeypatch.setattr(socket, "gethostbyname", unknown)
    with pytest.raises(InstallError, match=r"localhost leads to no address[^$]*>> /etc/hosts"):
        self_test.prove(FOR_CPUS, tmp_path / "log")


@requires("horovod", "ssh")
def test_self_test_names_an_unknown_localhost_in_a_real_run(tmp_path: Path) -> None:
    """The run is made with an empty /etc/hosts."""
    (tmp_path / "hosts").touch()
    hide = f'mount --bind {tmp_path / "hosts"} /etc/hosts && exec "$@"'
    hidden = ["unshare", "--mount", "sh", "-c", hide, "sh", sys.executable, "-c"]
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare, to hide /etc/hosts")
    seen = subprocess.run([*hidden, "import socket; socket.gethostbyname('localhost')"], stderr=subprocess.PIPE)
    if b"gaierror" not in seen.stderr:
        pytest.skip(f"this machine knows localhost without /etc/hosts, or hides no file {seen.stderr.decode()}")
    code = (
        "from pathlib import Path\n"
        "from hvd_trainer.horovod_build import self_test\n"
        f"self_test._run_self_test('cpu', 2, Path({str(tmp_path / 'log')!r}), '--gloo')"
    )
    done = subprocess.run(
        [*hidden, code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert "the name localhost leads to no address" in done.stderr
    assert "Could not resolve hostname localhost" in (tmp_path / "log").read_text(encoding="utf-8")


@requires("horovod")
def test_installer_replaces_an_untested_horovod(tmp_path: Path) -> None:
    """A Horovod whose self-test had failed or was interrupted counted as "installed already"."""
    built, spec = installed_record(), importlib.util.find_spec("horovod")
    assert spec is not None
    assert spec.origin is not None
    real, planted = Path(spec.origin).parent, tmp_path / "horovod"
    planted.mkdir()
    for path in real.iterdir():
        (planted / path.name).symlink_to(path)
    record = tmp_path / RECORD_FILE
    text = record.read_text(encoding="utf-8").replace(self_test.MARK, "")
    folder = str(tmp_path / "wheels")
    gpu = "nccl" if built["cuda"] else "none"
    options = ["--wheel-dir", folder, *(["--mpi"] if built["mpi"] else []), "--gpu", gpu]
    record.unlink()
    for mark, said in ((self_test.MARK, "is installed already"), ("", "it was not proved, or that failed")):
        record.write_text(text + mark, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "hvd_trainer", "install-horovod", *options],
            env={**os.environ, **NO_NETWORK, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
            capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert said in done.stdout, done.stdout + done.stderr
        assert done.returncode == (0 if mark else 2)
        assert not mark or not Path(folder).exists()
