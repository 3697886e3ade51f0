"""No job costs more than the last time: statements, round trips, WAL and dead rows of each strategy."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks import costs
from tests.servers import Server

pytestmark = pytest.mark.once

KNOWN = json.loads(costs.FILE.read_text())

ADVICE = "If it is worth that, `python -m tests.benchmarks costs --write` puts the new counts on file."


def test_no_job_costs_more(postgres_server: Server) -> None:
    # How much is logged, and which rows die, differs from version to version; what is sent does not.
    same = postgres_server.version == KNOWN["postgres"]
    what = list(costs.TOLERANCES) if same else ["statements", "round_trips"]
    found = costs.count_all(postgres_server)
    if costs.grown(KNOWN["costs"], found, what):
        # On a machine that stands still for seconds a Consumer tends its queue, and settles by time: not twice so.
        found = costs.least(found, costs.count_all(postgres_server))
    more = costs.grown(KNOWN["costs"], found, what)
    assert not more, "\n".join([*more, ADVICE])


def test_the_file_holds_what_is_counted() -> None:
    works = {work.name for work in costs.WORKS}
    assert works <= set(KNOWN["costs"])


def test_what_grows_is_told() -> None:
    known = {"a": {"jobs": 100.0, "statements": 0.2, "wal_bytes": 500.0}}
    same = {"a": {"jobs": 100.0, "statements": 0.22, "wal_bytes": 514.0}}
    assert costs.grown(known, same, ["statements", "wal_bytes"]) == []
    more = {"a": {"jobs": 100.0, "statements": 0.3, "wal_bytes": 600.0}}
    assert costs.grown(known, more, ["statements", "wal_bytes"]) == [
        "a: statements a job were 0.2 and are 0.3",
        "a: wal_bytes a job were 500 and are 600",
    ]


def test_the_least_of_two_counts() -> None:
    one = {"a": {"jobs": 10.0, "statements": 2.0, "dead_rows": 1.0}}
    other = {"a": {"jobs": 10.0, "statements": 1.0, "dead_rows": 3.0}}
    assert costs.least(one, other) == {"a": {"jobs": 10.0, "statements": 1.0, "dead_rows": 1.0}}


def test_what_is_new_has_to_be_put_on_file() -> None:
    assert costs.grown({}, {"a": {"jobs": 1000.0, "wal_bytes": 1.0}}, ["wal_bytes"])
