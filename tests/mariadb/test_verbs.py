"""The statements of a queue on MariaDB, each verb once and with keys of each kind."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, load_only

import sqlaqueue.mariadb
from sqlaqueue import (
    cancel,
    claim,
    complete,
    extend,
    fail,
    pause,
    purge,
    release,
    requeue,
    rescue,
    resume,
    retry,
)
from sqlaqueue.queue.names import ATTEMPT, CONTROL
from tests.mariadb.models import Base, ByUuid, Job, Pair, Report

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.orm import sessionmaker


def enqueue(engine: sa.Engine, *jobs: Any) -> None:
    with Session(engine) as session:
        session.add_all(jobs)
        session.commit()


def rows(engine: sa.Engine, *columns: Any) -> list[Any]:
    with Session(engine) as session:
        return [tuple(row) for row in session.execute(sa.select(*columns).order_by(columns[0]))]


def expire(engine: sa.Engine, model: Any) -> None:
    """Let the leases of all jobs expire."""
    with engine.begin() as connection:
        connection.execute(sa.update(model).values(lease_expires_at=datetime(2020, 1, 1, tzinfo=UTC)))


def test_a_claim_takes_the_first_due_jobs_in_order(engine: sa.Engine) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    enqueue(engine, *(Job(id=n, priority=n % 2) for n in range(1, 7)), Job(id=7, priority=-1, run_at=later))
    with Session(engine) as session:
        jobs = session.scalars(claim(Job, 4)).all()
        assert [job.id for job in jobs] == [2, 4, 6, 1]
        assert {(job.status, job.attempts) for job in jobs} == {("processing", 1)}
        assert {type(job.lease_token) for job in jobs} == {UUID}
        session.commit()
        assert [job.id for job in session.scalars(claim(Job, 4))] == [3, 5]
        assert not session.scalars(claim(Job, 4)).all()


def test_each_verb_returns_the_keys_of_what_it_changes(engine: sa.Engine) -> None:
    enqueue(engine, *(Job(id=n) for n in range(1, 9)))
    with Session(engine) as session:
        first, second, third, fourth, fifth = session.scalars(claim(Job, 5)).all()
        session.commit()
        assert session.scalars(extend([first, second])).all() == [1, 2]
        assert session.scalars(complete(first)).all() == [1]
        assert not session.scalars(complete(first)).all(), "the run is settled"
        assert session.scalars(retry(second, delay=60, error="x" * 70_000)).all() == [2]
        assert session.scalars(fail(third, error=ValueError("\N{SNOWMAN}"))).all() == [3]
        assert session.scalars(release(fourth)).all() == [4]
        assert (first.status, second.attempts, third.status, fourth.attempts) == ("completed", 1, "failed", 0)
        session.commit()
        assert sorted(session.scalars(cancel(sa.select(Job).where(Job.id >= 4))).all()) == [4, 6, 7, 8]
        assert session.scalar(sa.select(sa.func.count()).select_from(Base.metadata.tables[CONTROL])) == 1
        assert sorted(session.scalars(requeue(sa.select(Job).where(Job.id.in_([3, 7])))).all()) == [3, 7]
        assert sorted(session.scalars(purge(Job)).all()) == [1, 4, 6, 8]
        session.commit()
        assert session.scalars(complete(fifth)).all() == [5]
        session.commit()
    stored = dict(rows(engine, Job.id, Job.last_error))
    assert (len(stored[2] or ""), stored[3]) == (70_000, "ValueError: \N{SNOWMAN}")


def test_a_composite_key_and_an_attempt_history(engine: sa.Engine) -> None:
    enqueue(engine, *(Pair(site=site, number=n) for site in ("a", "b", "c ", "\N{SNOWMAN}") for n in (1, 2)))
    with Session(engine) as session:
        jobs = session.scalars(claim(Pair, 5)).all()
        session.commit()
        assert len({(job.site, job.number) for job in jobs}) == 5
        keys = {(job.site, job.number) for job in jobs[:2]}
        assert {*session.scalars(complete(jobs[:2])).all()} == keys
        assert {*session.scalars(extend(jobs[2:])).all()} == {(job.site, job.number) for job in jobs[2:]}
        session.commit()
        expire(engine, Pair)
        assert len(session.scalars(rescue(Pair)).all()) == 3
        session.commit()
        history = Base.metadata.tables[ATTEMPT]
        found = session.execute(sa.select(history.c.outcome, history.c.key, history.c.worker)).all()
        assert {outcome for outcome, *_ in found} == {"rescued"}
        assert {tuple(key) for _, key, _ in found} == {(job.site, job.number) for job in jobs[2:]}
        assert all(worker for *_, worker in found)
        session.scalars(cancel(sa.select(Pair).where(Pair.status == "pending"))).all()
        session.commit()
        assert len(session.scalars(purge(Pair)).all()) == 8


@pytest.mark.parametrize("driver", ["mariadb+pymysql", "mysql+pymysql"])
def test_uuid_keys_and_tokens(url: Callable[[str], str], tables: str, driver: str, engine: sa.Engine) -> None:
    # For the dialect mysql a UUID is a text of 32 characters; the tables have the native type.
    if driver == "mysql+pymysql":
        with engine.begin() as connection:
            ByUuid.__table__.drop(connection)
    own = sa.create_engine(url(driver))
    sqlaqueue.mariadb.prepare(own)
    Base.metadata.create_all(own)
    keys = [uuid4() for _ in range(4)]
    enqueue(own, *(ByUuid(id=key) for key in keys))
    with Session(own) as session:
        jobs = session.scalars(claim(ByUuid, 4)).all()
        session.commit()
        assert {*session.scalars(complete(jobs[:1])).all()} == {jobs[0].id}
        assert {*session.scalars(cancel(sa.select(ByUuid).where(ByUuid.id == jobs[1].id))).all()} == set()
        session.commit()
        expire(own, ByUuid)
        # They ran beside each other, so none of them is known to be responsible.
        assert {*session.scalars(rescue(ByUuid)).all()} == {job.id for job in jobs[1:]}
        session.commit()
        assert {*session.scalars(sa.select(ByUuid.attempts))} == {0, 1}
    with own.begin() as connection:
        ByUuid.__table__.drop(connection)
    own.dispose()
    with engine.begin() as connection:
        ByUuid.__table__.create(connection, checkfirst=True)


def test_a_rescued_job_that_ran_alone_fails_after_its_last_attempt(engine: sa.Engine) -> None:
    enqueue(engine, Job(id=1, attempts=2), Job(id=2))
    for _ in range(2):
        with Session(engine) as session:
            session.scalars(claim(Job, 1)).all()
            session.commit()
    expire(engine, Job)
    with Session(engine) as session:
        # The new status, token and number of attempts are computed from the old ones, whatever their order is.
        assert sorted(session.scalars(rescue(Job)).all()) == [1, 2]
        session.commit()
    assert rows(engine, Job.id, Job.status, Job.attempts) == [(1, "failed", 3), (2, "pending", 1)]
    tokens = dict(rows(engine, Job.id, Job.lease_token))
    assert tokens[1] is None
    assert tokens[2] is not None


def test_a_select_with_conditions_and_options(engine: sa.Engine) -> None:
    enqueue(engine, *(Job(id=n, payload="ab"[n % 2], data={"n": n}) for n in range(1, 7)))
    with Session(engine) as session:
        chosen = sa.select(Job).where(Job.payload == "a").options(load_only(Job.payload))
        assert [(job.id, job.data["n"]) for job in session.scalars(claim(chosen, 2))] == [(2, 2), (4, 4)]
        twice = sa.select(Job).where(Job.id.in_(sa.select(Job.id).where(Job.id > 4)))
        assert [job.id for job in session.scalars(claim(twice, 5))] == [5, 6]


def test_a_paused_queue(engine: sa.Engine) -> None:
    enqueue(engine, Job(id=1))
    with Session(engine) as session:
        session.execute(pause(Job))
        session.execute(pause(Job))
        session.commit()
        assert not session.scalars(claim(Job, 1)).all()
        session.execute(resume(Job))
        assert len(session.scalars(claim(Job, 1)).all()) == 1


def test_a_rollback_undoes_each_part_of_a_statement(engine: sa.Engine) -> None:
    enqueue(engine, Job(id=1), Job(id=2))
    with Session(engine) as session:
        session.scalars(claim(Job, 1)).all()
        session.scalars(cancel(Job)).all()
        session.rollback()
    assert rows(engine, Job.id, Job.status) == [(1, "pending"), (2, "pending")]


def test_an_update_of_the_program_may_return_rows(engine: sa.Engine) -> None:
    """Each value is computed from the row before the UPDATE, as the standard says and MariaDB does not."""
    enqueue(engine, Job(id=1, priority=1, attempts=5), Job(id=2, priority=2, attempts=7))
    change = sa.update(Job).values(priority=Job.attempts, attempts=Job.priority).returning(Job.id, Job.priority)
    with engine.begin() as connection:
        assert sorted(map(tuple, connection.execute(change))) == [(1, 5), (2, 7)]
        removed = sa.delete(Job).where(Job.priority > 6).returning(Job.id, Job.attempts)
        assert connection.execute(removed).all() == [(2, 2)]
    assert rows(engine, Job.id, Job.attempts) == [(1, 1)]


def test_async_sessions(url: Callable[[str], str], engine: sa.Engine) -> None:
    enqueue(engine, *(Job(id=n) for n in range(1, 5)))

    async def use() -> None:
        own = create_async_engine(url("mariadb+asyncmy"))
        sqlaqueue.mariadb.prepare(own)
        async with async_sessionmaker(own)() as session:
            jobs = (await session.scalars(claim(Job, 3))).all()
            await session.commit()
            assert (await session.scalars(complete(jobs[0]))).all() == [1]
            assert (await session.scalars(retry(jobs[1:], delay=1))).all() == [2, 3]
            assert (await session.scalars(cancel(sa.select(Job).where(Job.id == 4)))).all() == [4]
            await session.commit()
        await own.dispose()

    asyncio.run(use())
    assert [status for _, status in rows(engine, Job.id, Job.status)] == [
        "completed",
        "pending",
        "pending",
        "cancelled",
    ]


def test_the_statements_of_a_queue_without_notifications(sessions: sessionmaker[Session]) -> None:
    with sessions() as session:
        session.add_all([Report(), Report()])
        session.commit()
        (job,) = session.scalars(claim(Report, 1)).all()
        session.commit()
        assert len(session.scalars(cancel(Report)).all()) == 1
        session.commit()
        session.execute(
            sa.update(Report).values(lease_expires_at=sa.func.now() - sa.literal(timedelta(1), sa.Interval()))
        )
        session.commit()
        assert session.scalars(rescue(Report)).all() == [job.id]
        session.commit()
