"""Notifications: which are sent and received, what a Consumer does without them, and control of a queue by them."""

import asyncio
import errno
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa

import sqlaqueue
from sqlaqueue import cancel, claim, complete, consumers, is_paused, pause, requeue, rescue, resume
from sqlaqueue.consumer import pace
from sqlaqueue.consumer.core.waker import Waker
from sqlaqueue.consumer.maintenance import leases
from sqlaqueue.consumer.notifications import listener, polls
from sqlaqueue.consumer.notifications.polls import PollSchedule
from tests.consumer.bench import (
    LATER,
    Bench,
    Crowd,
    Gate,
    await_listening,
    idle,
    is_listening,
    listening_connections,
    logged,
    nothing,
    notifications,
)
from tests.models import sent_statements
from tests.programs import wait_until


@pytest.fixture(autouse=True)
def no_rescues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "RESCUE", LATER)


def by_copy(bench: Bench) -> None:
    with (
        bench.database.connect() as connection,
        connection.cursor() as cursor,
        cursor.copy("COPY job (payload) FROM STDIN") as copy,
    ):
        copy.write_row(["x"])


FAILED = "INSERT INTO job (payload, status) VALUES ('x', 'failed')"
WAYS: dict[str, Callable[[Bench], object]] = {
    "the ORM": lambda bench: bench.enqueue(),
    "INSERT": lambda bench: bench.execute(sa.insert(bench.Job).values(payload="x")),
    "INSERT SELECT": lambda bench: bench.execute(
        sa.insert(bench.Job.__table__).from_select(["payload"], sa.select(sa.literal("x")))
    ),
    "COPY": by_copy,
    "plain SQL": lambda bench: bench.execute(FAILED, "UPDATE job SET status = 'pending' WHERE payload = 'x'"),
    "requeue": lambda bench: (bench.execute(FAILED), bench.in_session(requeue(bench.Job))),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("enqueue", WAYS.values(), ids=WAYS)
def test_an_idle_consumer_is_woken(mixed: Bench, enqueue: Callable[[Bench], None]) -> None:
    with idle(mixed).running() as server:
        await_listening(server)
        for done in (1, 2):
            enqueue(mixed)
            wait_until(lambda done=done: mixed.states() == {"completed": done})


@pytest.mark.parametrize("driver", ["psycopg2", "psycopg", "asyncpg"])
def test_every_driver_receives_notifications(supply: Any, driver: str) -> None:
    bench = supply.take("update_status", "sync" if driver == "psycopg2" else "async")
    with idle(bench, url=bench.database.url(driver)).running() as server:
        await_listening(server)
        bench.enqueue()
        wait_until(lambda: bench.states() == {"completed": 1})


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_a_listener_that_was_cancelled_starts_again(async_leased: Bench, driver: str) -> None:
    """As by the end of the last Consumer of an engine, while the database does not answer."""
    server = idle(async_leased, url=async_leased.database.url(driver))

    async def cancel() -> None:
        while not (found := [one for one in asyncio.all_tasks() if one.get_name() == "sqlaqueue-listener"]):
            await asyncio.sleep(0.02)
        found[0].cancel()
        await asyncio.wait(found)

    async def serve() -> None:
        async with server.consumer, asyncio.timeout(30):
            await cancel()
        async with asyncio.timeout(30), server.consumer:
            while not server.context.polls.peers.listening:
                await asyncio.sleep(0.02)
        await server.engine.dispose()

    asyncio.run(serve())


def test_one_notification_a_statement(sync_bench: Bench) -> None:
    with notifications(sync_bench) as received:
        sync_bench.enqueue(100)
        assert [payload.split()[2] for payload in received("pending")] == ["100"]
        sync_bench.execute("UPDATE job SET status = 'failed'")
        assert received() == []
        sync_bench.execute("UPDATE job SET status = 'pending'")
        assert [payload.split()[2] for payload in received("pending")] == ["1"]
        sync_bench.execute("INSERT INTO job (status) VALUES ('failed')")
        sync_bench.execute("UPDATE job SET payload = 'y'")
        assert received() == []


def test_a_rescued_job_is_announced_as_quarantined(sync_leased: Bench) -> None:
    sync_leased.enqueue(2)
    sync_leased.in_session(claim(sync_leased.Job, 2))
    with notifications(sync_leased) as received:
        sync_leased.execute("UPDATE job SET lease_expires_at = now()")
        sync_leased.in_session(rescue(sync_leased.Job))
        first, second = received()
        assert first == "quarantined"
        assert second.startswith("pending ")


def test_claims_and_settlements_send_no_notification(sync_bench: Bench) -> None:
    sync_bench.enqueue(3)
    with notifications(sync_bench) as received, sync_bench.sessions() as session:
        jobs = session.scalars(claim(sync_bench.Job, 3)).all()
        session.execute(complete(jobs))
        session.commit()
        assert received() == []


@pytest.mark.once
def test_a_consumer_does_not_notify_itself_of_its_claims(sync_leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "HEARTBEAT", LATER)
    with notifications(sync_leased, "claimed") as received, idle(sync_leased).running() as server:
        await_listening(server)
        sync_leased.enqueue()
        wait_until(lambda: sync_leased.states() == {"completed": 1})
        assert received() == []
        with idle(sync_leased).running() as other:
            await_listening(other)
            wait_until(
                lambda: all(one.context is not None and one.context.polls.peers.count == 2 for one in (server, other))
            )
            sync_leased.enqueue()
            wait_until(lambda: sync_leased.states() == {"completed": 2})
            assert len(received()) == 1


def test_a_job_for_later_begins_when_it_is_due(mixed: Bench) -> None:
    """Without a poll: the due times of jobs from before the start are queried, the others are announced."""
    due = "statement_timestamp() + interval '1.5 s'"
    mixed.execute(f"INSERT INTO job (payload, run_at) VALUES ('before', {due})")
    mixed.execute("INSERT INTO job (payload, run_at) VALUES ('never', statement_timestamp() + interval '1 h')")
    with idle(mixed).running() as server:
        await_listening(server)
        mixed.execute(f"INSERT INTO job (payload, run_at) VALUES ('after', {due}), ('soon', now() + interval '1 s')")
        wait_until(lambda: mixed.states() == {"completed": 3, "pending": 1})
    assert mixed.execute("SELECT count(*) FROM job WHERE finished_at < run_at") == 0
    assert server.told()["claimed"] == 3


def test_a_job_is_tried_again_when_it_is_due(mixed: Bench) -> None:
    mixed.enqueue()
    tries = []

    async def work(io: Any, job: Any) -> None:
        tries.append(time.monotonic())
        if len(tries) == 1:
            raise sqlaqueue.Retry(0.7)
        if len(tries) == 2:
            raise sqlaqueue.Snooze(0.5)

    with mixed.consumer(work, poll_interval=LATER).running() as server:
        await_listening(server)
        wait_until(lambda: mixed.states() == {"completed": 1})
    first, second, third = tries
    assert second - first >= 0.7
    assert third - second >= 0.5


def test_a_released_job_is_claimed_at_once(mixed: Bench) -> None:
    mixed.enqueue()
    tries = []

    async def work(io: Any, job: Any) -> None:
        tries.append(job.id)
        if len(tries) == 1:
            raise sqlaqueue.Snooze

    with mixed.consumer(work, poll_interval=LATER).running() as server:
        await_listening(server)
        wait_until(lambda: mixed.states() == {"completed": 1})


@pytest.mark.once
@pytest.mark.parametrize(
    ("strategy", "most"), [("update_status", 2), pytest.param("batch_select", 3, marks=pytest.mark.thorough)]
)
def test_idle_consumers_are_not_all_woken(
    sync_bench: Bench, strategy: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim, and a second one after the first job of each; a strategy that holds a transaction writes its journal too."""
    # On a busy machine the notification that a job is claimed arrives late.
    monkeypatch.setattr(polls, "STAGGER", 5.0)
    monkeypatch.setattr(pace, "HEARTBEAT", LATER)
    number, gate = 20, Gate()
    gate.open()
    crowd = Crowd(sync_bench, *[gate] * number, engine={"pool_size": 50}, poll_interval=LATER)
    with crowd.running():
        wait_until(lambda: sync_bench.execute("SELECT count(*) FROM sqlaqueue_consumer WHERE listening") == number)
        known = [one._context.polls for one in crowd.consumers]
        wait_until(lambda: all(one.peers.count == number and not one.wants_upcoming() for one in known))
        with sent_statements(crowd.engine) as sent:
            for _ in range(number):
                sync_bench.enqueue()
                gate.await_call()
            wait_until(lambda: sync_bench.states() == {"completed": number})
        ends = ("UPDATE job SET", "SELECT coalesce((SELECT pg_class.relpages", "DELETE FROM sqlaqueue_crash_journal")
        # A few more, of a claim that a late notification could not stop; all together would be twenty times as many.
        assert len([text for text, _ in sent if not text.startswith(ends)]) <= (most + 1) * number


def test_a_look_for_unclaimable_jobs_has_others_poll(supply: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It locks due jobs for a moment, so that a claim of another Consumer may have missed them."""
    monkeypatch.setattr(leases, "TRY_AGAIN_AFTER", 0.2)
    bench, gate = supply.take("batch_select", "sync"), Gate()
    bench.enqueue()
    with bench.consumer(gate, poll_interval=LATER, batch_size=8).running(), notifications(bench) as received:
        gate.await_call()
        bench.enqueue()
        wait_until(lambda: "poll" in received("poll"))
        gate.open()


def test_a_busy_consumer_is_replaced_by_another(mixed: Bench) -> None:
    """The first one to poll may be busy: then the next one does."""
    gate = Gate()
    servers = [mixed.consumer(gate, poll_interval=LATER, batch_size=1) for _ in range(3)]
    with servers[0].running(), servers[1].running(), servers[2].running():
        await_listening(*servers)
        for _ in servers:
            mixed.enqueue()
            gate.await_call()
        gate.open()
        wait_until(lambda: mixed.states() == {"completed": 3})


def test_all_consumers_claim_some_of_many_jobs(mixed: Bench) -> None:
    together = threading.Barrier(3)

    async def work(io: Any, job: Any) -> None:
        # Each Consumer has a thread of its own, and its loop nothing else to do.
        together.wait(30)

    servers = [mixed.consumer(work, poll_interval=LATER, batch_size=1) for _ in range(3)]
    with servers[0].running(), servers[1].running(), servers[2].running():
        await_listening(*servers)
        mixed.enqueue(3)
        wait_until(lambda: mixed.states() == {"completed": 3})


def test_one_connection_listens_for_a_process(sync_leased: Bench) -> None:
    crowd = Crowd(sync_leased, nothing, nothing, nothing, poll_interval=LATER)
    with crowd.running():
        crowd.idle()
        wait_until(lambda: all(one._context.polls.peers.count == 3 for one in crowd.consumers))
        assert len(listening_connections(sync_leased)) == 1
    wait_until(lambda: not listening_connections(sync_leased))


# -- consumers that receive no notifications poll, and log it where the operator can change it ---------------------


def test_a_lost_connection_is_replaced(mixed: Bench) -> None:
    with idle(mixed).running() as server:
        await_listening(server)
        assert mixed.database.kill_backends() > 0
        mixed.enqueue()
        wait_until(lambda: mixed.states() == {"completed": 1})
        await_listening(server)
        mixed.enqueue()
        wait_until(lambda: mixed.states() == {"completed": 2})


def test_each_loss_of_a_working_connection_is_logged(mixed: Bench, log: Any) -> None:
    """And waited for as briefly as the first one."""
    lost = set[int]()
    with idle(mixed).running() as server:
        for number in range(1, 4):
            # Once it listens again, the Consumer has been told of the loss.
            wait_until(lambda: listening_connections(mixed) - lost)
            await_listening(server)
            lost.update(listening_connections(mixed))
            mixed.database.kill_backends()
            wait_until(lambda number=number: len(logged(log, "listener_lost")) == number, "the loss is logged")


def test_a_listener_that_cannot_even_wait_connects_again(sync_leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the process has no file descriptor left for a moment; an event loop waits for an asynchronous one."""
    failed = threading.Semaphore(0)

    def fail(*_: Any) -> bool:
        failed.release()
        raise OSError(errno.EMFILE, "Too many open files")

    with idle(sync_leased).running() as server:
        await_listening(server)
        with monkeypatch.context() as patched:
            (own,) = listener._listeners.values()
            patched.setattr(own, "_connection", fail)
            patched.setattr(own._waker, "wait", fail)
            assert sync_leased.database.kill_backends() > 0
            for _ in range(4):
                assert failed.acquire(timeout=30)
            sync_leased.enqueue()
        await_listening(server)
        sync_leased.enqueue()
        wait_until(lambda: sync_leased.states() == {"completed": 2})


def test_a_waker_opens_no_file_to_wait() -> None:
    waker = Waker()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit[1]))
    try:
        assert waker.wait(0) is False
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        waker.close()


def test_a_consumer_without_notifications_polls_and_logs_it_once(
    mixed: Bench, monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    """As behind a pooler in transaction mode, where LISTEN succeeds and nothing arrives."""
    monkeypatch.setattr(polls, "PROOF_TIMEOUT", 0.05)
    monkeypatch.setattr(pace, "HEARTBEAT", 0.2)
    monkeypatch.setattr(PollSchedule, "receive", lambda self, payload: None)
    with idle(mixed, poll_interval=0.05).running():
        mixed.enqueue()
        wait_until(lambda: mixed.states() == {"completed": 1})
        wait_until(lambda: "notifications do not arrive" in log.text)
        mixed.enqueue()
        wait_until(lambda: mixed.states() == {"completed": 2})
    assert log.text.count("notifications do not arrive") == 1


def test_a_long_drain_does_not_log_it(mixed: Bench, monkeypatch: pytest.MonkeyPatch, log: Any) -> None:
    """A drain does not listen."""
    monkeypatch.setattr(polls, "PROOF_TIMEOUT", 0.05)
    monkeypatch.setattr(pace, "HEARTBEAT", 0.1)
    beats, enough = list[Any](), threading.Event()
    send_heartbeat = leases.send_heartbeat

    def count(session: Any, context: Any, beat: Any) -> Any:
        beats.append(beat)
        if len(beats) == 3:
            enough.set()
        return send_heartbeat(session, context, beat)

    async def work(io: Any, job: Any) -> None:
        await io.wait(enough)

    monkeypatch.setattr(leases, "send_heartbeat", count)
    mixed.enqueue()
    assert mixed.consumer(work).drain() == 1
    assert "notifications do not arrive" not in log.text


@pytest.mark.parametrize("trigger", ["sqlaqueue_wake_insert"])
def test_a_disabled_trigger_is_detected(mixed: Bench, trigger: str, log: Any) -> None:
    mixed.execute(f"ALTER TABLE job DISABLE TRIGGER {trigger}")
    try:
        with idle(mixed, poll_interval=0.05).running() as server:
            wait_until(lambda: trigger in log.text)
            mixed.enqueue()
            wait_until(lambda: mixed.states() == {"completed": 1})
            assert not is_listening(server)
    finally:
        mixed.execute(f"ALTER TABLE job ENABLE TRIGGER {trigger}")


def test_without_notifications(server: Any, strategy: str, api: str) -> None:
    with server.database() as database:
        bench = Bench(database, strategy, api, notify=False)
        bench.create()
        assert bench.execute("SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'sqlaqueue_wake%'") == 0
        with idle(bench, poll_interval=0.05).running():
            bench.enqueue()
            wait_until(lambda: bench.states() == {"completed": 1})
            assert not listening_connections(bench)


# -- control of a queue with running Consumers: pauses, cancellation of running jobs, and the table of consumers ---


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
        assert session.scalar(is_paused(bench.Job)) is True
    assert bench.consumer().drain() == 0
    bench.in_session(pause(bench.Job))
    bench.in_session(resume(bench.Job))
    with bench.sessions() as session:
        assert session.scalar(is_paused(bench.Job)) is False
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
        assert session.scalar(is_paused(bench.Job)) is True


def test_a_cancellation_is_requested_without_delay(mixed: Bench) -> None:
    key = mixed.enqueue()[0]
    gate = Gate(ValueError())
    with mixed.consumer(gate, poll_interval=LATER).running() as server:
        await_listening(server)
        gate.await_call()
        mixed.in_session(cancel(sa.select(mixed.Job).where(mixed.Job.id == key)))
        wait_until(lambda: mixed.execute("SELECT count(*) FROM sqlaqueue_control") == 0)
        gate.open()
        wait_until(lambda: mixed.states() == {"cancelled": 1})


def test_a_run_that_ends_while_its_request_is_taken_is_cancelled(sync_leased: Bench) -> None:
    """The request is deleted by then; a run that is tried again would never be cancelled."""
    key = sync_leased.enqueue()[0]
    gate, taken = Gate(ValueError()), threading.Event()

    def look(_: Any, __: Any, statement: str, *___: Any) -> None:
        if "sqlaqueue_asked" in statement and sync_leased.execute("SELECT count(*) FROM sqlaqueue_control") > 0:
            taken.set()

    def end_the_run(_: Any) -> None:
        if taken.is_set() and gate.running:
            gate.open()
            wait_until(lambda: sync_leased.states()["processing"] == 0)

    server = sync_leased.consumer(gate, poll_interval=LATER)
    sa.event.listen(server.sync_engine, "before_cursor_execute", look)
    sa.event.listen(server.session, "after_commit", end_the_run)
    with server.running():
        await_listening(server)
        gate.await_call()
        sync_leased.in_session(cancel(sa.select(sync_leased.Job).where(sync_leased.Job.id == key)))
        wait_until(lambda: sync_leased.states() == {"cancelled": 1})


def test_consumers_are_listed(mixed: Bench) -> None:
    gate = Gate()
    key = mixed.enqueue()[0]
    with mixed.consumer(gate, poll_interval=LATER, worker_name="left").running() as server:
        gate.await_call()
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
        gate.open()
    assert mixed.in_session(consumers(mixed.Job)) == []


def test_dead_consumers_are_not_listed(mixed: Bench) -> None:
    with mixed.worker("work") as worker:
        wait_until(lambda: len(mixed.in_session(consumers(mixed.Job))) == 1)
        worker.process.kill()
        worker.await_end()
    mixed.execute("UPDATE sqlaqueue_consumer SET expires_at = now()")
    assert mixed.in_session(consumers(mixed.Job)) == []
