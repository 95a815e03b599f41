"""Each exact version in constraints.txt installs on each Python that setup.cfg names."""

from __future__ import annotations

import configparser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[3]
LINES = (ROOT / "constraints.txt").read_text().splitlines()
PINS = [Requirement(line) for line in LINES if line and not line.startswith("#")]


def pythons() -> list[str]:
    """Return the oldest release of each Python that setup.cfg names."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    words = [line.rpartition(" ")[2] for line in parser["metadata"]["classifiers"].splitlines()]
    return [f"{word}.0" for word in words if word.startswith("3.")]


@pytest.mark.parametrize("python", pythons())
def test_a_version_is_for_each_python(python: str) -> None:
    """One that wants a later Python needs a marker: pymdown-extensions 13 wants 3.11.5, and Debian 12 has 3.11.2.

    Only the versions that are installed here can say what they want.
    """
    environment = {**default_environment(), "python_full_version": python, "python_version": python[:-2]}
    wrong = []
    for pin in PINS:
        installed = {one.version for one in metadata.distributions(name=pin.name)}
        if pin.marker is not None and not pin.marker.evaluate(environment):
            continue
        for version in installed & {one.version for one in pin.specifier}:
            wanted = metadata.metadata(pin.name).get("Requires-Python", "")
            if not SpecifierSet(wanted).contains(python):
                wrong.append(f"{pin.name}=={version} wants Python {wanted}")
    assert not wrong
