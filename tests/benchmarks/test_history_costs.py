"""The measurement of an attempt history runs, and what does not depend on the machine stays within bounds."""

from __future__ import annotations

import pytest

from tests.benchmarks import history
from tests.benchmarks.server import bench_server

pytestmark = pytest.mark.once


def test_the_costs_of_a_history() -> None:
    case = history.CASES[0]
    with bench_server(durable=False, more="autovacuum = off") as server:
        found = history.compare(server, case, 1, factor=0.1)
    assert found.ratio > 0
    # A row with its three index entries.
    assert 200 < found.wal_with - found.wal_without < 700
