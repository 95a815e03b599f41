"""Audits the environment that it runs in by pip-audit, and fails on a finding that nobody has answered.

The answers are in audit-answers.yaml. pip-audit asks a service on the internet: where that does not answer,
nothing is audited, which is said and is no failure.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ANSWERS = Path(__file__).with_name("audit-answers.yaml")
PIP_AUDIT = [sys.executable, "-m", "pip_audit"]


def main(options: Sequence[str]) -> int:
    """Returns the exit code.

    Args:
        options: further ones of pip-audit, such as `-s osv`.
    """
    subprocess.run([*PIP_AUDIT, "--version"], check=True)
    command = [*PIP_AUDIT, "--format", "json", "--desc", "off", "--aliases", "on", "--progress-spinner", "off"]
    asked = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    try:
        packages = json.loads(asked.stdout)["dependencies"]
    except ValueError:
        last = (asked.stderr.strip().splitlines() or ["it said nothing"])[-1]
        print(f"audit: not audited: no answer from the service ({last})")
        return 0
    known = {package["name"]: package for package in packages if "vulns" in package}
    if not known:
        print(f"audit: not audited: no answer from the service (it knows none of {len(packages)} packages)")
        return 0
    if unknown := [package["name"] for package in packages if package["name"] not in known]:
        print(f"audit: not known to the service: {', '.join(unknown)}")
    open_ones = judge(known, yaml.safe_load(ANSWERS.read_text()))
    print(f"audit: {len(known)} packages audited, {open_ones} findings without an answer")
    return int(open_ones > 0)


def judge(known: Mapping[str, Mapping[str, Any]], answers: Mapping[str, Mapping[str, Any]]) -> int:
    """Prints each finding with its answer; returns how many have none."""
    used, open_ones = set(), 0
    for name, package in known.items():
        for found in package["vulns"]:
            ids = [found["id"], *found["aliases"]]
            what = f"{name} {package['version']}: {', '.join(ids)}"
            answered = [one for one in ids if one in answers and answers[one]["package"] == name]
            used.update(answered)
            if answered:
                answer = answers[answered[0]]
                print(f"audit: {what}: answered on {answer['date']}: {answer['answer']}")
            else:
                open_ones += 1
                fixed = ", ".join(found["fix_versions"])
                print(
                    f"audit: {what}: "
                    + (f"take {fixed} in constraints.txt" if fixed else "there is no fixed version")
                    + f", or say in {ANSWERS.name} why it does no harm"
                )
    for one, answer in answers.items():
        if one not in used and answer["package"] in known:
            print(f"audit: {one} is not found any more: take its answer out of {ANSWERS.name}")
    return open_ones


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
