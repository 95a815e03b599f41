"""Rewrite what is beside Python files: launch lines by torchrun where their meaning is certain; list the rest."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

from hvd_trainer.tools.migrate.tokens import advice_on

FILES = re.compile(
    r"(?i).*\.(sh|bash|slurm|sbatch|job|pbs|md|rst|txt|ya?ml|toml|cfg|mk|ipynb|dockerfile)$"
    r"|.*(dockerfile|makefile|readme|requirements|jenkinsfile)[^/]*$"
)
DOCUMENTS = re.compile(r"(?i).*\.(md|rst|txt)$|readme")
"""Files of sentences, in which a name alone is no use of it."""
SENTENCE = re.compile(r"(?i)\bhorovod\b|\bhvd\b|horovod(\.\w+)+|horovod[a-z]+er|mpi4py")
GAP = r"(?:[ \t]|\\\n)+"
HERE = rf"(?:-H|--hosts?)(?:=|{GAP})localhost(?::[^\s,]+)?"
SIZE = rf"(?:-np|-n|--num-proc)(?:=|{GAP})(?P<size>\S+)"
NO_CHANGE = (
    rf"(?:{GAP}(?:{HERE}|--gloo|--mpi|--verbose|--allow-run-as-root|--oversubscribe|--?tag-output|"
    rf"--?bind-to{GAP}\w+|--?map-by{GAP}\w+|--?mca{GAP}\S+{GAP}\S+|-x{GAP}\w+(?=[\s\\])))*"
)
"""Options without which torchrun starts the same ranks: it hands all variables on, and binds no process."""
PROGRAM = rf"{GAP}(?:\S*/)?python3?(?:{GAP}-u)?{GAP}(?P<program>-m{GAP}\S+|[^-\s]\S*)"
COMMAND = re.compile(rf"(?P<launcher>horovodrun|mpirun|mpiexec){NO_CHANGE}{GAP}{SIZE}{NO_CHANGE}{PROGRAM}")
OTHER_COMMAND = re.compile(rf"horovodrun{NO_CHANGE}{GAP}{SIZE}{NO_CHANGE}{GAP}(?=(?!\S*python)[\w./$])")
HOSTS = re.compile(rf"(?:-H|--hosts?)(?:=|{GAP})(?P<hosts>[\w.-]+:\d+(?:,[\w.-]+:\d+)*)")
SRUN = re.compile(rf"\bsrun\b[^|;&]*?{PROGRAM}")
REQUIREMENT = re.compile(r"(?m)^horovod(\[[\w,-]+\])?[ \t]*([=<>~!].*)?\n?")
SLURM = (
    "srun --ntasks-per-node 1 torchrun --nnodes $SLURM_NNODES --nproc-per-node N --rdzv-backend c10d "
    '--rdzv-id $SLURM_JOB_ID --rdzv-endpoint "$(scontrol show hostnames | head -1):29500"'
)


def migrate_commands(path: Path, text: str, scripts: Collection[str], *, is_left: bool) -> str:
    """Return a file with its commands by torchrun, and without a requirement of Horovod if nothing needs it.

    Args:
        scripts: the names of the Python files that use Horovod: mpirun starts others, too.
        is_left: whether a Python file needs what stands in for Horovod.
    """

    def by_torchrun(command: re.Match[str]) -> str:
        program = command["program"]
        is_own = command["launcher"] == "horovodrun" or _is_one_of(program, scripts)
        return f"torchrun --nproc-per-node {command['size']} {program}" if is_own else command[0]

    text = OTHER_COMMAND.sub(r"torchrun --no-python --nproc-per-node \g<size> ", COMMAND.sub(by_torchrun, text))
    return REQUIREMENT.sub("", text) if "requirements" in path.name and not is_left else text


def rest_of(path: Path, text: str, scripts: Collection[str]) -> Iterator[tuple[int, str, str]]:
    """Yield what is left in a file that is not Python: line, what, and what to type."""
    if path.suffix == ".ipynb":
        if re.search(r"horovod\.torch|HorovodRunner", text):
            yield 1, path.name, "a notebook: jupyter nbconvert --to script, and migrate that"
        return
    joined = re.sub(r"\\\n", lambda _: "\\\v", text)
    number = 1
    for line in joined.split("\n"):
        whole = line.replace("\\\v", " ")
        is_sentence = bool(DOCUMENTS.match(path.name)) or whole.lstrip().startswith(("#", "//"))
        started = SRUN.search(whole)
        if started and _is_one_of(started["program"], scripts):
            yield number, "srun", f"{SLURM} {started['program']}"
        elif (hosts := HOSTS.search(whole)) and re.search("horovodrun|mpirun", whole):
            yield number, whole.split()[0], _on_hosts(hosts["hosts"], whole)
        else:
            rows: dict[str, list[str]] = {}
            for what, advice in dict(advice_on(whole)).items():
                is_variable = re.search(r"=\s*[\"']?mpi(run|exec)", whole)
                is_own = is_variable or any(_is_one_of(word, scripts) for word in whole.split())
                is_prose = is_sentence and (SENTENCE.fullmatch(what) or f"{what} -" not in whole and "run" in what)
                if (is_own or not re.fullmatch("mpi(run|exec)", what)) and not is_prose:
                    own = "nothing of PyTorch needs it: take it out" if SENTENCE.fullmatch(what) else advice
                    rows.setdefault(own, []).append(what)
            yield from ((number, ", ".join(names), advice) for advice, names in rows.items())
        number += line.count("\v") + 1


def _on_hosts(hosts: str, line: str) -> str:
    """Return what to type on each host."""
    program = re.search(PROGRAM, line)
    places = [host.split(":") for host in hosts.split(",")]
    head = f"torchrun --nnodes {len(places)} --master-addr {places[0][0]} --master-port 29500"
    tail = program["program"] if program else "train.py"
    lines = (
        f"on {host}: {head} --node-rank {rank} --nproc-per-node {size} {tail}"
        for rank, (host, size) in enumerate(places)
    )
    return "; ".join(lines)


def _is_one_of(program: str, scripts: Collection[str]) -> bool:
    """Return whether a program is one of some Python files, by path or module."""
    last = program.split()[-1].strip("\"'")
    return Path(last).name in scripts or f"{last.split('.')[-1]}.py" in scripts
