"""A full disk: statements raise errors, and when there is space again, all jobs run."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from tests.programs import wait_until

if TYPE_CHECKING:
    from tests.sqlite.bench import SQLiteBench

pytestmark = pytest.mark.once

JOBS = 40


class Disk:
    """The space that the connections of some engines have."""

    pages = 1_000_000

    def limit(self, engine: sa.Engine) -> None:
        """Let each transaction of an engine have the pages that there are now."""

        @event.listens_for(engine, "checkout")
        def checkout(connection: Any, *_: object) -> None:
            cursor = connection.cursor()
            cursor.execute(f"PRAGMA max_page_count = {self.pages}")
            cursor.close()


def test_jobs_run_when_there_is_space_again(bench: SQLiteBench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "sqlaqueue")

    async def write(io: Any, job: Any) -> None:
        await io.execute(bench.effect(job.id, "x" * 6000))

    keys = bench.enqueue(JOBS, max_attempts=1_000_000)
    server, disk = bench.consumer(write, batch_size=4, concurrency=1), Disk()
    disk.limit(server.sync_engine)
    disk.pages = bench.execute("PRAGMA page_count") + 12
    with server.running():
        wait_until(lambda: "disk is full" in caplog.text, "an error about the disk")
        assert bench.states()["completed"] < JOBS
        disk.pages = 1_000_000
        # The waits after errors become longer and longer.
        wait_until(lambda: bench.states() == Counter(completed=JOBS), "all jobs are completed", 60)
    assert bench.effects() == dict.fromkeys(keys, 1)


@pytest.mark.parametrize("api", ["sync"])
def test_an_enqueue_without_space_adds_nothing(bench: SQLiteBench) -> None:
    bench.enqueue(2)
    disk = Disk()
    disk.limit(bench.engine)
    disk.pages = bench.execute("PRAGMA page_count")
    with bench.sessions() as session:
        session.add_all([bench.Job(payload="x" * 6000) for _ in range(10)])
        with pytest.raises(sa.exc.OperationalError, match="full"):
            session.commit()
    disk.pages = 1_000_000
    assert len(bench.rows()) == 2
    assert len(bench.enqueue(10, payload="x" * 6000)) == 10
