"""Rules of structure, checked in the source and by imports.

The order of the packages is a contract in setup.cfg, which `make lint` checks.
"""

from __future__ import annotations

import ast
import configparser
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from launchers import REPOSITORY

import hvd_trainer
from hvd_trainer import errors
from hvd_trainer.launch.launchers import LAUNCHERS

PACKAGE = REPOSITORY / "hvd_trainer"

# What the launchers' rows call a rank, a size and so on; and names of the same kind that no row uses.
RANK_VARIABLES = {name for launcher in LAUNCHERS for name in launcher.variables()} | {
    "GROUP_RANK",
    "NODE_RANK",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
    "MV2_COMM_WORLD_RANK",
    "PMIX_RANK",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
}


@cache
def modules() -> dict[str, Path]:
    """Return the package's modules by dotted name below it: `backends.ddp`, and an empty name for its own."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def strings(path: Path) -> Iterator[ast.Constant]:
    return (n for n in ast.walk(tree_of(path)) if isinstance(n, ast.Constant) and isinstance(n.value, str))


def test_rank_variables_are_read_in_launch_only() -> None:
    """Elsewhere such a name may only be the key of a dictionary: what Horovod is given before it starts."""
    wrong = []
    for path in modules().values():
        if path in (PACKAGE / "launch/world.py", PACKAGE / "launch/launchers.py", PACKAGE / "launch/slurm.py"):
            continue
        dictionaries = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Dict))
        written = {id(key) for node in dictionaries for key in node.keys}
        wrong += [
            f"{path.relative_to(REPOSITORY)}:{node.lineno} names {node.value}"
            for node in strings(path)
            if node.value in RANK_VARIABLES and id(node) not in written
        ]
    assert not wrong, "\n".join(wrong)


TOOLS_ONLY = {
    *("scipy", "rich", "jinja2"),
    *(f"hvd_trainer.measure.{name}" for name in ("start", "trials", "figures", "stats", "report")),
}
NOT_AT_THE_START = {"horovod", "torchvision", "tensorboard", "pooch", "requests", "tokenizers"}


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("hvd_trainer", {"torch", "horovod", "tyro"}),
        ("hvd_trainer.launch.world", {"torch", "horovod"}),
        ("hvd_trainer.cli", {"torch", "horovod"}),
        ("hvd_trainer.mnist", {"torch", "horovod", "tyro"}),
        ("hvd_trainer.imdb", {"torch", "horovod", "tyro"}),
        ("hvd_trainer.c10d", {"horovod", "tyro"}),
        # What the tools stand on is no part of a job: it takes from measure what records it.
        ("hvd_trainer.training.trainer", TOOLS_ONLY),
        # What a job may need later is imported then: each of these would delay every start.
        *((f"hvd_trainer.jobs.{name}", NOT_AT_THE_START) for name in ("images", "reviews.dataset", "optimizers")),
    ],
)
def test_imports_load_no_heavy_modules(module: str, absent: set[str]) -> None:
    """Imports must not change the environment or the handlers of signals either."""
    code = f"""
import json, os, signal, sys
before = dict(os.environ), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
import {module}
same = before == (dict(os.environ), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
print(json.dumps([same, sorted(sys.modules)]))
"""
    asked = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY
    )
    same, loaded = json.loads(asked.stdout.splitlines()[-1])
    assert same, "the import changed the environment or a signal handler"
    assert not absent & set(loaded)


# The loop.

ROAD = [*(f"training/{name}.py" for name in ("trainer", "run", "loop")), "optim/step.py"]
"""The way of a batch."""
ENGINE_WORDS = re.compile(r"horovod|hvd\b|ddp|nccl|gloo|cuda|\bcpu\b|\bmps\b", re.IGNORECASE)


def words_of(path: Path) -> Iterator[tuple[int, str]]:
    """Return every identifier, import and string of the code with its line; docstrings are not code."""
    tree = tree_of(path)
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, owners) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node.lineno, f"{getattr(node, 'module', '')}.{alias.name}") for alias in node.names)


def test_training_loop_names_no_engine_and_no_device() -> None:
    # "gloo" is in TrainingLoop, too; what DDP alone takes is handed on.
    assert not [
        (name, line, word)
        for name in ROAD
        for line, word in words_of(PACKAGE / name)
        if ENGINE_WORDS.search(re.sub("^hvd_trainer|TrainingLoop|ddp_kwargs", "", word))
    ]


ACCELERATORS = re.compile(r"(?<![a-z])(cuda|xpu)(?![a-z])")
NAMES_ACCELERATORS = {
    "utils.accelerator": "it is there for that",
    "config.options": "the choices of --device",
    "backends.horovod": "hvd.cuda_built(), by Horovod's own name",
}


def kinds_of_accelerators(path: Path) -> Iterator[str]:
    """Return where a module's code names a kind, except in texts that stand alone, such as a field's docstring."""
    alone = {id(node.value) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Expr)}
    told = {(node.lineno, node.value) for node in strings(path) if id(node) in alone}
    for line, word in words_of(path):
        if ACCELERATORS.search(word) and (line, word) not in told:
            yield f"{path.relative_to(REPOSITORY)}:{line} names {word!r:.60}"


def test_accelerator_kinds_are_named_in_one_module() -> None:
    """Other modules ask that one, except the installer and the doctor, whose subject the kinds are.

    Horovod's API has names such as `cuda_built`, and scripts that are migrated say `model.cuda()`.
    """
    naming = {name: list(kinds_of_accelerators(path)) for name, path in modules().items()}
    apart = ("horovod_build", "tools.doctor", "tools.migrate", "hvd.common.basics", "hvd.mpi_ops")
    allowed = {name for name in naming if name in NAMES_ACCELERATORS or name.startswith(apart)}
    assert not [place for name, places in naming.items() if name not in allowed for place in places]
    assert all(naming[name] for name in NAMES_ACCELERATORS), "one names none any more"


THREADS = re.compile(r"(threading\.)?(Thread|Timer)|ThreadPoolExecutor")
BARE_THREADS = {
    "utils.threads": "it is there for that",
    "utils.process": "for tools, which must not import torch",
    "checkpoint.async_writer": "writes copies in host memory",
    "faults.monitor": "waits for messages; what it asks of a device, other threads or `exchanges` ask",
    "faults.preemption": "waits for signals",
    "measure.stacks": "reads Python's stacks",
    "training.job": "ends the process after a time",
}


def test_threads_that_may_touch_a_device_start_on_it() -> None:
    """A thread begins on device 0: its first question to the driver made a context there, on each rank."""
    starting = {
        name
        for name, path in modules().items()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and THREADS.fullmatch(ast.unparse(node.func))
    }
    assert starting == {*BARE_THREADS}, "use utils.threads.start_thread, or say why not"


AT_A_START = {
    # Where ranks meet and are monitored, whichever engine they start then.
    "connect.open_store": {"backends.session"},
    "ranks.meet": {"backends.session", "c10d.context"},
    "choose_devices": {"backends.session"},
    "keep_freed_memory": {"backends.session"},
    "self._set_threads": {"backends.session"},
    "MonitorServer": {"backends.session"},
    "MonitorClient": {"backends.session"},
    "stack_dump.register_signal": {"backends.session"},
    "self.prepare_nccl": {"backends.session"},
    "self._session.prepare_nccl": {"hvd.common.transport"},  # once there is a tensor on a GPU
    # Who starts an engine among them: the Trainer, `hvd.init`, and the engines of a script.
    "self.session.start": {"backends.base"},
    "session.start": {"hvd.common.basics", "backends.script_engine"},
    # Each start of Horovod itself: of the Trainer, of `hvd.init` in a script, and below torch.distributed.
    "start_horovod": {"backends.horovod", "tools.run.engines", "c10d.context"},
    "_serve": {"backends.horovod_start"},
}
"""What is done once, at a start, for all roads: calls, and the modules that make them."""


def test_starts_are_made_in_one_place() -> None:
    """What only one of them did was missed on the others."""
    calling: dict[str, set[str]] = {name: set() for name in AT_A_START}
    for module, path in modules().items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in calling:
                calling[name].add(module)
    assert calling == AT_A_START


def test_training_loop_does_not_branch_on_the_rank() -> None:
    comparisons = [
        f"{name}:{node.lineno}"
        for name in ROAD
        for node in ast.walk(tree_of(PACKAGE / name))
        if isinstance(node, ast.Compare) and re.search(r"\brank\b", ast.unparse(node))
    ]
    assert not comparisons
    for name in ("training/loop.py", "optim/step.py"):
        words = {word for _, word in words_of(PACKAGE / name)}
        assert not words & {"is_first", "rank"}, name


def test_example_is_short_and_names_no_engine() -> None:
    text = (REPOSITORY / "examples/mnist/train.py").read_text()
    assert len(text.splitlines()) < 40
    assert not re.search(r"horovod|\bddp\b|nccl|gloo|distributed|\brank\b|\.cuda", text, re.IGNORECASE)


# Public names.


def test_public_names_have_docstrings() -> None:
    unexplained = []
    for name in hvd_trainer.__all__:
        value = getattr(hvd_trainer, name)
        if name == "__version__":
            continue
        # A class's own docstring: inspect.getdoc would find its parent's, and dataclass makes one up.
        text = value.__doc__ if callable(value) else None
        if not text or text.startswith(f"{name}("):
            unexplained.append(name)
    assert not unexplained
    assert set(dir(hvd_trainer)) == set(hvd_trainer.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hvd_trainer.nothing


def test_errors_that_a_user_may_catch_are_public() -> None:
    kinds = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert kinds == {name for name in hvd_trainer.__all__ if name.endswith("Error")}


def test_public_names_are_equal_for_type_checkers() -> None:
    """The names are listed twice: for loading on first use, and for type checkers."""
    static = {
        f"{node.module}.{alias.name}"
        for block in tree_of(PACKAGE / "__init__.py").body
        if isinstance(block, ast.If)
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    lazy = {f"{home}.{name}" for home, names in hvd_trainer._HOMES.items() for name in names}
    assert static == lazy


def test_version_is_the_same_everywhere() -> None:
    settings = configparser.ConfigParser()
    settings.read(REPOSITORY / "setup.cfg")
    assert settings["metadata"]["version"] == hvd_trainer.__version__
    assert f"## [{hvd_trainer.__version__}]" in (REPOSITORY / "CHANGELOG.md").read_text()
    assert f"ARG VERSION={hvd_trainer.__version__}\n" in (REPOSITORY / "docker/Dockerfile").read_text()


# Words.

PRONOUNS = {"it", "its", "this", "that", "mine", "ours", "theirs", "here", "there", "found", "most"}


def test_words_are_those_that_contributing_lists() -> None:
    (table,) = re.findall(r"\| not \| but \|\n.+\n((?: +\|.+\n)+)", (REPOSITORY / "CONTRIBUTING.md").read_text())
    words = [word.strip() for row in table.splitlines() for word in row.split("|")[1].split(",")]
    assert "anew" in words
    pattern = re.compile(rf"\b(?:{'|'.join(words)})\b")
    files = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if path.suffix in (".py", ".yaml", ".j2")]
    read = {path: (PACKAGE / path).read_text() for path in files if path.parts[0] not in ("backends", "hvd")}
    assert not [(path, word) for path, text in read.items() for word in pattern.findall(text)]


def test_no_variable_is_a_pronoun() -> None:
    """A field may be: doctor's JSON has one named `found`."""
    for path in modules().values():
        fields = {id(node.target) for node in ast.walk(tree_of(path)) if isinstance(node, ast.AnnAssign)}
        names = {
            node.arg if isinstance(node, ast.arg) else node.id
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.arg | ast.Name) and id(node) not in fields
        }
        assert not names & PRONOUNS, path
