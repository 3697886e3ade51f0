"""The SQL of a plain queue is that of the files in plain/."""

from __future__ import annotations

import pytest

from tests.benchmarks import plain_sql
from tests.servers import Database

pytestmark = pytest.mark.once

ADVICE = "To accept the new SQL, run `python -m tests.benchmarks plain --write`."


@pytest.mark.parametrize("strategy", plain_sql.STRATEGIES)
def test_the_sql_of_a_plain_queue_is_unchanged(strategy: str, database: Database) -> None:
    changed = plain_sql.differences(strategy, plain_sql.record(strategy, database))
    assert not changed, "\n".join([*changed, ADVICE])


def test_each_difference_is_found() -> None:
    known = {name: [text] for name, text in plain_sql.read("batch_select").items()}
    assert plain_sql.differences("batch_select", known) == []
    for name in plain_sql.SECTIONS:
        changed = {**known, name: [*known[name], "SELECT 1 AS something_new"]}
        assert plain_sql.differences("batch_select", changed)
