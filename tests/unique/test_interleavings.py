"""Pairs of transactions on twins have the outcomes that the documentation has tables of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.unique.interleavings import CONFIGURATIONS, ISOLATIONS, PAGE, Driver, grid, heading

if TYPE_CHECKING:
    import sqlalchemy as sa

NAMES = list(CONFIGURATIONS)
USUAL = [(NAMES[1], "READ COMMITTED")]
"""The combination of the default session: in it the most operations meet."""


@pytest.mark.parametrize(
    ("name", "isolation"),
    [
        pytest.param(name, isolation, marks=[] if (name, isolation) in USUAL else pytest.mark.thorough)
        for name in NAMES
        for isolation in ISOLATIONS
    ],
)
def test_the_outcomes_are_those_of_the_page(engine: sa.Engine, name: str, isolation: Any) -> None:
    driver = Driver(engine, *CONFIGURATIONS[name])
    try:
        found = grid(driver, isolation)
    finally:
        driver.close()
    in_page = "REPEATABLE READ" if isolation == "SERIALIZABLE" else isolation
    section = PAGE.read_text().partition(f"{heading(name, in_page)}\n")[2].partition("\n## ")[0]
    expected = section.strip().splitlines()
    if isolation == "SERIALIZABLE":
        # A transaction may fail for reasons that depend on the plans.
        lines = zip(found.splitlines(), expected, strict=True)
        found = "\n".join(without_failures(line, wanted) for line, wanted in lines)
    assert found.splitlines() == expected


def without_failures(line: str, expected: str) -> str:
    """Return a row of the table, with the expected cells in place of those of transactions that have failed."""
    pairs = zip(line.split("|"), expected.split("|"), strict=True)
    return "|".join(wanted if "40001" in cell or "40001" in wanted else cell for cell, wanted in pairs)
