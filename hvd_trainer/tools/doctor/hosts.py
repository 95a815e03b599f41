"""Check other hosts by one ssh connection to each: whether it opens, what is installed there, and its clock.

here                              there
  facts.py ------------->
          <-------------          1789.25              its clock
          <-------------          {"versions": ...}    what facts.py prints
          <-------------          1789.61              its clock
"""

from __future__ import annotations

import json
import os
import pwd
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hvd_trainer.horovod_build import facts
from hvd_trainer.tools.doctor.context import Context, Host
from hvd_trainer.tools.doctor.findings import Finding, error, ok, warning
from hvd_trainer.utils.process import start_in_thread
from hvd_trainer.utils.text import plural

CONNECT_TIMEOUT_S = 3
MAX_SKEW_S, MAX_HARMLESS_SKEW_S = 1.0, 60.0
"""Beyond the first, times in logs mislead; beyond the second, file times and certificates do, too."""
TIME_MARK = "hvd_trainer time "
OPTIONS = (
    *("BatchMode=yes", f"ConnectTimeout={CONNECT_TIMEOUT_S}", "LogLevel=ERROR"),
    # A new host is accepted and one with a changed key refused, as horovodrun does; no key is stored.
    *("StrictHostKeyChecking=accept-new", "UserKnownHostsFile=/dev/null", "ControlMaster=no"),
)
KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
"""The host keys that ssh knows for all users."""
REMEDIES = {
    "Permission denied": "ssh-copy-id {host}    (once; horovodrun and mpirun cannot type a password)",
    "Connection refused": "apt-get install openssh-server    (on {host}; or name another --ssh-port)",
    "Host key verification failed": "ssh-keygen -R {host}    (if it was set up again: another key was known)",
    "Could not resolve": "getent hosts {host}",
    "timed out": "ping {host}    (is it on? a firewall may stand between)",
    "No route": "ping {host}    (is it on?)",
    "": "ssh {host} true",
}
"""A part of ssh's message, and what to type about it."""


def check_hosts(context: Context) -> Iterator[Finding]:
    """Check all hosts at the same time by ssh: their versions, their CPUs or GPUs, and their clocks."""
    if not context.hosts:
        return
    local = facts.host_facts(os.getcwd())
    for future in [start_in_thread(partial(_check_host, context, local, host), "ssh") for host in context.hosts]:
        yield from future.result()


def _check_host(context: Context, local: Mapping[str, Any], host: Host) -> list[Finding]:
    name, ssh = f"ssh {host.name}", context.programs.find("ssh")
    if context.is_here(host):
        return [ok(name, "this host itself: nothing to reach"), *_judge_slots(host, local)]
    if ssh is None:
        return [error(name, "there is no ssh here, by which hosts are reached", "apt-get install openssh-client")]
    began = time.time()
    answer = context.programs.ask(*_command(context, ssh, host), stdin=Path(facts.__file__))
    asked = began, time.time()
    why = f"no answer in {context.options.timeout_s:g} s" if answer.code is None else answer.last_line
    # A login script may print, too.
    times = [float(text) for text in re.findall(rf"^{TIME_MARK}(\d+(?:\.\d+)?)", answer.out, re.MULTILINE)]
    said = re.search(rf"^{facts.HOST_MARK}(.*)", answer.out, re.MULTILINE)
    if not times:
        remedy = next(remedy for part, remedy in REMEDIES.items() if part in why)
        return [error(name, f"does not open: {why}", remedy.format(host=host.name))]
    clock = _judge_clock(host, times, asked)
    if said is None:
        text = f"opens, but {sys.executable} cannot be started there ({why})"
        return [error(name, text, _copy_remedy(host)), clock]
    remote = json.loads(said[1])
    return [_judge_versions(host, remote, local), *_judge_slots(host, remote), clock]


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
    date, python = f'date "+{TIME_MARK}%s.%N"', shlex.join([sys.executable, "-", os.getcwd()])
    return [ssh, *options, host.name, f"sh -c {shlex.quote(f'{date}; {python} && {date}')}"]


def _judge_versions(host: Host, remote: Mapping[str, Any], local: Mapping[str, Any]) -> Finding:
    name = f"ssh {host.name}"
    versions, remote_versions = local["versions"], remote["versions"]
    unlike = {
        package: f"{package} is {remote_versions[package] or 'missing'} there and {version or 'missing'} here"
        for package, version in versions.items()
        if remote_versions[package] != version
    }
    for package, digest in local["files"].items():
        if package not in unlike and remote["files"][package] != digest:
            unlike[package] = f"{package} {versions[package]} has other files there than here"
    if unlike:
        # DDP works without Horovod.
        say = warning if unlike.keys() == {"horovod"} else error
        return say(name, f"opens, but {'; '.join(unlike.values())}", _copy_remedy(host))
    text = f"opens; Python {versions['python']}, torch {versions['torch']} and all else as here"
    if not remote["folder"]:
        problem = f"{text}, but not the folder {os.getcwd()}, in which horovodrun starts the ranks"
        remedy = f"ssh {host.name} mkdir -p {shlex.quote(os.getcwd())}    (and copy the job's files)"
        return warning(name, problem, remedy)
    return ok(name, f"{text}; {plural(remote['cpus'], 'CPU')}, {plural(remote['gpus'], 'GPU')}")


def _copy_remedy(host: Host) -> str:
    if sys.prefix == sys.base_prefix:
        return f"ssh {host.name}    (and install there what is installed here)"
    return f"rsync -a {sys.prefix}/ {host.name}:{sys.prefix}/    (or install there what is installed here)"


def _judge_slots(host: Host, remote: Mapping[str, Any]) -> Iterator[Finding]:
    """Warn if more ranks were requested on a host than it has GPUs, or CPUs if it has no GPU."""
    kind, units = ("GPU", remote["gpus"]) if remote["gpus"] else ("CPU", remote["cpus"])
    if host.slots is not None and host.slots > units:
        why = "NCCL allows one rank per GPU" if kind == "GPU" else "more ranks than CPUs only wait for each other"
        text = f"{plural(host.slots, 'rank')} are to share {plural(units, kind)}"
        yield warning(f"ranks {host.name}", text, f"--hosts {host.name}:{units}    ({why})")


def _judge_clock(host: Host, times: list[float], asked: tuple[float, float]) -> Finding:
    """Compare a host's clock with this one's: its first time is not from before the connection, nor its last from
    after it, which bounds the difference (as in NTP, RFC 5905).
    """
    upper, lower = times[0] - asked[0], times[-1] - asked[1]
    skew, unsure = (upper + lower) / 2, (upper - lower) / 2
    name, figures = f"clock {host.name}", {"skew_s": round(skew, 4)}
    if abs(skew) <= MAX_SKEW_S + unsure:
        return ok(name, f"as here, within {max(abs(skew), unsure):.2g} s", **figures)
    say = error if abs(skew) > MAX_HARMLESS_SKEW_S + unsure else warning
    distance = f"{abs(skew):.1f} s" if abs(skew) < 120 else f"{abs(skew) / 60:,.0f} min"
    text = f"{distance} {'ahead of' if skew > 0 else 'behind'} this host's: the times of logs and files disagree"
    return say(name, text, "timedatectl set-ntp true    (on both)", **figures)
