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
        # transactions, so that one process does not run all jobs before another one polls.
        keys = [
            key for _ in range(20) for key in harness.enqueue(*(["work", *["quiet"] * 9] * (JOBS // 200)), priority=0)
        ]
        harness.wait_until(lambda: len(with_event(harness.records(), "completed")) == JOBS, "all jobs are completed")
        harness.finish()
        starts = Counter(record.key for record in with_event(harness.records(), "start"))
        assert starts == dict.fromkeys(keys, 1)
        assert sum(bool(worker.records("completed")) for worker in workers) > 1, "one process has run all jobs"
        outputs = [harness.output_of(worker) for worker in workers]
        assert [output for output in outputs if "OperationalError" in output] == []
