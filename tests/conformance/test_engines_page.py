"""The page about engines says what the engines refuse and what the suite cannot test on them."""

from __future__ import annotations

import inspect

import pytest

from sqlaqueue.testing import StrategyConformance
from sqlaqueue.testing.conformance.engines import ENGINES, EngineUnderTest
from tests.conformance.engines_table import PAGE, page

pytestmark = pytest.mark.once


def test_the_table_of_the_page_is_up_to_date() -> None:
    text = PAGE.read_text()
    assert text == page(text), "run python -m tests.conformance --write"


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.dialect)
def test_each_reason_is_that_of_a_test(engine: EngineUnderTest) -> None:
    for name in engine.reasons:
        test, _, value = name.partition("[")
        function = getattr(StrategyConformance, test)
        if value:
            marks = [mark for mark in function.pytestmark if mark.name == "parametrize"]
            assert any(value.removesuffix("]") in mark.args[1] for mark in marks), inspect.getsource(function)
