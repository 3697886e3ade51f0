"""A caller that waits for a job receives its result, or a timeout, whatever happens meanwhile."""

import asyncio
import contextlib
import inspect
import itertools
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from asyncpg.exceptions import InternalClientError
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import sqlaqueue
from sqlaqueue import JobFailed, JobResult, WaitTimeout, async_wait, cancel, claim, complete, fail, wait
from sqlaqueue.consumer import pace
from sqlaqueue.exc import ConfigurationError, NotAQueueError, StatementError
from sqlaqueue.notify_payloads import Payload, Pending, Settled, WaitRequest
from sqlaqueue.waiting import wait as wait_module
from sqlaqueue.waiting.wait import (
    DEFAULT_TIMEOUT,
    FIRST_DELAY,
    MAX_DELAY,
    MAX_DELAY_NOT_LISTENING,
    NOTIFY_INTERVAL,
    WaitState,
)
from tests.consumer.bench import LATER, Bench, Gate, Server, notifications
from tests.consumer.conftest import MIXED
from tests.programs import wait_until
from tests.servers import Database
from tests.servers import Server as PostgresServer


class Waiter:
    """Calls ``wait()`` or ``async_wait()`` in a thread."""

    def __init__(self, bench: Bench, job: Any, **options: Any) -> None:
        self.bench, self.job, self.options = bench, job, options
        self.result: JobResult[Any] | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            if self.bench.api == "sync":
                engine = sa.create_engine(self.bench.database.url(), poolclass=sa.NullPool)
                self.result = wait(sessionmaker(engine), self.job, **self.options)
            else:
                self.result = asyncio.run(self._wait_async())
        except BaseException as error:  # noqa: BLE001 - end() raises it
            self.error = error

    async def _wait_async(self) -> JobResult[Any]:
        engine = create_async_engine(self.bench.database.url("asyncpg"), poolclass=sa.NullPool)
        try:
            return await async_wait(async_sessionmaker(engine), self.job, **self.options)
        finally:
            await engine.dispose()

    @property
    def is_waiting(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> JobResult[Any]:
        self._thread.join(30)
        assert not self._thread.is_alive(), "still waiting"
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


@contextlib.contextmanager
def serving(bench: Bench, gate: Gate, **options: Any) -> Iterator[Server]:
    with bench.consumer(gate, **options).running() as server:
        wait_until(lambda: server.context.polls.peers.listening, "that the Consumer listens")
        yield server


def remembers(server: Server, key: int) -> bool:
    """Return whether a Consumer remembers that a caller waits for a job."""
    return str(key) in server.context.waiters._until


def enqueue_for_later(bench: Bench) -> int:
    """Add a job that make_due() makes due: a Consumer that holds a transaction receives notifications while idle."""
    bench.execute("INSERT INTO job (run_at) VALUES (now() + interval '1 h')")
    (key,) = bench.rows()
    return key


def make_due(bench: Bench) -> None:
    bench.execute("UPDATE job SET run_at = now()")


@pytest.fixture(params=[*MIXED, ("own_message", "sync")], ids="-".join)
def mixed(request: pytest.FixtureRequest, supply: Any) -> Bench:
    """Each strategy, also with rows that are messages, sync and async."""
    return supply.take(*request.param)


@pytest.fixture
def no_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is listening, a waiting caller polls only after notifications."""
    monkeypatch.setattr(pace, "RESCUE", LATER)
    monkeypatch.setattr(wait_module, "MAX_DELAY", LATER)
    not_settled = wait_module.WaitState.not_settled

    def no_next_poll(self: wait_module.WaitState) -> None:
        not_settled(self)
        if self.listening:
            self._poll_at = self._now() + LATER

    monkeypatch.setattr(wait_module.WaitState, "not_settled", no_next_poll)


@pytest.mark.usefixtures("no_polling")
@pytest.mark.parametrize(
    ("raised", "state"),
    [(None, "completed"), (sqlaqueue.Fail("broken"), "failed"), (sqlaqueue.Cancel("unwanted"), "cancelled")],
    ids=["completed", "failed", "cancelled"],
)
def test_the_caller_is_woken_when_the_job_is_settled(mixed: Bench, raised: Exception | None, state: str) -> None:
    gate = Gate(*([raised] if raised else []))
    with serving(mixed, gate) as server, notifications(mixed, "settled") as received:
        (key,) = mixed.enqueue(payload="x")
        gate.await_call()
        waiter = Waiter(mixed, (mixed.Job, key), timeout=60)
        wait_until(lambda: remembers(server, key))
        assert received() == []
        gate.let_go()
        result = waiter.end()
        wait_until(lambda: received() == [f'settled ["{key}"]'])
        assert not remembers(server, key)
    assert result.state == state
    assert result.error == {"completed": None, "failed": "Fail: broken", "cancelled": "unwanted"}[state]
    if mixed.has_status:
        assert result.job is not None
        assert (result.job.id, result.job.status, result.job.payload) == (key, state, "x")
        assert result.job.finished_at is not None
        assert sa.inspect(result.job).detached
    else:
        assert result.job is None


@pytest.mark.usefixtures("no_polling")
def test_a_retried_attempt_does_not_end_the_wait(mixed: Bench) -> None:
    gate = Gate(ValueError("again"), sqlaqueue.Snooze(0))
    with serving(mixed, gate) as server, notifications(mixed, "settled") as received:
        (key,) = mixed.enqueue()
        gate.await_call()
        waiter = Waiter(mixed, (mixed.Job, key), timeout=60)
        wait_until(lambda: remembers(server, key))
        for _ in range(2):
            gate.let_go()
            gate.await_call()
            assert waiter.is_waiting
            assert received() == []
        gate.let_go()
        assert waiter.end().state == "completed"


@pytest.mark.usefixtures("no_polling")
def test_no_notification_for_jobs_without_a_waiting_caller(mixed: Bench) -> None:
    gate = Gate()
    with serving(mixed, gate, batch_size=1) as server, notifications(mixed, "settled") as received:
        key, other = mixed.enqueue(2)
        gate.await_call()
        waiter = Waiter(mixed, (mixed.Job, key), timeout=60)
        wait_until(lambda: remembers(server, key))
        gate.let_go()
        gate.let_go()
        wait_until(lambda: mixed.states()["pending"] == mixed.states()["processing"] == 0)
        waiter.end()
        assert received() == [f'settled ["{key}"]']
        assert other


@pytest.mark.usefixtures("no_polling")
def test_many_callers_wait_for_many_jobs(sync_leased: Bench) -> None:
    """One connection listens for all callers."""
    engine = sa.create_engine(sync_leased.database.url(), pool_size=5)
    sessions, results = sessionmaker(engine), []
    gate = Gate()
    with serving(sync_leased, gate, concurrency=4) as server:
        keys = sync_leased.enqueue(4)
        threads = [
            threading.Thread(
                target=lambda key=key: results.append(wait(sessions, (sync_leased.Job, key), timeout=60).state)
            )
            for key in keys * 25
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: all(remembers(server, key) for key in keys))
        listening = "SELECT count(*) FROM pg_stat_activity WHERE query ~ '^LISTEN|try_[a]dvisory_lock|[a]dvisory_unlock' AND datname = current_database()"
        wait_until(lambda: sync_leased.execute(listening) == 2)
        for _ in keys:
            gate.let_go()
        for thread in threads:
            thread.join(30)
    assert results == ["completed"] * 100
    engine.dispose()


def test_a_finished_job_returns_immediately(mixed: Bench) -> None:
    (key,) = mixed.enqueue()
    mixed.consumer().drain()
    assert Waiter(mixed, (mixed.Job, key), timeout=0).end().state == "completed"


def test_polling_finds_jobs_settled_without_a_notification(mixed: Bench) -> None:
    """They are settled by SQL, or by a Consumer that does not receive announcements."""
    gone, cancelled = mixed.enqueue(2)
    waiters = [Waiter(mixed, (mixed.Job, key), timeout=60) for key in (gone, cancelled)]
    with mixed.sessions() as session:
        session.execute(sa.delete(mixed.Job).where(mixed.Job.id == gone))
        session.execute(cancel(sa.select(mixed.Job).where(mixed.Job.id == cancelled)))
        session.commit()
    first, second = (waiter.end() for waiter in waiters)
    assert (first.state, first.job) == ("gone" if mixed.has_status else "completed", None)
    assert second.state == "cancelled"


def test_without_notifications_the_caller_polls(server: PostgresServer) -> None:
    with server.database() as database:
        bench = Bench(database, "update_status", notify=False)
        bench.create()
        (key,) = bench.enqueue()
        waiter = Waiter(bench, (bench.Job, key), timeout=60)
        bench.consumer().drain()
        assert waiter.end().state == "completed"


def test_a_job_deleted_when_completed(database: Database) -> None:
    class Base(sa.orm.DeclarativeBase):
        pass

    class Task(sqlaqueue.QueueMixin, Base):
        __tablename__ = "task"
        __queue__ = sqlaqueue.QueueConfig(on_complete="delete", columns={"last_error": None})
        left: sa.orm.Mapped[int] = sa.orm.mapped_column(primary_key=True)
        right: sa.orm.Mapped[str] = sa.orm.mapped_column(primary_key=True)

    engine = sa.create_engine(database.url())
    Base.metadata.create_all(engine)
    sessions = sessionmaker(engine)
    with sessions() as session:
        task = Task(left=1, right="a b")
        session.add(task)
        session.commit()
        with pytest.raises(WaitTimeout, match=r"Task 1,a b has not finished within 0 s"):
            wait(sessions, task, timeout=0)
        sqlaqueue.Consumer(Task, lambda session, task: None, sessions).drain()
        assert wait(sessions, task) == JobResult("completed", None)
        with pytest.raises(
            StatementError, match=r"wait\(..., Task, 1\): this is not a primary key, which is \(left, right\)"
        ):
            wait(sessions, (Task, 1))
    engine.dispose()


@pytest.mark.once
def test_an_unknown_status_value(sync_leased: Bench) -> None:
    (key,) = sync_leased.enqueue()
    sync_leased.execute("UPDATE job SET status = 'archived'")
    result = wait(sync_leased.sessions, (sync_leased.Job, key))
    assert result.state == "gone"
    assert result.job.status == "archived"


def test_check_raises_unless_the_job_is_completed(mixed: Bench) -> None:
    (key,) = mixed.enqueue()
    with mixed.sessions() as session:
        session.execute(fail(session.scalars(claim(mixed.Job, 1)).all(), error="no such address"))
        session.commit()
    with pytest.raises(JobFailed, match=f"^Job {key} has failed: no such address$") as raised:
        Waiter(mixed, (mixed.Job, key), check=True).end()
    assert raised.value.result.state == "failed"
    assert Waiter(mixed, (mixed.Job, key)).end().state == "failed"


@pytest.mark.parametrize("timeout", [0, 0.3, timedelta(seconds=0.3)])
def test_the_timeout_raises(mixed: Bench, timeout: Any) -> None:
    (key,) = mixed.enqueue()
    with pytest.raises(TimeoutError, match=f"Job {key} has not finished within 0") as raised:
        Waiter(mixed, (mixed.Job, key), timeout=timeout).end()
    assert isinstance(raised.value, sqlaqueue.SqlaqueueError)


def test_a_waiting_task_can_be_cancelled(async_leased: Bench) -> None:
    (key,) = async_leased.enqueue()

    async def cancelled() -> None:
        engine = create_async_engine(async_leased.database.url("asyncpg"))
        task = asyncio.create_task(async_wait(async_sessionmaker(engine), (async_leased.Job, key)))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.dispose()

    asyncio.run(cancelled())


# -- races, lost connections and dead workers during a wait --------------------------------------------------------


@pytest.mark.usefixtures("no_polling")
def test_a_job_settled_between_the_first_poll_and_the_notification(
    sync_leased: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    (key,) = sync_leased.enqueue()
    notify = sqlaqueue.waiting.wait.notify_consumers

    def drained_before(session: Session, waiter: Any) -> None:
        sync_leased.consumer().drain()
        notify(session, waiter)

    monkeypatch.setattr(sqlaqueue.waiting.wait, "notify_consumers", drained_before)
    # Without a poll after the notification the caller would never return.
    monkeypatch.setattr(wait_module, "FIRST_DELAY", LATER)
    assert wait(sync_leased.sessions, (sync_leased.Job, key), timeout=60).state == "completed"


@pytest.mark.usefixtures("no_polling")
def test_a_consumer_started_later_receives_an_announcement(mixed: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_module, "NOTIFY_INTERVAL", 0.2)
    key = enqueue_for_later(mixed)
    waiter = Waiter(mixed, (mixed.Job, key), timeout=60)
    gate = Gate()
    with serving(mixed, gate) as server:
        wait_until(lambda: remembers(server, key))
        make_due(mixed)
        gate.let_go()
        assert waiter.end().state == "completed"


@pytest.mark.usefixtures("no_polling")
def test_connections_lost_during_a_wait(mixed: Bench) -> None:
    gate = Gate()
    with serving(mixed, gate) as server:
        key = enqueue_for_later(mixed)
        waiter = Waiter(mixed, (mixed.Job, key), timeout=60)
        wait_until(lambda: remembers(server, key))
        mixed.database.kill_backends()
        make_due(mixed)
        gate.await_call()
        gate.let_go()
        assert waiter.end().state == "completed"


def test_an_internal_error_of_asyncpg_is_retried(sync_leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that asyncpg raises for a connection closed between two statements; SQLAlchemy does not wrap it.

    It is simulated, as it depends on timing: the server's last message has been read, the end of the socket has not.
    """
    notify, errors = (
        sqlaqueue.waiting.wait.notify_consumers,
        [InternalClientError("another operation is in progress")],
    )

    def notify_with_error(session: Session, waiter: Any) -> None:
        if errors:
            raise errors.pop()
        notify(session, waiter)

    monkeypatch.setattr(sqlaqueue.waiting.wait, "notify_consumers", notify_with_error)
    (key,) = sync_leased.enqueue()
    waiter = Waiter(sync_leased, (sync_leased.Job, key), timeout=60)
    wait_until(lambda: not errors)
    sync_leased.consumer().drain()
    assert waiter.end().state == "completed"


def test_a_rescued_job_that_fails_for_good_ends_the_wait(sync_leased: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "RESCUE", 0.1)
    (key,) = sync_leased.enqueue(max_attempts=1)
    with sync_leased.sessions() as session:
        session.scalars(claim(sync_leased.Job, 1)).all()
        session.commit()
    with serving(sync_leased, Gate()) as server:
        waiter = Waiter(sync_leased, (sync_leased.Job, key), timeout=60)
        wait_until(lambda: remembers(server, key))
        with notifications(sync_leased, "settled") as received:
            sync_leased.execute("UPDATE job SET lease_expires_at = now()")
            result = waiter.end()
            assert received() == [f'settled ["{key}"]']
    assert result.state == "failed"
    assert result.error is not None
    assert "lease expired" in result.error


# -- arguments of wait() that are refused; and when a waiter notifies Consumers and reads the job's row ------------


@pytest.mark.once
def test_an_uncommitted_job_is_refused(sync_leased: Bench) -> None:
    with sync_leased.sessions() as session:
        job = sync_leased.Job()
        with pytest.raises(StatementError, match="this Job is not in the database; add it to a session and commit"):
            wait(sync_leased.sessions, job)
        session.add(job)
        with pytest.raises(StatementError, match="is not in the database"):
            wait(sync_leased.sessions, job)
        session.flush()
        open_transaction = r"wait\(\): Job 1 has been changed in a transaction that is still open"
        with pytest.raises(StatementError, match=open_transaction):
            wait(sync_leased.sessions, job)
        with session.begin_nested(), pytest.raises(StatementError, match=open_transaction):
            wait(sync_leased.sessions, job)
        session.commit()
        assert job.id == 1  # a transaction has begun, which has written nothing
        with pytest.raises(WaitTimeout):
            wait(sync_leased.sessions, job, timeout=0)
        job.payload = "x"
        with pytest.raises(StatementError, match=open_transaction):
            wait(sync_leased.sessions, job)
        session.flush()
        with pytest.raises(StatementError, match=open_transaction):
            wait(sync_leased.sessions, job)
        session.rollback()
        with pytest.raises(WaitTimeout):
            wait(sync_leased.sessions, job, timeout=0)
        session.delete(job)
        with pytest.raises(StatementError, match=open_transaction):
            wait(sync_leased.sessions, job)


@pytest.mark.once
def test_a_job_that_was_rolled_back_is_refused(sync_leased: Bench) -> None:
    with sync_leased.sessions() as session:
        job = sync_leased.Job()
        session.add(job)
        session.flush()
        session.rollback()
        with pytest.raises(StatementError, match="is not in the database"):
            wait(sync_leased.sessions, job)


@pytest.mark.parametrize("strategy", ["batch_select", "delete_returning"])
def test_a_job_claimed_by_an_open_transaction_is_refused(sync_bench: Bench) -> None:
    sync_bench.enqueue()
    with sync_bench.sessions() as session:
        (job,) = session.scalars(claim(sync_bench.Job, 1)).all()
        with pytest.raises(StatementError, match="is claimed by an open transaction of this process"):
            wait(sync_bench.sessions, job)
        session.execute(complete(job))
        session.commit()
        assert wait(sync_bench.sessions, job).state == "completed"


@pytest.mark.once
def test_arguments_that_are_not_jobs_are_refused(sync_leased: Bench) -> None:
    for nothing in (5, "job", None, [sync_leased.Job, 5], (sync_leased.Job,), (sync_leased.Job, 5, 6)):
        with pytest.raises(StatementError, match="give an instance of a queue class, or the class and a key"):
            wait(sync_leased.sessions, nothing)
    with pytest.raises(StatementError, match=r"wait\(..., Job, None\): this is not a primary key, which is \(id\)"):
        wait(sync_leased.sessions, (sync_leased.Job, None))
    with pytest.raises(StatementError, match=r"wait\(..., Job, None\): this is not a primary key"):
        wait(sync_leased.sessions, sync_leased.Job)
    with pytest.raises(StatementError, match=r"remove the key, as the instance has one; .* as wait\(..., timeout=5\)"):
        wait(sync_leased.sessions, sync_leased.Job(), 5)
    with pytest.raises(NotAQueueError, match="Owner is not a queue"):
        wait(sync_leased.sessions, (sync_leased.Owner, 5))
    with pytest.raises(ConfigurationError, match=r"wait\(timeout=...\) must be seconds or a timedelta"):
        wait(sync_leased.sessions, (sync_leased.Job, 5), timeout=-1)
    assert wait(sync_leased.sessions, (sync_leased.Job, 5)) == JobResult("gone", None)
    assert wait(sync_leased.sessions, sync_leased.Job, 5) == JobResult("gone", None)


@pytest.mark.once
def test_sync_sessions_for_async_code_are_refused_and_vice_versa(sync_leased: Bench) -> None:
    made: Any = async_sessionmaker(create_async_engine(sync_leased.database.url("asyncpg")))
    with pytest.raises(ConfigurationError, match="makes AsyncSession; give a sessionmaker, or use async_wait"):
        wait(made, (sync_leased.Job, 5))
    sync: Any = sync_leased.sessions
    with pytest.raises(ConfigurationError, match="makes Session; give an async_sessionmaker, or use wait"):
        asyncio.run(async_wait(sync, (sync_leased.Job, 5)))
    with sync_leased.sessions() as session:
        itself: Any = session
        with pytest.raises(
            ConfigurationError, match=r"is a Session, where a session factory is needed; give sessionmaker\(engine\)"
        ):
            wait(itself, (sync_leased.Job, 5))
    engine: Any = sync_leased.engine
    with pytest.raises(ConfigurationError, match=r"wait: Engine\(.*\) is an Engine, .*; give sessionmaker\(engine\)"):
        wait(engine, (sync_leased.Job, 5))
    with pytest.raises(ConfigurationError, match=r"async_wait: Engine\(.*create_async_engine\(\), or use wait"):
        asyncio.run(async_wait(engine, (sync_leased.Job, 5)))


@pytest.mark.once
def test_the_default_timeout(sync_leased: Bench) -> None:
    """A job that no Consumer runs does not block its caller for ever, unless the timeout is None."""
    for verb in (wait, async_wait):
        assert inspect.signature(verb).parameters["timeout"].default == DEFAULT_TIMEOUT == 10
        assert inspect.signature(verb).parameters["timeout"].kind is inspect.Parameter.KEYWORD_ONLY
    (key,) = sync_leased.enqueue()
    with pytest.raises(WaitTimeout, match=r"Job 1 has not finished within 0 s; .*wait\(..., timeout=...\)"):
        wait(sync_leased.sessions, sync_leased.Job, key, timeout=0)


@pytest.mark.once
def test_the_session_of_a_scoped_session_is_not_used(sync_leased: Bench) -> None:
    scoped = scoped_session(sync_leased.sessions)
    (key,) = sync_leased.enqueue()
    job = scoped().get(sync_leased.Job, key)
    with pytest.raises(WaitTimeout):
        wait(scoped, job, timeout=0)
    assert job in scoped()
    scoped.remove()


@pytest.mark.once
def test_a_replica_is_refused(postgres_server: PostgresServer) -> None:
    """A server in recovery behaves like a replica."""
    with postgres_server.database() as database:
        bench = Bench(database, "update_status")
        bench.create()
        (key,) = bench.enqueue()
        postgres_server.stop()
        signal = postgres_server.data / "standby.signal"
        signal.touch()
        try:
            postgres_server.start()
            with pytest.raises(ConfigurationError, match="use a replica.*give a sessionmaker of the primary's"):
                wait(bench.sessions, (bench.Job, key))
        finally:
            postgres_server.stop()
            signal.unlink()
            postgres_server.start()


# -- when a waiter notifies Consumers and reads the job's row, with a clock of its own and without a database ------


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def new_state(clock: Clock, name: str = "5", timeout: float | None = None) -> WaitState:
    return WaitState([name], lambda: None, timeout, now=clock, draw=lambda: 0.5)


def listening(clock: Clock, timeout: float | None = None) -> WaitState:
    """Return a state that has received its notification, and polled."""
    state = new_state(clock, timeout=timeout)
    assert state.take_notification()
    state.receive(state.notifications[0])
    assert state.take_poll()
    state.not_settled()
    return state


@pytest.mark.once
def test_it_announces_immediately_and_then_at_intervals(clock: Clock) -> None:
    state = new_state(clock)
    assert state.seconds_until_due() == 0
    assert state.take_notification()
    assert not state.take_notification()
    state.receive(state.notifications[0])
    clock.now += NOTIFY_INTERVAL - 1
    state.take_notification()
    notified = 0
    for _ in range(100):
        clock.now += 1
        notified += state.take_notification()
    assert notified == 100 // NOTIFY_INTERVAL


@pytest.mark.once
def test_the_delay_between_unanswered_announcements_grows(clock: Clock) -> None:
    state, times = new_state(clock), []
    for _ in range(10_000):
        if state.take_notification():
            times.append(clock.now)
        clock.now += 0.01
    between = [second - first for first, second in itertools.pairwise(times)]
    assert between == sorted(between)
    assert between[0] <= 3 * FIRST_DELAY
    assert max(between) <= NOTIFY_INTERVAL + 0.02


@pytest.mark.once
def test_it_polls_after_its_own_notification_and_when_the_job_is_settled(clock: Clock) -> None:
    state = new_state(clock)
    assert not state.take_poll()
    state.receive(state.notifications[0])
    assert state.seconds_until_due() == 0
    assert state.take_poll()
    state.not_settled()
    assert not state.take_poll()
    state.receive(Settled(["4", "5"]))
    assert state.take_poll()
    assert not state.take_poll()


@pytest.mark.once
def test_of_several_jobs_it_polls_after_the_last_one(clock: Clock) -> None:
    state = WaitState(["5", "6", "7"], lambda: None, None, now=clock, draw=lambda: 0.5)
    assert state.take_notification()
    state.receive(Settled(["5", "8"]))
    assert not state.take_poll()
    state.has_ended("7")
    state.receive(Settled(["6"]))
    assert state.take_poll()
    state.not_settled()
    # Its row was read before; it is read again soon.
    assert 0 < state.seconds_until_due() <= FIRST_DELAY
    many = WaitState([f"{number:050}" for number in range(1000)], lambda: None, now=clock)
    assert many.notifies
    assert len(many.notifications) > 1
    assert sorted(job for each in many.notifications for job in each.jobs) == sorted(many._jobs)


@pytest.mark.once
def test_a_notification_during_a_poll_makes_another_one_due(clock: Clock) -> None:
    state = listening(clock)
    clock.now += MAX_DELAY
    assert state.take_poll()
    state.receive(Settled(["5"]))
    state.not_settled()
    assert state.seconds_until_due() == 0
    assert state.take_poll()


@pytest.mark.once
@pytest.mark.parametrize(
    "payload", [Settled(["55"]), Settled(["4"]), Settled([]), WaitRequest("x", ["5"]), Pending("5", 1)], ids=str
)
def test_notifications_about_other_jobs_are_ignored(clock: Clock, payload: Payload) -> None:
    state = listening(clock)
    state.receive(payload)
    assert state.seconds_until_due() > 0


@pytest.mark.once
@pytest.mark.parametrize(("is_listening", "longest"), [(True, MAX_DELAY), (False, MAX_DELAY_NOT_LISTENING)])
def test_the_delay_between_polls_grows_up_to_a_limit(clock: Clock, is_listening: bool, longest: float) -> None:  # noqa: FBT001 - a parameter
    state = listening(clock) if is_listening else new_state(clock)
    state.notifies = False
    pauses = []
    for _ in range(100):
        pauses.append(state.seconds_until_due())
        clock.now += pauses[-1]
        assert state.take_poll()
        state.not_settled()
    assert pauses == sorted(pauses)
    assert pauses[0] == pytest.approx(FIRST_DELAY)
    assert pauses[-1] == pytest.approx(longest)
    assert len([pause for pause in pauses if pause < longest]) < 20


@pytest.mark.once
def test_the_delay_between_polls_is_short_after_a_notification(clock: Clock) -> None:
    state = listening(clock)
    state.notifies = False
    clock.now += 1000
    state.not_settled()
    state.receive(Settled(["5"]))
    assert state.take_poll()
    state.not_settled()
    assert state.seconds_until_due() == pytest.approx(FIRST_DELAY)


@pytest.mark.once
def test_the_timeout_ends_the_wait_after_a_last_poll(clock: Clock) -> None:
    state = listening(clock, timeout=3)
    clock.now += 2.9
    state.not_settled()
    assert state.seconds_until_due() == pytest.approx(0.1)
    assert not state.timed_out
    clock.now += 0.1
    assert state.timed_out
    assert state.take_poll(), "once more"


@pytest.mark.once
def test_it_announces_again_when_the_listener_is_lost(clock: Clock) -> None:
    state = listening(clock)
    assert state.listening
    state.listening_lost()
    assert not state.listening
    assert state.take_notification()


@pytest.mark.once
def test_a_key_too_long_for_a_notification_is_only_polled(clock: Clock) -> None:
    state = new_state(clock, "x" * 8000)
    assert not state.notifies
    assert not state.take_notification()
    assert state.seconds_until_due() > 0
