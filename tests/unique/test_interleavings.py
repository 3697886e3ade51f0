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
    section = PAGE.read_text().partition(f"{heading(name, isolation)}\n")[2].partition("\n## ")[0]
    assert found.splitlines() == section.strip().splitlines()
