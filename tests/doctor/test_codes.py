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
PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
OF_SETTINGS = {"fsync_off", "full_page_writes_off", "synchronous_commit_off"}
"""The code is made from the name of the setting."""


def sources() -> str:
    return "".join(module.read_text() for module in FOLDER.glob("*.py") if module.name != "examination.py")


def test_every_code_is_listed() -> None:
    used = {
        code for line in re.findall(r"\bcode=([^\n]*),\n", sources()) for code in re.findall(r'(?<!f)"(\w+)"', line)
    }
    assert used | OF_SETTINGS == set(CODES)


def test_the_page_lists_every_code_with_its_severities() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\w, ]+) \| [^|]+ \| [^|]+ \|$", PAGE.read_text(), re.MULTILINE)
    assert {code: tuple(severities.split(", ")) for code, severities in rows} == dict(CODES)
    assert len(rows) == len(CODES)


def test_the_page_lists_every_threshold() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|`]+ \| [^|]+ \|$", PAGE.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(each.name for each in fields(admin.Thresholds))


def test_every_check_is_made() -> None:
    defined = set(re.findall(r"^def (check_\w+)\(examination", sources(), re.MULTILINE))
    assert defined == {check.__name__ for check in (*COMPLETE, *CHECKS)} | {"check_durability"}
