"""Check what is installed: Python, packages, PyTorch, Horovod."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from hvd_trainer.horovod_build import installer
from hvd_trainer.horovod_build.facts import installed_version
from hvd_trainer.tools.doctor.context import Context
from hvd_trainer.tools.doctor.findings import Finding, error, no_answer, ok, warning
from hvd_trainer.tools.doctor.gpus import gpu_platform
from hvd_trainer.utils.text import INSTALL_HOROVOD, install_extra, plural

PACKAGE = "hvd_trainer"
EXTRAS = {"tools": "compare, diagnose, parity, show and verify-resume", "migrate": "migrate"}
"""The extras that commands need, and these commands."""
TESTED_PYTHON = (Version("3.10"), Version("3.14"))
TESTED_TORCH = (Version("2.11"), Version("2.15"))


def check_python(context: Context) -> list[Finding]:
    """Check this Python, and that `python` on PATH, as in `horovodrun -np 2 python ...`, is the same one."""
    interpreter, (oldest, newest) = f"{platform.python_version()} in {sys.prefix}", TESTED_PYTHON
    if not oldest <= Version("{}.{}".format(*sys.version_info)) <= newest:
        remedy = "python3.12 -m venv .venv    (and install there)"
        return [warning("python", f"{interpreter}: {oldest} to {newest} are tested", remedy)]
    typed = context.programs.find("python")
    other = "there is no `python` on PATH, where launchers look for it"
    if typed is not None:
        if context.programs.ask(typed, "-c", "import sys; print(sys.prefix)").last_line == sys.prefix:
            return [ok("python", interpreter)]
        other = f"`python` on PATH, which launchers would start, is another one: {typed}"
    folder = Path(sys.executable).parent
    is_venv = sys.prefix != sys.base_prefix and (folder / "activate").is_file()
    remedy = f"source {folder / 'activate'}" if is_venv else f"export PATH={folder}:$PATH"
    return [warning("python", f"{interpreter}, and {other}", remedy)]


def check_packages(context: Context) -> list[Finding]:
    """Check that the installed packages meet what this package and torchvision require."""
    version = installed_version(PACKAGE)
    if version is None:
        text = "hvd_trainer is used from its folder and not installed: other folders and hosts do not find it"
        return [warning("packages", text, "pip install -e .")]
    unmet = [*unmet_requirements(PACKAGE), *(r for r in unmet_requirements("torchvision") if r.name == "torch")]
    if not unmet:
        return [ok("packages", f"hvd_trainer {version} and all that it requires"), *_missing_extras()]
    text = "; ".join(
        f"{installed_version(r.name) or 'no'} {r.name} is installed, where {r} is required" for r in unmet
    )
    wanted = {r.name: r.specifier for r in unmet}
    for requirement in unmet:
        wanted[requirement.name] &= requirement.specifier
    words = " ".join(f"'{name}{specifier}'" for name, specifier in wanted.items())
    return [error("packages", text, f"pip install {words}")]


def _missing_extras() -> Iterator[Finding]:
    """Yield a warning for each extra whose commands need what is not installed."""
    for extra, commands in EXTRAS.items():
        names = [requirement.name for requirement in unmet_requirements(PACKAGE, extra)]
        if names:
            text = f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} missing for {commands}"
            yield warning(extra, text, install_extra(extra))


def unmet_requirements(package: str, extra: str = "") -> list[Requirement]:
    """Return the requirements of an installed package, and of an extra, that this environment does not meet."""
    try:
        required = map(Requirement, importlib.metadata.requires(package) or [])
    except importlib.metadata.PackageNotFoundError:
        return []
    due = [r for r in required if r.marker is None or r.marker.evaluate({"extra": extra})]
    return [r for r in due if not (version := installed_version(r.name)) or not _meets(version, r)]


def _meets(version: str, required: Requirement) -> bool:
    """Return whether a version is in a requirement's range; NVIDIA's containers call their builds pre-releases."""
    names = version, Version(version).base_version
    return any(required.specifier.contains(name, prereleases=True) for name in names)


def check_torch(context: Context) -> list[Finding]:
    """Check whether PyTorch imports, what it was built for, and whether its version is tested."""
    torch = context.facts.torch
    if context.facts.is_timeout and torch.error is not None:
        return [no_answer("torch", context.options.timeout_s)]
    if torch.error is not None:
        text = f"cannot be imported: {torch.error.splitlines()[0]}"
        return [error("torch", text, "pip install torch torchvision")]
    gpus = plural(len(torch.gpus), "GPU") if torch.gpus else "no GPU"
    text = f"{torch.version}, built for {gpu_platform(torch) or 'the CPU only'}, {gpus} visible"
    version, (oldest, newest) = Version(torch.version), TESTED_TORCH
    tested = f"{oldest} to {newest} are tested"
    if version.release[:2] < oldest.release:
        return [error("torch", f"{text}: too old, {tested}", f"pip install 'torch>={oldest}' torchvision")]
    if version.release[:2] > newest.release:
        remedy = f"pip install 'torch<={newest}.99' torchvision    (if it fails)"
        return [warning("torch", f"{text}: {tested}", remedy)]
    return [ok("torch", text)]


def check_horovod(context: Context) -> list[Finding]:
    """Check Horovod, and by the installer's own rules whether it fits this PyTorch."""
    facts = context.facts
    if facts.is_timeout:
        return [no_answer("horovod", context.options.timeout_s)]
    if facts.torch.error is not None:
        return [error("horovod", "is built for one torch, and none can be imported", "see the line of torch")]
    if facts.ended:
        remedy = f"{INSTALL_HOROVOD} --force    (until then: --backend ddp)"
        return [error("horovod", f"cannot be imported: {facts.ended}", remedy)]
    horovod, torch = facts.horovod, facts.torch
    if horovod is None:
        text = "not installed, so only --backend ddp works"
        return [warning("horovod", text, f"{INSTALL_HOROVOD}    (minutes)")]
    record = horovod.record
    command = f"{INSTALL_HOROVOD} --mpi" if record.get("mpi") else INSTALL_HOROVOD
    on_cpu_only = not record.get("cuda")
    if not record and horovod.error is None:
        text = "works, but install-horovod has not built it, so that CVE-2024-10190 is open in it"
        return [warning("horovod", text, f"{command}    (see Security in README.md)")]
    # Only what it was built for must fit; a part that it was built without is no mismatch.
    asked = installer.Options(gpu="none" if on_cpu_only else "auto", mpi=bool(record.get("mpi")))
    reason = installer.find_mismatch(horovod, torch, asked)
    if reason is not None:
        return [error("horovod", f"does not fit: {reason}", f"{command}    (until then: --backend ddp)")]
    if not Path(sys.executable).with_name("horovodrun").exists():
        return [error("horovod", "its launcher horovodrun is not beside this python", f"{command} --force")]
    kind = "Gloo only" if on_cpu_only else f"Gloo and NCCL {record['nccl']}"
    text = f"{record['horovod']}, built for this torch with {kind}{', and MPI' if record.get('mpi') else ''}"
    if not on_cpu_only or not torch.gpus:
        return [ok("horovod", text)]
    remedy = f"{command} --gpu nccl    (until then: --device cpu or --backend ddp)"
    if torch.kind != "cuda":
        remedy = f"--backend ddp    (or --device cpu: Horovod exchanges no tensors of {torch.kind})"
    return [warning("horovod", f"{text}: with this build horovod does not train on GPUs", remedy)]
