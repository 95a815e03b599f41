"""Check other hosts by one ssh connection to each: whether it opens, what is installed there, and its clock.

here                                 there
  time           ------------->
          <-------------           1789.25    its clock, three times: the quickest answer counts
  python, facts.py ------>
          <-------------           {"versions": ...}
"""

from __future__ import annotations

import json
import os
import pwd
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hvd_trainer.errors import first_line
from hvd_trainer.horovod_build import facts
from hvd_trainer.tools.doctor.context import Context, Host
from hvd_trainer.tools.doctor.finding import Finding, error, ok, warning
from hvd_trainer.tools.doctor.programs import DRAIN_S
from hvd_trainer.utils.text import plural
from hvd_trainer.utils.threads import start_in_thread

CONNECT_TIMEOUT_S = 3
NUM_CLOCK_SAMPLES = 3
MAX_SKEW_S, MAX_HARMLESS_SKEW_S = 1.0, 60.0
"""Beyond the first, times in logs mislead; beyond the second, file times and certificates do, too."""
TIME_MARK = "hvd_trainer time "
CLOCK_SCRIPT = f"""while read word && test "$word" = time; do date "+{TIME_MARK}%s.%N"; done"""
OPTIONS = (
    *("BatchMode=yes", f"ConnectTimeout={CONNECT_TIMEOUT_S}", "LogLevel=ERROR"),
    # A new host is accepted and one with a changed key refused, as horovodrun does; no key is stored.
    *("StrictHostKeyChecking=accept-new", "UserKnownHostsFile=/dev/null", "ControlMaster=no"),
)
KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
"""The host keys that ssh knows for all users."""
CAUSES = (
    ("Permission denied", "ssh-copy-id {host}    (once; horovodrun and mpirun cannot type a password)"),
    ("Connection refused", "apt-get install openssh-server    (on {host}; or name another --ssh-port)"),
    (
        "Host key verification failed",
        "ssh-keygen -R {host}    (if it was set up anew: it answers with another key than the one that is known)",
    ),
    ("Could not resolve", "getent hosts {host}"),
    ("timed out", "ping {host}    (is it on? a firewall may stand between)"),
    ("No route", "ping {host}    (is it on?)"),
)
"""A part of ssh's message, and what to type about it."""


@dataclass(frozen=True)
class Visit:
    """The answers of a host."""

    wrong: str = ""
    """why it could not be reached, or could not be asked"""
    reached: bool = False
    skew_s: float = 0.0
    """its clock minus this one's"""
    half_trip_s: float = 0.0
    """half of the time that the answer took: the error bound of `skew_s`"""
    facts: Mapping[str, Any] | None = None
    """its `host_facts`; None: no Python there"""


def check_hosts(context: Context) -> list[Finding]:
    """Check all hosts at the same time by ssh: their versions, their CPUs or GPUs, and their clocks."""
    if not context.hosts:
        return []
    others = [host for host in context.hosts if not context.is_here(host)]
    ssh = context.programs.find("ssh")
    if others and ssh is None:
        return [error("ssh", "not installed, and other hosts are reached by it", "apt-get install openssh-client")]
    here = facts.host_facts(os.getcwd())
    visits = [start_in_thread(partial(_visit_host, context, ssh or "ssh", host), "doctor") for host in others]
    wait(visits, timeout=context.programs.program_left_s + DRAIN_S)
    findings = []
    for host in context.hosts:
        if host not in others:
            findings.append(ok(f"ssh {host.name}", "this host itself: nothing to reach"))
            findings += _judge_slots(host, here)
            continue
        visit = visits[others.index(host)]
        wrong = (
            visit.exception() if visit.done() else TimeoutError(f"no answer in {context.options.timeout_s:g} s")
        )
        findings += judge_visit(host, visit.result() if wrong is None else Visit(first_line(wrong)), here)
    return findings


def _visit_host(context: Context, ssh: str, host: Host) -> Visit:
    programs, limit_s = context.programs, context.options.timeout_s
    late = threading.Event()

    def give_up() -> None:
        late.set()
        programs.end(process)

    with tempfile.TemporaryFile("w+", errors="replace") as complaints:
        process = programs.start(_command(context, ssh, host), stdin=subprocess.PIPE, stderr=complaints)
        ending = threading.Timer(programs.program_left_s, give_up)
        ending.daemon = True
        ending.start()
        try:
            visit = _query(process)
            process.wait()
        finally:
            ending.cancel()
            programs.end(process)
        complaints.seek(0)
        said = [line.strip() for line in complaints if line.strip()] or [f"exit code {process.returncode}"]
    wrong = f"no answer in {limit_s:g} s" if late.is_set() else said[-1]
    return replace(visit, wrong="" if visit.facts is not None else wrong)


def _command(context: Context, ssh: str, host: Host) -> list[str]:
    # The files that ssh reads by default, but as global ones, which it never writes. Like ssh, take the home
    # folder from the user database, not from HOME.
    own = Path(pwd.getpwuid(os.getuid()).pw_dir) / ".ssh/known_hosts"
    known = f"GlobalKnownHostsFile={' '.join([*KNOWN_HOSTS, str(own)])}"
    options = [word for option in (*OPTIONS, known) for word in ("-o", option)]
    if context.options.ssh_port is not None:
        options += ["-p", str(context.options.ssh_port)]
    if context.options.ssh_identity_file is not None:
        options += ["-i", str(context.options.ssh_identity_file.expanduser())]
    # One quoted word for the login shell, which may be any; the script itself is for sh.
    script = f"{CLOCK_SCRIPT}; exec {shlex.quote(sys.executable)} - {shlex.quote(os.getcwd())}"
    return [ssh, *options, host.name, f"sh -c {shlex.quote(script)}"]


def _query(process: subprocess.Popen[str]) -> Visit:
    """Ask for the time and then for the facts; return what was answered before the other side ended."""
    assert process.stdin is not None
    times: list[tuple[float, float]] = []
    found = None
    with suppress(BrokenPipeError):
        while len(times) < NUM_CLOCK_SAMPLES:
            began = time.time()
            process.stdin.write("time\n")
            process.stdin.flush()
            answer = _line_after(process, TIME_MARK)
            unsure = (time.time() - began) / 2
            match = re.match(r"\d+(\.\d+)?", answer or "")
            if match is None:
                return Visit()
            times.append((unsure, float(match[0]) - began - unsure))
        process.stdin.write(f"python\n{Path(facts.__file__).read_text()}")
        process.stdin.close()
        answer = _line_after(process, facts.HOST_MARK)
        found = None if answer is None else json.loads(answer)
    unsure, skew = min(times, default=(0.0, 0.0))
    return Visit(reached=bool(times), skew_s=skew, half_trip_s=unsure, facts=found)


def _line_after(process: subprocess.Popen[str], mark: str) -> str | None:
    """Return the rest of the next line that begins with the mark; None if the other side has ended."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(mark):
            return line.removeprefix(mark).strip()
    return None


def judge_visit(host: Host, visit: Visit, here: Mapping[str, Any]) -> list[Finding]:
    """Return the findings about one host: ssh and what is installed, its ranks, its clock."""
    name = f"ssh {host.name}"
    if not visit.reached:
        remedy = next((remedy for said, remedy in CAUSES if said in visit.wrong), "ssh {host} true")
        found = f"does not open: {visit.wrong}"
        return [error(name, found, remedy.format(host=host.name))]
    clock = judge_clock(host, visit)
    if visit.facts is None:
        found = f"opens, but {sys.executable} cannot be started there ({visit.wrong})"
        return [error(name, found, _copy_remedy(host)), clock]
    return [_judge_versions(host, visit.facts, here), *_judge_slots(host, visit.facts), clock]


def _judge_versions(host: Host, there: Mapping[str, Any], here: Mapping[str, Any]) -> Finding:
    name = f"ssh {host.name}"
    ours, theirs = here["versions"], there["versions"]
    unlike = {
        package: f"{package} is {theirs[package] or 'missing'} there and {version or 'missing'} here"
        for package, version in ours.items()
        if theirs[package] != version
    }
    for package, digest in here["files"].items():
        if package not in unlike and there["files"][package] != digest:
            unlike[package] = f"{package} {ours[package]} has other files there than here"
    if unlike:
        # DDP works without Horovod.
        say = warning if unlike.keys() == {"horovod"} else error
        return say(name, f"opens, but {'; '.join(unlike.values())}", _copy_remedy(host))
    text = f"opens; Python {ours['python']}, torch {ours['torch']} and all else as here"
    if not there["folder"]:
        found = f"{text}, but not the folder {os.getcwd()}, in which horovodrun starts the ranks"
        remedy = f"ssh {host.name} mkdir -p {shlex.quote(os.getcwd())}    (and copy the job's files)"
        return warning(name, found, remedy)
    return ok(name, f"{text}; {plural(there['cpus'], 'CPU')}, {plural(there['gpus'], 'GPU')}")


def _copy_remedy(host: Host) -> str:
    if sys.prefix == sys.base_prefix:
        return f"ssh {host.name}    (and install there what is installed here)"
    return f"rsync -a {sys.prefix}/ {host.name}:{sys.prefix}/    (or install there what is installed here)"


def _judge_slots(host: Host, there: Mapping[str, Any]) -> list[Finding]:
    """Return a warning if more ranks were requested on a host than it has GPUs, or CPUs if it has no GPU."""
    kind, units = ("GPU", there["gpus"]) if there["gpus"] else ("CPU", there["cpus"])
    if host.slots is None or host.slots <= units:
        return []
    found = f"{plural(host.slots, 'rank')} are to share {plural(units, kind)}"
    why = "NCCL allows one rank per GPU" if kind == "GPU" else "more ranks than CPUs only wait for each other"
    return [warning(f"ranks {host.name}", found, f"--hosts {host.name}:{units}    ({why})")]


def judge_clock(host: Host, visit: Visit) -> Finding:
    """Return whether a host's clock agrees with this one's, as a finding."""
    name, skew = f"clock {host.name}", visit.skew_s
    if abs(skew) <= MAX_SKEW_S + visit.half_trip_s:
        within_ms = 1000 * max(abs(skew), visit.half_trip_s)
        return ok(name, f"as here, within {within_ms:.1f} ms", skew_s=round(skew, 4))
    say = error if abs(skew) > MAX_HARMLESS_SKEW_S + visit.half_trip_s else warning
    side = "ahead of" if skew > 0 else "behind"
    found = f"{_duration(abs(skew))} {side} this host's: the times of logs and files disagree"
    return say(name, found, "timedatectl set-ntp true    (on both)", skew_s=round(skew, 4))


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:,.0f} min"
