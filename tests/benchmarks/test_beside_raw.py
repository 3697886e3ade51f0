"""The measurements of the library beside a loop by hand end, and a drain completes the jobs of both."""

from __future__ import annotations

from functools import partial

import pytest

from tests.benchmarks.beside_raw.measures import cell, medians
from tests.benchmarks.sqlite.__main__ import cases, file
from tests.benchmarks.sqlite.sides import LibrarySqlite, RawSqlite

pytestmark = pytest.mark.once


CASES = [pytest.param(*found, id=found[0]) for found in cases(20) if "4 processes" not in found[0]]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_both_sides_are_measured(name: str, case: partial[float]) -> None:
    found = medians(case, [partial(file, side, "NORMAL") for side in (RawSqlite, LibrarySqlite)], 1)
    assert len(found) == 2
    assert min(found) > 0
    assert cell(name, 1234.567) == ("1,234.57" if name.endswith("ms") else "1,235")
