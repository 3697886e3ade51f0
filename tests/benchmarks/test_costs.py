"""The costs of a job do not increase: statements, round trips, WAL and dead rows of each strategy."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks import costs
from tests.servers import Server

pytestmark = pytest.mark.once

KNOWN = json.loads(costs.FILE.read_text())

ADVICE = "To accept the new counts, run `python -m tests.benchmarks costs --write`."


def test_the_costs_of_a_job_do_not_increase(postgres_server: Server) -> None:
    # WAL and dead rows differ between versions of PostgreSQL; statements and round trips do not.
    same = postgres_server.version == KNOWN["postgres"]
    what = list(costs.TOLERANCES) if same else ["statements", "round_trips"]
    found = costs.count_all(postgres_server)
    if costs.increases(KNOWN["costs"], found, what):
        # A pause of the machine may cause maintenance tasks while counting, but hardly twice.
        found = costs.minimum(found, costs.count_all(postgres_server))
    more = costs.increases(KNOWN["costs"], found, what)
    assert not more, "\n".join([*more, ADVICE])


def test_the_file_has_all_counts() -> None:
    names = {drain.name for drain in costs.DRAINS}
    assert names <= set(KNOWN["costs"])


def test_increases_are_reported() -> None:
    known = {"a": {"jobs": 100.0, "statements": 0.2, "wal_bytes": 500.0}}
    same = {"a": {"jobs": 100.0, "statements": 0.22, "wal_bytes": 514.0}}
    assert costs.increases(known, same, ["statements", "wal_bytes"]) == []
    more = {"a": {"jobs": 100.0, "statements": 0.3, "wal_bytes": 600.0}}
    assert costs.increases(known, more, ["statements", "wal_bytes"]) == [
        "a: statements per job increased from 0.2 to 0.3",
        "a: wal_bytes per job increased from 500 to 600",
    ]


def test_the_minimum_of_two_counts() -> None:
    one = {"a": {"jobs": 10.0, "statements": 2.0, "dead_rows": 1.0}}
    other = {"a": {"jobs": 10.0, "statements": 1.0, "dead_rows": 3.0}}
    assert costs.minimum(one, other) == {"a": {"jobs": 10.0, "statements": 1.0, "dead_rows": 1.0}}


def test_new_counts_are_reported() -> None:
    assert costs.increases({}, {"a": {"jobs": 1000.0, "wal_bytes": 1.0}}, ["wal_bytes"])
