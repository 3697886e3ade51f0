"""A plain queue makes and sends what is on file, and nothing else."""

from __future__ import annotations

import pytest

from tests.benchmarks import statements
from tests.servers import Database

pytestmark = pytest.mark.once

ADVICE = "If it is meant to change, `python -m tests.benchmarks plain --write` puts the new text on file."


@pytest.mark.parametrize("strategy", statements.STRATEGIES)
def test_the_sql_of_a_plain_queue_is_on_file(strategy: str, database: Database) -> None:
    changed = statements.differences(strategy, statements.record(strategy, database))
    assert not changed, "\n".join([*changed, ADVICE])


def test_each_difference_is_found() -> None:
    known = {name: [text] for name, text in statements.read("batch_select").items()}
    assert statements.differences("batch_select", known) == []
    for name in statements.SECTIONS:
        changed = {**known, name: [*known[name], "SELECT 1 AS something_new"]}
        assert statements.differences("batch_select", changed)
