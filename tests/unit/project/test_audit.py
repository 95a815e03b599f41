"""`make audit` for several answers of pip-audit, which a module of its name replaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from launchers import REPOSITORY
from waiting import PATIENCE_S

SCRIPT = REPOSITORY / ".ci/audit.py"


def package(name: str, *ids: str, fixed: tuple[str, ...] = ()) -> dict[str, Any]:
    found = [{"id": ids[0], "aliases": list(ids[1:]), "fix_versions": list(fixed)}] if ids else []
    return {"name": name, "version": "1.0", "vulns": found}


@pytest.fixture
def audit(tmp_path: Path) -> Any:
    """Return how to run the audit on pip-audit's answer: an object as JSON, a text, or nothing and an error."""

    def run(answer: Any) -> tuple[int, str]:
        text = answer if isinstance(answer, str) else json.dumps({"dependencies": answer, "fixes": []})
        code = (
            f"import sys\nif '--version' not in sys.argv:\n    print({text!r})\n    sys.exit('no route to host')\n"
        )
        (tmp_path / "pip_audit.py").write_text(code)
        done = subprocess.run(
            [sys.executable, str(SCRIPT)],
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert not done.stderr
        return done.returncode, done.stdout

    return run


def test_audit_without_a_service_says_so(audit: Any) -> None:
    skipped = [{"name": "torch", "skip_reason": "not found"}, {"name": "numpy", "skip_reason": "not found"}]
    for answer, why in (("", "no route to host"), (skipped, "it knows none of 2 packages")):
        assert audit(answer) == (0, f"audit: not audited: no answer from the service ({why})\n")


def test_audit_fails_on_findings_without_an_answer(audit: Any) -> None:
    code, said = audit([package("horovod", "PYSEC-0-0", "CVE-2024-10190"), package("torch")])
    assert code == 0
    assert "horovod 1.0: PYSEC-0-0, CVE-2024-10190: answered on 2026-" in said
    assert "2 packages audited, 0 findings without an answer" in said
    assert "CVE-2026-31234 is not found any more: take its answer out" in said
    code, said = audit([package("torch", "CVE-0-1", fixed=("2.0", "1.1")), package("numpy", "CVE-2024-10190")])
    assert code == 1
    assert "torch 1.0: CVE-0-1: take 2.0, 1.1 in constraints.txt, or say in audit-answers.yaml why" in said
    assert "numpy 1.0: CVE-2024-10190: there is no fixed version, or say" in said
    assert "2 findings without an answer" in said
    code, said = audit([package("torch"), {"name": "mine", "skip_reason": "not found"}])
    assert (code, said.splitlines()[0]) == (0, "audit: not known to the service: mine")


def test_audit_answers_are_complete() -> None:
    for name, answer in yaml.safe_load((REPOSITORY / ".ci/audit-answers.yaml").read_text()).items():
        assert set(answer) == {"package", "date", "answer"}, name
        assert isinstance(answer["date"], date), name
