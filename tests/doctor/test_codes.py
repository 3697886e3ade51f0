"""The codes of findings: in the code, in the list and on the page of the documentation."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from sqlaqueue import admin
from sqlaqueue.admin.doctor.doctor import CHECKS, COMPLETE

pytestmark = pytest.mark.once

FOLDER = Path(admin.__file__).parent / "doctor"
FAULTS = Path(admin.__file__).parents[1] / "postgresql"
PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
SEVERITIES = {"critical", "warning", "notice"}
COMPUTED = {
    "fsync_off": {"critical"},
    "full_page_writes_off": {"critical"},
    "synchronous_commit_off": {"notice"},
    "missing_index": {"warning", "critical"},
    "invalid_index": {"warning", "critical"},
    "altered_index": {"warning", "critical"},
    "leftover_index": {"warning"},
    "index_building": {"warning", "notice"},
    "missing_function": {"warning", "critical"},
    "outdated_function": {"warning"},
    "newer_function": {"warning"},
}
"""The codes that are made from the name of a setting, or from the state of an index or a function."""


def sources() -> str:
    return "".join(module.read_text() for module in FOLDER.glob("*.py") if module.name != "examination.py")


def words(node: ast.expr) -> set[str]:
    return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def found() -> dict[str, set[str]]:
    """Return the codes of all findings in the code, each with its severities."""
    codes: dict[str, set[str]] = {}
    for path in (*FOLDER.glob("*.py"), *FAULTS.glob("faults*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id == "Finding":
                given = {each.arg: each.value for each in node.keywords}
                severity, code = given["severity"], given["code"]
            elif node.func.id == "Fault":
                severity, code = node.args[:2]
            else:
                continue
            if not isinstance(code, ast.JoinedStr):
                for each in words(code):
                    codes.setdefault(each, set()).update(words(severity) & SEVERITIES)
    return codes


def test_the_page_lists_every_code_with_its_severities() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\w, ]+) \| [^|]+ \| [^|]+ \|$", PAGE.read_text(), re.MULTILINE)
    assert {code: set(severities.split(", ")) for code, severities in rows} == found() | COMPUTED
    assert len(rows) == len({code for code, _ in rows})


def test_the_page_lists_every_threshold() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|`]+ \| [^|]+ \|$", PAGE.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(each.name for each in fields(admin.Thresholds))


def test_every_check_is_made() -> None:
    made = r"^(?:def )?(check_\w+)(?:\(\s*examination\b| = _check_of\()"
    defined = set(re.findall(made, sources(), re.MULTILINE))
    assert defined == {check.__name__ for check in (*COMPLETE, *CHECKS)} | {"check_durability"}
