"""Arguments of wait() that are refused; and when a waiter notifies Consumers and reads the job's row."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import scoped_session

from sqlaqueue import JobResult, WaitTimeout, async_wait, claim, complete, wait
from sqlaqueue.exc import ConfigurationError, NotAQueueError, StatementError
from sqlaqueue.notify_payloads import Payload, Pending, Settled, WaitRequest
from sqlaqueue.waiting.wait import (
    DEFAULT_TIMEOUT,
    FIRST_DELAY,
    MAX_DELAY,
    MAX_DELAY_NOT_LISTENING,
    NOTIFY_INTERVAL,
    WaitState,
)
from tests.consumer.bench import Bench

if TYPE_CHECKING:
    from tests.servers import Server as PostgresServer


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
    return WaitState(name, lambda: None, timeout, now=clock, draw=lambda: 0.5)


def listening(clock: Clock, timeout: float | None = None) -> WaitState:
    """Return a state that has received its notification, and polled."""
    state = new_state(clock, timeout=timeout)
    assert state.take_notification()
    state.receive(state.notification)
    assert state.take_poll()
    state.not_settled()
    return state


@pytest.mark.once
def test_it_announces_immediately_and_then_at_intervals(clock: Clock) -> None:
    state = new_state(clock)
    assert state.seconds_until_due() == 0
    assert state.take_notification()
    assert not state.take_notification()
    state.receive(state.notification)
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
    state.receive(state.notification)
    assert state.seconds_until_due() == 0
    assert state.take_poll()
    state.not_settled()
    assert not state.take_poll()
    state.receive(Settled(["4", "5"]))
    assert state.take_poll()
    assert not state.take_poll()


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
