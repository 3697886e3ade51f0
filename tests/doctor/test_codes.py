"""The codes of findings: in the code, in the list and on the page of the documentation."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from sqlaqueue import admin
from sqlaqueue.admin.doctor.doctor import CHECKS, COMPLETE
from sqlaqueue.admin.doctor.examination import CODES

pytestmark = pytest.mark.once

FOLDER = Path(admin.__file__).parent / "doctor"
FAULTS = Path(admin.__file__).parents[1] / "postgresql"
PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
OF_SETTINGS = {"fsync_off", "full_page_writes_off", "synchronous_commit_off"}
"""The code is made from the name of the setting."""
OF_STATES = {
    *("missing_index", "invalid_index", "altered_index", "leftover_index", "index_building"),
    *("missing_function", "outdated_function", "newer_function"),
}
"""The code is made from the state of the index or the function."""


def sources() -> str:
    return "".join(module.read_text() for module in FOLDER.glob("*.py") if module.name != "examination.py")


def test_every_code_is_listed() -> None:
    faults = "".join(module.read_text() for module in FAULTS.glob("faults*.py"))
    # The code is the second argument of a fault.
    lines = re.findall(r"\bcode=([^\n]*),\n", sources()) + re.findall(r"\bFault\(\n[^\n]+\n([^\n]+),\n", faults)
    used = {code for line in lines for code in re.findall(r'(?<!f)"(\w+)"', line)}
    assert used | OF_SETTINGS | OF_STATES == set(CODES)


def test_the_page_lists_every_code_with_its_severities() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\w, ]+) \| [^|]+ \| [^|]+ \|$", PAGE.read_text(), re.MULTILINE)
    assert {code: tuple(severities.split(", ")) for code, severities in rows} == dict(CODES)
    assert len(rows) == len(CODES)


def test_the_page_lists_every_threshold() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|`]+ \| [^|]+ \|$", PAGE.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(each.name for each in fields(admin.Thresholds))


def test_every_check_is_made() -> None:
    made = r"^(?:def )?(check_\w+)(?:\(\s*examination\b| = _check_of\()"
    defined = set(re.findall(made, sources(), re.MULTILINE))
    assert defined == {check.__name__ for check in (*COMPLETE, *CHECKS)} | {"check_durability"}
