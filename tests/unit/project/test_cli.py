"""The list of commands, the names that they had before, and the console script."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from itertools import pairwise
from pathlib import Path

import pytest
from launchers import REPOSITORY
from waiting import PATIENCE_S

from hvd_trainer import __version__, cli
from hvd_trainer.utils.process import BROKEN_PIPE

SCRIPT = Path(sys.executable).with_name("hvd-trainer")


def test_help_lists_all_commands_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    printed = capsys.readouterr().out
    assert cli.main(["--help"]) == 0
    assert capsys.readouterr().out == printed
    for group, names in cli.COMMANDS.items():
        (lines,) = [part.splitlines() for part in printed.split("\n\n") if part.startswith(f"{group}:\n")]
        assert [name for name in names if not any(line.startswith(f"  {name} ") for line in lines)] == []
    assert all(len(line) <= 100 for line in printed.splitlines())


@pytest.mark.parametrize(("name", "guess"), [("comapre", ": did you mean compare?"), ("xyzzy", ".")])
def test_unknown_command_is_refused(name: str, guess: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name]) == 2
    assert capsys.readouterr().err == (
        f"error: there is no command '{name}'{guess} Type: python -m hvd_trainer --help\n"
    )


def test_version_and_help_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"hvd-trainer {__version__}\n"
    assert cli.main(["help"]) == 0
    assert capsys.readouterr().out.startswith("usage: hvd-trainer <command>")
    with pytest.raises(SystemExit, match="0"):
        cli.main(["help", "export"])
    assert "usage: python -m hvd_trainer export" in capsys.readouterr().out


HELP = """
import sys
from hvd_trainer import cli
try:
    cli.main([sys.argv[1], "--help"])
finally:
    print("torch" in sys.modules, "numpy" in sys.modules)
"""


@pytest.mark.parametrize("name", cli.MODULES)
def test_help_of_a_command_needs_no_pytorch(name: str) -> None:
    """Help of five commands imported PyTorch, all printed `{None}|INT`, and two kept the source's line breaks."""
    ended = subprocess.run([sys.executable, "-c", HELP, name], capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 0, ended.stderr
    *lines, imported = ended.stdout.splitlines()
    assert imported.startswith("False"), imported
    takes_job = name in ("run", "compare", "diagnose", "parity", "verify-resume")
    assert lines[0].endswith(" -- JOB") == takes_job
    assert ("-np " in ended.stdout) == ("--np " in ended.stdout) == (takes_job or name == "migrate")
    assert not re.search(r"None\}|None,|default: \)", ended.stdout)
    for line, following in pairwise(lines):
        if continued := re.match(r"│ {4,}(\S+)", following):
            fits = len(line.rstrip(" │")) + len(f" {continued[1]} │") <= len(line)
            assert not fits or line.startswith("│ -"), line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run --np two -- x", "--np takes a whole number, and not 'two'."),
        ("parity -np 2.5 -- x", "--np takes a whole number, and not '2.5'."),
        ("export a b c", "Unrecognized options: c."),
        # Its completion was for "python -m hvd_trainer compare", which no shell completes.
        ("compare --tyro-print-completion bash", "Unrecognized options: --tyro-print-completion."),
    ],
)
def test_wrong_words_are_one_sentence(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(words.split())
    assert capsys.readouterr().err == f"error: {said} Type: python -m hvd_trainer {words.split()[0]} --help\n"


def test_show_wants_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended in a traceback, and left an empty folder."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["show"]) == 2
    assert capsys.readouterr().err.endswith("none is named. Type: python -m hvd_trainer show LOG_DIR\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [("hvd_trainer", ""), ("hvd_trainer compare --help", "1"), ("hvd_trainer.mnist --help-all", "")],
)
def test_help_ends_without_a_word_where_nobody_reads(words: str, unbuffered: str) -> None:
    """`--help | head` printed a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", *words.split()]
    environ = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    try:
        ended = subprocess.run(
            command, stdout=writer, stderr=subprocess.PIPE, env=environ, timeout=PATIENCE_S, check=False
        )
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (BROKEN_PIPE, b"")


def test_console_script_starts_main() -> None:
    settings = configparser.ConfigParser()
    settings.read(REPOSITORY / "setup.cfg")
    name, value = settings["options.entry_points"]["console_scripts"].strip().split(" = ")
    assert name == SCRIPT.name
    assert EntryPoint(name, value, "console_scripts").load() is cli.main


@pytest.mark.skipif(not SCRIPT.exists(), reason="hvd-trainer is not installed: pip install .")
def test_installed_script_prints_the_same_help_and_its_own_name() -> None:
    printed = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, check=True).stdout
    assert printed == f"{cli.usage()}\n"
    ended = subprocess.run([SCRIPT, "comapre"], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (ended.returncode, ended.stderr.rpartition("? ")[2]) == (2, "Type: hvd-trainer --help\n")
