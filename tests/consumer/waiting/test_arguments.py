"""Arguments of wait() that are refused, with the reason."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import scoped_session

from sqlaqueue import JobResult, WaitTimeout, async_wait, claim, complete, wait
from sqlaqueue.exc import ConfigurationError, NotAQueueError, StatementError
from sqlaqueue.waiting.wait import DEFAULT_TIMEOUT
from tests.consumer.bench import Bench
from tests.servers import Server as PostgresServer


@pytest.mark.once
def test_an_uncommitted_job_is_refused(leased: Bench) -> None:
    with leased.sessions() as session:
        job = leased.Job()
        with pytest.raises(StatementError, match="this Job is not in the database; add it to a session and commit"):
            wait(leased.sessions, job)
        session.add(job)
        with pytest.raises(StatementError, match="is not in the database"):
            wait(leased.sessions, job)
        session.flush()
        open_transaction = r"wait\(\): Job 1 has been changed in a transaction that is still open"
        with pytest.raises(StatementError, match=open_transaction):
            wait(leased.sessions, job)
        with session.begin_nested(), pytest.raises(StatementError, match=open_transaction):
            wait(leased.sessions, job)
        session.commit()
        assert job.id == 1  # a transaction has begun, which has written nothing
        with pytest.raises(WaitTimeout):
            wait(leased.sessions, job, timeout=0)
        job.payload = "x"
        with pytest.raises(StatementError, match=open_transaction):
            wait(leased.sessions, job)
        session.flush()
        with pytest.raises(StatementError, match=open_transaction):
            wait(leased.sessions, job)
        session.rollback()
        with pytest.raises(WaitTimeout):
            wait(leased.sessions, job, timeout=0)
        session.delete(job)
        with pytest.raises(StatementError, match=open_transaction):
            wait(leased.sessions, job)


@pytest.mark.once
def test_a_job_that_was_rolled_back_is_refused(leased: Bench) -> None:
    with leased.sessions() as session:
        job = leased.Job()
        session.add(job)
        session.flush()
        session.rollback()
        with pytest.raises(StatementError, match="is not in the database"):
            wait(leased.sessions, job)


@pytest.mark.parametrize("strategy", ["batch_select", "delete_returning"])
def test_a_job_claimed_by_an_open_transaction_is_refused(supply: Any, strategy: str) -> None:
    bench = supply.take(strategy, "sync")
    bench.enqueue()
    with bench.sessions() as session:
        (job,) = session.scalars(claim(bench.Job, 1)).all()
        with pytest.raises(StatementError, match="is claimed by an open transaction of this process"):
            wait(bench.sessions, job)
        session.execute(complete(job))
        session.commit()
        assert wait(bench.sessions, job).state == "completed"


@pytest.mark.once
def test_arguments_that_are_not_jobs_are_refused(leased: Bench) -> None:
    for nothing in (5, "job", None, [leased.Job, 5], (leased.Job,), (leased.Job, 5, 6)):
        with pytest.raises(StatementError, match="give an instance of a queue class, or the class and a key"):
            wait(leased.sessions, nothing)
    with pytest.raises(StatementError, match=r"wait\(..., Job, None\): this is not a primary key, which is \(id\)"):
        wait(leased.sessions, (leased.Job, None))
    with pytest.raises(StatementError, match=r"wait\(..., Job, None\): this is not a primary key"):
        wait(leased.sessions, leased.Job)
    with pytest.raises(StatementError, match=r"remove the key, as the instance has one; .* as wait\(..., timeout=5\)"):
        wait(leased.sessions, leased.Job(), 5)
    with pytest.raises(NotAQueueError, match="Owner is not a queue"):
        wait(leased.sessions, (leased.Owner, 5))
    with pytest.raises(ConfigurationError, match=r"wait\(timeout=...\) must be seconds or a timedelta"):
        wait(leased.sessions, (leased.Job, 5), timeout=-1)
    assert wait(leased.sessions, (leased.Job, 5)) == JobResult("gone", None)
    assert wait(leased.sessions, leased.Job, 5) == JobResult("gone", None)


@pytest.mark.once
def test_sync_sessions_for_async_code_are_refused_and_vice_versa(leased: Bench) -> None:
    made: Any = async_sessionmaker(create_async_engine(leased.database.url("asyncpg")))
    with pytest.raises(ConfigurationError, match="makes AsyncSession; give a sessionmaker, or use async_wait"):
        wait(made, (leased.Job, 5))
    sync: Any = leased.sessions
    with pytest.raises(ConfigurationError, match="makes Session; give an async_sessionmaker, or use wait"):
        asyncio.run(async_wait(sync, (leased.Job, 5)))
    with leased.sessions() as session:
        itself: Any = session
        with pytest.raises(
            ConfigurationError, match=r"is a Session, where a session factory is needed; give sessionmaker\(engine\)"
        ):
            wait(itself, (leased.Job, 5))
    engine: Any = leased.engine
    with pytest.raises(ConfigurationError, match=r"wait: Engine\(.*\) is an Engine, .*; give sessionmaker\(engine\)"):
        wait(engine, (leased.Job, 5))
    with pytest.raises(ConfigurationError, match=r"async_wait: Engine\(.*create_async_engine\(\), or use wait"):
        asyncio.run(async_wait(engine, (leased.Job, 5)))


@pytest.mark.once
def test_the_default_timeout(leased: Bench) -> None:
    """A job that no Consumer runs does not block its caller for ever, unless the timeout is None."""
    for verb in (wait, async_wait):
        assert inspect.signature(verb).parameters["timeout"].default == DEFAULT_TIMEOUT == 10
        assert inspect.signature(verb).parameters["timeout"].kind is inspect.Parameter.KEYWORD_ONLY
    (key,) = leased.enqueue()
    with pytest.raises(WaitTimeout, match=r"Job 1 has not finished within 0 s; .*wait\(..., timeout=...\)"):
        wait(leased.sessions, leased.Job, key, timeout=0)


@pytest.mark.once
def test_the_session_of_a_scoped_session_is_not_used(leased: Bench) -> None:
    scoped = scoped_session(leased.sessions)
    (key,) = leased.enqueue()
    job = scoped().get(leased.Job, key)
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
