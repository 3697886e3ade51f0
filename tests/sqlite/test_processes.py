"""Several processes on one file: each job runs once, and no statement of the library finds the database locked."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.faults.history import with_event

if TYPE_CHECKING:
    from tests.sqlite.conftest import MakeHarness

pytestmark = pytest.mark.once

JOBS = 1000


@pytest.mark.parametrize(("api", "processes"), [("sync", 2), ("async", 4)])
def test_processes_drain_a_file(make_harness: MakeHarness, processes: int) -> None:
    with make_harness(timeout=120) as harness:
        workers = [harness.start_worker(batch_size=10, lease=60) for _ in range(processes)]
        harness.wait_until(lambda: all(worker.records("ready") for worker in workers), "all processes poll")
        # A handler in ten writes, so that its transaction competes with those of the library. In several
        # transactions, and until a second process has claimed, as one alone may be fast enough for all jobs.
        keys: list[int] = []
        while len(keys) < JOBS or (sum(bool(each.records("start")) for each in workers) < 2 and len(keys) < 20 * JOBS):
            keys += harness.enqueue(*(["work", *["quiet"] * 9] * (JOBS // 200)), priority=0)
        harness.wait_until(
            lambda: len(with_event(harness.records(), "completed")) == len(keys), "all jobs are completed"
        )
        harness.finish()
        starts = Counter(record.key for record in with_event(harness.records(), "start"))
        assert starts == dict.fromkeys(keys, 1)
        assert sum(bool(worker.records("start")) for worker in workers) > 1, "one process has run all jobs"
        assert [worker.output for worker in workers if "OperationalError" in worker.output] == []
