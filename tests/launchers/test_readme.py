"""What README.md and docs/ print: commands run as they stand, and options, outputs, links and files are real."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import documents
import process_tree
import pytest
import slurm_cluster
import warm
from child_environment import child_environment
from job import Job, Result
from launchers import QUICKEST, REPOSITORY, launch
from requirements import HOROVODRUN, LAUNCHERS, requires

from hvd_trainer import cli

pytestmark = pytest.mark.warm

MAIN = "horovodrun -np 4 python -m hvd_trainer.mnist"
WITH_DATA = f"{MAIN} --data-dir ../shared/data/mnist"
BY_HAND = next(command for command in documents.commands() if command.startswith("export WORLD_SIZE"))
IMPORT = next(command for command in documents.commands() if command.startswith("sed"))
BATCH_LINES = [command for command in documents.commands() if "--hostfile" in command]
EXAMPLE = "examples/mnist/train.py --dataset digits --epochs 1"

TYPED_HERE = (
    f"horovodrun -np 2 python {EXAMPLE}",
    f"torchrun --nproc-per-node 2 {EXAMPLE}",
    f"mpirun -np 2 python {EXAMPLE}",
    f"srun -n 2 python {EXAMPLE}",
    f"python {EXAMPLE}",
    "torchrun --nproc-per-node 2 examples/own_data.py --epochs 1",
    "python -m hvd_trainer.mnist --dataset digits --epochs 1 --log-dir runs/digits --resume auto",
    BY_HAND,
)
# Their output stands in the document.
TRANSCRIPTS = {"horovodrun -np 2 python examples/first_job.py": "README.md", MAIN: "docs/quickstart.md"}

# These show what others show, too.
LONG = {f"{start} {EXAMPLE}" for start in ("python", "srun -n 2 python", "mpirun -np 2 python")}

# With programs that no test machine has, or with the environment of the tools that benchmarks compares with.
NOT_RUN = re.compile(r"^(docker|apptainer|enroot|kubectl|\.venv-peers/bin/\w+) ")

OF_OTHERS = {
    # Open MPI
    *("--allow-run-as-root", "--bind-to", "--hostfile", "--map-by", "--mca", "--oversubscribe"),
    # Slurm
    *("--array", "--cpu-bind", "--cpus-per-task", "--distribution", "--gpu-bind", "--gpus-per-task", "--gres"),
    *("--kill-on-bad-exit", "--mpi", "--ntasks", "--ntasks-per-node", "--ntasks-per-socket", "--open-mode"),
    *("--account", "--container-image", "--container-mounts", "--nodes", "--partition", "--pty", "--signal"),
    # torchrun
    *("--master-addr", "--master-port", "--max-restarts", "--nnodes", "--nproc-per-node", "--rdzv-endpoint"),
    *("--numa-binding", "--rdzv-backend", "--standalone"),
    # horovodrun
    *("--elastic-timeout", "--host-discovery-script", "--max-np", "--min-np", "--network-interfaces"),
    # Docker
    *("--build-arg", "--detach", "--device", "--ipc", "--profile", "--shm-size", "--time", "--ulimit", "--user"),
    # Apptainer, py-spy, scripts for torch.distributed.launch, pytest in tests/gpu, and a script of the reader
    *("--nv", "--pid", "--local_rank", "--cold", "--junitxml", "--last-failed", "--minutes", "--snapshot"),
}


def test_commands_that_run_here_are_documented() -> None:
    assert not {*TYPED_HERE, *TRANSCRIPTS} - {*documents.commands()}


# Typing.


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder like the repository's root, beside `shared`: what a command writes stays out of the real one."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("examples", "benchmarks"):
        (folder / name).symlink_to(REPOSITORY / name)
    (tmp_path / "shared").symlink_to(REPOSITORY.parent / "shared")
    return folder


def typed(command: str, root: Path, timeout_s: float = 150.0) -> Result:
    """Runs what a reader types, in bash; everything that it started has ended."""
    mark = f"{os.environ.get(process_tree.MARK, 'session')}/readme-{secrets.token_hex(8)}"
    name = mark.rpartition("/")[2]
    changes: dict[str, str | None] = {
        **warm.variables(),
        "PATH": os.pathsep.join([str(HOROVODRUN.parent), os.environ["PATH"]]),
        "PYTHONPATH": str(REPOSITORY),
        # Open MPI refuses root, and more ranks than cores, unless told.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    if "srun" in command:
        changes |= {**slurm_cluster.shared().environ, "SLURM_MPI_TYPE": "none", "SLURM_JOB_NAME": name}
    # Directly under the system's temporary folder: sockets lie in it, their paths must be short.
    with tempfile.TemporaryDirectory(prefix="hvd-job-") as folder:
        environ = child_environment(os.environ, changes, mark=mark, folder=Path(folder))
        script = f"{command}\nresult=$?; wait; exit $result"
        job = Job(["bash", "-c", script], [], mark=mark, folder=Path(folder), env=environ, cwd=root)
        try:
            result = job.wait(timeout_s)
            assert result.returncode == 0, job.report(f"exit code {result.returncode}")
            job.check_nothing_left()
        finally:
            if "srun" in command and job.processes():
                slurm_cluster.shared().cancel(name)
            job.destroy()
    return result


def marks_of(command: str) -> list[pytest.MarkDecorator]:
    """Return what skips a command where its launcher is missing, and where it shows what others show, too."""
    program = command.split()[0]
    needs = requires(*([program] if program in LAUNCHERS else []))
    return [needs, *([pytest.mark.long] if command in LONG else [])]


@pytest.mark.parametrize("command", [pytest.param(c, marks=marks_of(c), id=c.split("\n")[0]) for c in TYPED_HERE])
def test_commands_run_as_they_stand(command: str, root: Path) -> None:
    result = typed(command, root)
    assert result.stdout.count("epoch 1/1") == 1
    assert "Traceback" not in result.stderr
    assert "terminate called" not in result.stderr
    if "--log-dir" in command:
        kept = {path.name.partition(".")[0] for path in (root / "runs/digits").iterdir()}
        # A name that begins with a dot is the lock.
        assert kept == {"metrics", "config", "run", "model", "checkpoints", "events", ""}
        lines = (root / "runs/digits/metrics.jsonl").read_text().splitlines()
        paragraph = re.search(
            r"^The keys in `metrics.jsonl`:(.*?)\n\n", documents.text_of("docs/log-folder.md"), re.M | re.S
        )
        assert paragraph is not None
        assert {key for line in lines for key in json.loads(line)} == set(re.findall(r"`(\w+)`", paragraph[1]))


@requires("mpirun")
@pytest.mark.parametrize("command", BATCH_LINES)
def test_lines_for_batch_scripts_run(command: str, root: Path) -> None:
    """With a scheduler's list of one host, which plays all of them."""
    (root / "hosts").write_text("localhost\n" * 8)
    (variable,) = set(re.findall(r"\$(\w+)", command))
    fewer = command.replace("-np 8", "-np 2")
    result = typed(f"export {variable}=hosts; {fewer} --dataset digits --epochs 1", root)
    assert "2 ranks on 1 node, started by mpirun" in result.stdout


def in_form(line: str) -> str:
    """A line without its numbers, and without what PyTorch's version says of CUDA."""
    return re.sub(r"\d[\d,.]*", "#", re.sub(r"\+(cu\d+|cpu)", "", line)).rstrip()


@requires("horovodrun")
@pytest.mark.parametrize("command", [pytest.param(c, marks=[pytest.mark.long] * (c == MAIN)) for c in TRANSCRIPTS])
def test_the_printed_output_is_the_documented_one(
    command: str, root: Path, request: pytest.FixtureRequest
) -> None:
    if command == MAIN:
        request.getfixturevalue("mnist_dir")
    shown = [block.text.splitlines() for block in documents.blocks(TRANSCRIPTS[command])]
    (transcript,) = (lines[1:] for lines in shown if lines[0] == f"$ {command}")
    printed = typed(WITH_DATA if command == MAIN else command, root).stdout.splitlines()
    assert [*map(in_form, printed)] == [*map(in_form, transcript)]
    for lines in (printed, transcript):
        accuracy = re.search(r"val accuracy ([\d.]+)%", lines[-1])
        assert accuracy is not None
        assert float(accuracy[1]) >= (98 if command == MAIN else 90)


@pytest.mark.parametrize(
    ("command", "end"),
    [
        ("make mnist", MAIN),
        (
            'make mnist ARGS="--epochs 1 --backend ddp" DATA_DIR=path/to/mnist NP=2',
            f"{MAIN.replace('-np 4', '-np 2')} --data-dir path/to/mnist --epochs 1 --backend ddp",
        ),
        (
            'make test PYTEST_ARGS="tests/ranks/test_trainer.py -k test_decay"',
            '-m "not long and not image and not gpu" tests/ranks/test_trainer.py -k test_decay',
        ),
    ],
)
def test_make_ends_with_what_is_said(command: str, end: str, tmp_path: Path) -> None:
    """Where nothing is set up yet; what stops it is tested in test_makefile.py."""
    argv = [*shlex.split(command), "--dry-run", f"VENV={tmp_path / 'venv'}"]
    # Whoever gave some of these to the make that runs the tests finds them in the environment.
    own = {"ARGS", "DATA_DIR", "NP", "HOROVOD_ARGS", "LONG", "PYTEST_ARGS", "TEST_JOBS"}
    environ = {name: value for name, value in os.environ.items() if name not in own}
    plan = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=REPOSITORY, env=environ).stdout
    joined = plan.replace("\\\n", " ").strip().splitlines()
    words = shlex.split(end)
    assert shlex.split(joined[-1])[-len(words) :] == words
    package = "-c constraints.txt -e '.[tensorboard,imdb,migrate,tools]'"
    for step in ("-m venv", package, "-m hvd_trainer install-horovod"):
        assert step in plan


# Python.


def test_a_script_needs_no_more_than_another_import(root: Path, mnist_dir: Path) -> None:
    """Without `run`, and on a machine that need not have Horovod."""
    example = (REPOSITORY / "examples/mnist/plain_horovod.py").read_text()
    (root / "train.py").write_text(example)
    typed(IMPORT, root)
    assert (root / "train.py").read_text() == example.replace(
        "import horovod.torch as hvd", "from hvd_trainer import hvd"
    )
    start = f"torchrun --nproc-per-node 2 train.py --data-dir {mnist_dir} --max-steps 2 --json result.json"
    typed(start, root)
    assert (root / "result.json").exists()


def test_the_notebook_lines_run(root: Path) -> None:
    (code,) = (b.text for b in documents.blocks("docs/quickstart.md") if "hvd_trainer.run(" in b.text)
    (root / "cell.py").write_text(code)
    # As in a session: there is no file that the new processes could read again.
    result = typed('python -c "$(cat cell.py)"', root)
    assert "2 ranks on 1 node, started by run" in result.stdout
    assert result.stdout.count("epoch 1/1") == 1


@pytest.mark.parametrize(
    ("document", "file"), [("README.md", "examples/first_job.py"), ("docs/quickstart.md", "examples/own_data.py")]
)
def test_a_printed_example_is_the_file(document: str, file: str) -> None:
    python = [block.text for block in documents.blocks(document) if block.language == "python"]
    assert (REPOSITORY / file).read_text() in python


def test_readme_prints_the_help_of_the_commands() -> None:
    assert f"{cli.usage()}\n" in [block.text for block in documents.blocks("README.md")]


# Names.


@cache
def help_of(what: str) -> str:
    """What `--help` prints for a module, a module and its tool, or a script; for a job, all its options."""
    name, *tool = what.split()
    start = [name] if name.endswith(".py") else ["-m", name]
    is_job = name in ("hvd_trainer.mnist", "hvd_trainer.imdb") or name.startswith("examples/")
    return launch(QUICKEST, 1, [*start, *tool, "--help-all" if is_job else "--help"]).stdout


def test_options_in_commands_exist() -> None:
    """The plain scripts are left out: their every command is run, and each `--help` of theirs takes seconds."""
    wrong = []
    for command in documents.commands():
        for line in [] if NOT_RUN.search(command) else command.splitlines():
            ours = documents.own_part(line)
            if ours is None or "/plain_" in ours[0]:
                continue
            what, arguments = ours
            options = {word.partition("=")[0] for word in arguments if word.startswith("--")}
            wrong += [f"{option} in: {line}" for option in options - documents.options_in(help_of(what))]
    assert not wrong


def test_options_in_prose_and_of_launchers_exist() -> None:
    known = {"--help", "--help-all", *OF_OTHERS}
    jobs = ("hvd_trainer.mnist", "hvd_trainer.imdb", "benchmarks", "benchmarks.idioms", "benchmarks.to_target")
    for what in (*jobs, *(f"hvd_trainer {tool}" for tool in cli.MODULES)):
        known |= documents.options_in(help_of(what))
    for document in documents.ALL:
        typed = (command for block in documents.blocks(document) for command in block.commands())
        code = [*documents.inline_code(document), *(command for command in typed if not NOT_RUN.search(command))]
        named = set().union(*map(documents.options_in, code))
        assert not named - known, document


def test_links_lead_somewhere() -> None:
    for document in documents.ALL:
        folder = (REPOSITORY / document).parent
        files = [link for link in documents.links(document) if not link.startswith("https://")]
        assert not [link for link in files if not (folder / link.partition("#")[0]).exists()], document


def test_files_that_are_named_exist() -> None:
    """Source files, tests and scripts: from the root, from the package, or from beside the document."""
    for document in documents.ALL:
        places = REPOSITORY, REPOSITORY / "hvd_trainer", (REPOSITORY / document).parent
        code = documents.inline_code(document)
        named = [text for text in code if re.fullmatch(r"[\w./-]+\.(py|md|txt)", text)]
        assert not [name for name in named if not any((place / name).is_file() for place in places)], document
