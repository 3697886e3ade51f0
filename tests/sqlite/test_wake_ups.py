"""Idle workers begin at once for jobs that this process enqueues; for others they poll."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session

import sqlaqueue.sqlite
from sqlaqueue.engines.notifications import subscribe
from tests.programs import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sqlite.bench import SQLiteBench

pytestmark = pytest.mark.once

HOUR = 3600


class Claims:
    """Counts the claims on an engine."""

    def __init__(self, engine: sa.Engine) -> None:
        self.number = 0
        event.listen(engine, "before_cursor_execute", self._count)

    def _count(self, _: Any, __: Any, statement: str, *___: Any) -> None:
        self.number += "UPDATE job SET status" in statement and "picked" in statement


@pytest.fixture(params=["{}/./{}", "file:{}/{}?uri=true", "file://{}/{}?mode=rwc&uri=true"])
def other_engine(request: pytest.FixtureRequest, bench: SQLiteBench) -> Iterator[sa.Engine]:
    """Another engine of this process on the same file, by another spelling of its path."""
    path = bench.file.path
    engine = sa.create_engine(f"sqlite:///{request.param.format(path.parent, path.name)}")
    sqlaqueue.sqlite.prepare(engine)
    yield engine
    engine.dispose()


@pytest.mark.each_value
def test_idle_workers_begin_at_once(bench: SQLiteBench, other_engine: sa.Engine) -> None:
    """They have claimed once and would poll again after an hour."""
    ran: list[int] = []

    async def handle(io: Any, job: Any) -> None:
        ran.append(job.id)

    server = bench.consumer(handle, poll_interval=HOUR, concurrency=3)
    claims = Claims(server.sync_engine)
    with server.running():
        wait_until(lambda: claims.number >= 1, "the first poll")
        idle = claims.number
        for number in range(1, 6):
            with Session(other_engine) as session:
                session.add(bench.Job())
                session.commit()
            wait_until(lambda number=number: len(ran) == number, "the job runs")
        wait_until(lambda: bench.states()["completed"] == 5, "the jobs are completed")
    # For each job a claim that finds it and one that finds no other, not one of each worker.
    assert idle <= 3
    assert claims.number - idle <= 5 * 3


@pytest.mark.parametrize("api", ["sync"])
def test_only_commits_of_jobs_wake_workers(bench: SQLiteBench, other_engine: sa.Engine) -> None:
    heard: list[tuple[str, str]] = []
    end = subscribe(bench.engine, lambda *what: heard.append(what))
    with Session(other_engine) as session:
        session.add(bench.Job())
        session.flush()
        session.rollback()
        session.add(bench.Owner(name="of no job"))
        session.commit()
        assert heard == []
        session.add_all([bench.Job(), bench.Job()])
        session.flush()
        session.add(bench.Job())
        session.flush()
        assert heard == []
        session.commit()
    assert len(heard) == 1, "one notification for each transaction"
    end()
    bench.enqueue()
    assert len(heard) == 1


@pytest.mark.parametrize("api", ["sync"])
def test_an_idle_consumer_polls_at_its_interval_only(bench: SQLiteBench) -> None:
    """The file is not read all the time: a Consumer that is idle executes no claim until the next poll."""
    server = bench.consumer(poll_interval=HOUR, concurrency=4)
    claims, quiet = Claims(server.sync_engine), threading.Event()
    with server.running():
        wait_until(lambda: claims.number >= 1, "the first poll")
        quiet.wait(0.5)
        assert claims.number <= 4
