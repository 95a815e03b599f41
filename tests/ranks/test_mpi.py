"""`--transport mpi`: a Horovod that is really built with MPI, under Open MPI's mpirun."""

from __future__ import annotations

import re
import site
import subprocess
import sys
from pathlib import Path

import pytest
from combinations import case
from digits_job import argv, weights
from job import Result
from launchers import QUICKEST, SUPPORT, launch, requires

from hvd_trainer.measure.command import OPEN_MPI
from hvd_trainer.measure.trials import read_runs

# Most of the time is that of the build.
pytestmark = [pytest.mark.long, requires("mpirun", "mpicxx")]


@pytest.fixture(scope="module")
def on_mpi(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the variables that add a Horovod built with MPI to the packages of this environment."""
    venv = tmp_path_factory.mktemp("mpi") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    ours = [f"import site; site.addsitedir({folder!r})\n" for folder in site.getsitepackages()]
    (packages / "ours.pth").write_text("".join(ours))
    install = [venv / "bin/python", "-m", "hvd_trainer", "install-horovod", "--mpi", "--gpu", "none"]
    done = subprocess.run(install, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {"PYTHONPATH": str(packages), **OPEN_MPI}


def run(variables: dict[str, str], num_ranks: int, *options: str, check: bool = True) -> Result:
    return launch("mpirun", num_ranks, argv("horovod", extra=options), env=variables, check=check)


def test_two_ranks_train_the_same_bits_as_ddp(on_mpi: dict[str, str], tmp_path: Path) -> None:
    result = run(on_mpi, 2, "--transport", "mpi", "--log-dir", str(tmp_path / "mpi"))
    assert re.search(r"^backend +horovod: Horovod \S+ on MPI, PyTorch", result.stdout, re.MULTILINE)
    assert "started by mpirun" in result.stdout
    launch(QUICKEST, 2, argv("ddp", tmp_path / "ddp"))
    assert weights(tmp_path / "mpi") == weights(tmp_path / "ddp")


@pytest.mark.long
def test_four_ranks_train_the_same_bits_where_they_are_reproducible(
    on_mpi: dict[str, str], tmp_path: Path
) -> None:
    """MPI adds the numbers of more than two ranks in an order of its own."""
    options = ("--reproducible", "4")
    run(on_mpi, 4, "--transport", "mpi", *options, "--log-dir", str(tmp_path / "mpi"))
    launch(QUICKEST, 4, argv("ddp", tmp_path / "ddp", options))
    assert weights(tmp_path / "mpi") == weights(tmp_path / "ddp")


@pytest.mark.parametrize(
    "options", [case("--transport mpi --stages 2"), case("--transport mpi --precision bf16", when="long")]
)
def test_other_trainings_end(on_mpi: dict[str, str], options: str) -> None:
    said = run(on_mpi, 4, *options.split()).stdout
    assert "on MPI" in said
    assert "val accuracy" in said


@pytest.mark.parametrize(
    ("fault", "said"), [("is killed", "ended without a word"), ("is stopped", "has not answered for 3 s")]
)
def test_lost_rank_ends_the_job(on_mpi: dict[str, str], fault: str, said: str) -> None:
    job = [str(SUPPORT / "faulty_job.py"), "--backend", "horovod", "--transport", "mpi", "--timeout-s", "3"]
    result = launch("mpirun", 2, [*job, "--batch-size", "4"], env={**on_mpi, "FAULT": f"{fault}:1:5"}, check=False)
    assert result.returncode != 0
    assert re.search(f"failure: rank 1 of 2 on .*{said}", result.stderr + result.stdout)


@pytest.mark.long
def test_compare_starts_it_by_mpirun(on_mpi: dict[str, str], tmp_path: Path) -> None:
    words = ["--backend", "horovod", "--vary", "transport=auto,mpi", "--np", "2", "--rounds", "1", "--steps", "5"]
    compare = ["-m", "hvd_trainer", "compare", *words, "--out", str(tmp_path / "out"), "--", *argv(None)]
    # Also for root, whom Open MPI refuses unless it is told.
    launch("python", 1, compare, env={"PYTHONPATH": on_mpi["PYTHONPATH"]})
    assert [run.state for run in read_runs(tmp_path / "out")] == ["done", "done"]


@pytest.mark.parametrize(
    ("variables", "launcher", "option", "words"),
    [
        (
            None,
            "mpirun",
            "--transport=mpi",
            ("--transport mpi needs", "(here: no)", "install-horovod --mpi; mpirun"),
        ),
        (
            "on_mpi",
            "torchrun",
            "--transport=mpi",
            ("(here: yes)", "(here: torchrun)", "Type: mpirun -np 2 python"),
        ),
    ],
)
def test_without_mpi_the_error_says_what_to_type(
    variables: str | None, launcher: str, option: str, words: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    env = OPEN_MPI if variables is None else request.getfixturevalue(variables)
    result = launch(launcher, 2, argv("horovod", extra=[option]), env=env, check=False)
    assert result.returncode != 0
    for word in words:
        assert word in result.stdout + result.stderr
