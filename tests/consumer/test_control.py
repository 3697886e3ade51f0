"""Control of a queue with running Consumers: pauses, cancellation of running jobs, and the table of consumers."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

import sqlaqueue
from sqlaqueue import cancel, claim, consumers, pause, paused, resume
from sqlaqueue.consumer import pace
from tests.consumer.bench import LATER, Bench, await_listening, idle
from tests.consumer.conftest import Supply
from tests.programs import wait_until


@pytest.fixture(autouse=True)
def no_rescues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "RESCUE", LATER)


@pytest.fixture
def paused_bench(mixed: Bench) -> Iterator[Bench]:
    mixed.in_session(pause(mixed.Job))
    yield mixed
    mixed.in_session(resume(mixed.Job))


def test_no_job_of_a_paused_queue_is_claimed(paused_bench: Bench) -> None:
    bench = paused_bench
    bench.enqueue(2)
    with bench.sessions() as session:
        assert session.execute(claim(bench.Job, 2)).all() == []
        assert session.scalar(paused(bench.Job)) is True
    assert bench.consumer().drain() == 0
    bench.in_session(pause(bench.Job))
    bench.in_session(resume(bench.Job))
    with bench.sessions() as session:
        assert session.scalar(paused(bench.Job)) is False
    assert bench.consumer().drain() == 2


def test_consumers_respect_a_pause(mixed: Bench) -> None:
    with idle(mixed).running() as server:
        await_listening(server)
        mixed.in_session(pause(mixed.Job))
        mixed.enqueue()
        # It polls when it is notified, and finds nothing: then no announcement is open.
        wait_until(lambda: not server.context.polls._announcements._open)
        assert mixed.states() == {"pending": 1}
        mixed.in_session(resume(mixed.Job))
        wait_until(lambda: mixed.states() == {"completed": 1})


def test_a_pause_does_not_expire(paused_bench: Bench) -> None:
    """Requests to cancel expire after a day."""
    bench = paused_bench
    bench.execute("UPDATE sqlaqueue_control SET created_at = now() - interval '1 year'")
    bench.execute("INSERT INTO sqlaqueue_control VALUES ('job', '[1]', now() - interval '1 year')")
    with idle(bench).running():
        wait_until(lambda: bench.execute("SELECT count(*) FROM sqlaqueue_control WHERE key = '[1]'") == 0)
    with bench.sessions() as session:
        assert session.scalar(paused(bench.Job)) is True


def test_a_cancellation_is_requested_without_delay(mixed: Bench) -> None:
    key = mixed.enqueue()[0]
    started, go_on = threading.Event(), threading.Event()

    async def work(io: Any, job: Any) -> None:
        started.set()
        await io.wait(go_on)
        raise ValueError

    with mixed.consumer(work, poll_interval=LATER).running() as server:
        await_listening(server)
        assert started.wait(30)
        mixed.in_session(cancel(sa.select(mixed.Job).where(mixed.Job.id == key)))
        wait_until(lambda: mixed.execute("SELECT count(*) FROM sqlaqueue_control") == 0)
        go_on.set()
        wait_until(lambda: mixed.states() == {"cancelled": 1})


def test_a_run_that_ends_while_its_request_is_taken_is_cancelled(supply: Supply) -> None:
    """The request is deleted by then; a run that is tried again would never be cancelled."""
    bench = supply.take("update_status", "sync")
    key = bench.enqueue()[0]
    started, go_on, taken = (threading.Event() for _ in range(3))

    async def work(io: Any, job: Any) -> None:
        started.set()
        await io.wait(go_on)
        raise ValueError

    def look(_: Any, __: Any, statement: str, *___: Any) -> None:
        if "sqlaqueue_asked" in statement and bench.execute("SELECT count(*) FROM sqlaqueue_control") > 0:
            taken.set()

    def end_the_run(_: Any) -> None:
        if taken.is_set() and not go_on.is_set():
            go_on.set()
            wait_until(lambda: bench.states()["processing"] == 0)

    server = bench.consumer(work, poll_interval=LATER)
    sa.event.listen(server.sync_engine, "before_cursor_execute", look)
    sa.event.listen(server.session, "after_commit", end_the_run)
    with server.running():
        await_listening(server)
        assert started.wait(30)
        bench.in_session(cancel(sa.select(bench.Job).where(bench.Job.id == key)))
        wait_until(lambda: bench.states() == {"cancelled": 1})


def test_consumers_are_listed(mixed: Bench) -> None:
    started, go_on = threading.Event(), threading.Event()

    async def work(io: Any, job: Any) -> None:
        started.set()
        await io.wait(go_on)

    key = mixed.enqueue()[0]
    with mixed.consumer(work, poll_interval=LATER, name="left").running() as server:
        assert started.wait(30)
        await_listening(server)

        def said() -> list[Any]:
            return [(row.running, row.listening) for row in mixed.in_session(consumers(mixed.Job))]

        # It says so when it checks in, which may be under way.
        wait_until(
            lambda: said() == [([[str(key)]], True)], "that it registers its running job, and that it is listening"
        )
        (row,) = mixed.in_session(consumers(mixed.Job))
        assert (row.host, row.pid, row.version) == (socket.gethostname(), os.getpid(), sqlaqueue.__version__)
        assert row.name == f"{socket.gethostname()}:{os.getpid()}:left"
        assert row.created_at <= row.heartbeat_at
        go_on.set()
    assert mixed.in_session(consumers(mixed.Job)) == []


def test_dead_consumers_are_not_listed(mixed: Bench) -> None:
    with mixed.worker("work") as worker:
        wait_until(lambda: len(mixed.in_session(consumers(mixed.Job))) == 1)
        worker.process.kill()
        worker.await_end()
    mixed.execute("UPDATE sqlaqueue_consumer SET expires_at = now()")
    assert mixed.in_session(consumers(mixed.Job)) == []
