"""Verbs beside rows that others have locked: in small tables the server would rather look at each row."""

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session, aliased, mapped_column, sessionmaker

import sqlaqueue
from sqlaqueue import Unique, cancel, claim, complete, extend, purge, release, requeue, rescue, retry
from sqlaqueue.consumer.quarantine import JournalEntry, close_entry, delete_entry, write_entry
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.run import key_text
from sqlaqueue.queue.spec import clock
from sqlaqueue.sql.engine import sqlstate
from tests.mariadb.server import MariaDBServer
from tests.models import make_job

pytestmark = pytest.mark.once

_numbers = map(str, itertools.count())


def job(*names: str, **config: Any) -> Any:
    """Return a class with a note, and with these attributes."""
    attributes = {
        "note": mapped_column(sa.String(20), default=""),
        "site": mapped_column(sa.String(20), primary_key=True, default="a"),
        "key": mapped_column(sa.String(20), default=lambda: next(_numbers)),
    }
    return make_job(attributes={name: attributes[name] for name in ("note", *names)}, **config)


HISTORY: Any = {"attempt_history": timedelta(days=1)}
MODELS = {
    "plain": job(),
    "pair": job("site"),
    "history": job("site", **HISTORY),
    "unique": job("key", unique=Unique("key")),
    "returns": job("key", "site", unique=Unique("key", states=("pending",)), **HISTORY),
}
Deleted = job("site", kind="batch_select", on_complete="delete")
Held = job(kind="batch_select")
JOBS = 8


@pytest.fixture
def create(mariadb: MariaDBServer) -> Iterator[Callable[..., sessionmaker[Session]]]:
    """A function: create the table of a class, and return sessions that wait a second for a lock."""
    with mariadb.database() as name:
        engines: list[sa.Engine] = []

        def make(model: Any, **options: Any) -> sessionmaker[Session]:
            engine = sqlaqueue.prepare(sa.create_engine(mariadb.url(name), **options))
            engines.append(engine)

            @event.listens_for(engine, "connect")
            def connected(connection: Any, _: Any) -> None:
                connection.cursor().execute("SET innodb_lock_wait_timeout = 1")

            model.metadata.create_all(engine)
            return sessionmaker(engine, expire_on_commit=False)

        yield make
        for engine in engines:
            engine.dispose()


def fill(sessions: sessionmaker[Session], model: Any, **values: Any) -> None:
    with sessions() as session:
        session.execute(sa.delete(model))
        session.add_all(model(id=number, **values) for number in range(1, JOBS + 1))
        session.commit()


@contextmanager
def locked(sessions: sessionmaker[Session], model: Any, number: int = 2) -> Iterator[None]:
    """Lock a job as a handler does that has written it."""
    with sessions() as session:
        session.execute(sa.update(model.__table__).where(model.__table__.c.id == number).values(note="locked"))
        yield
        session.rollback()


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MODELS)
def test_verbs_pass_over_locked_jobs(create: Callable[..., sessionmaker[Session]], name: str) -> None:
    model = MODELS[name]
    sessions = create(model)
    expired = {"status": "processing", "lease_expires_at": clock() - timedelta(hours=1), "attempts": 1}

    def passes(statement: Any, number: int = JOBS - 1, **values: Any) -> None:
        fill(sessions, model, **values)
        with locked(sessions, model), sessions() as session:
            assert len(session.execute(statement).all()) == number
            session.commit()

    passes(claim(model, JOBS))
    passes(cancel(model))
    passes(rescue(model), **expired)
    passes(purge(model), status="completed")
    passes(purge(model, limit=2), 2, status="completed")
    passes(requeue(sa.select(model).where(model.id.in_([1, 3]))), 2, status="failed")
    for verb in (extend, complete, retry, release):
        fill(sessions, model)
        with sessions() as session:
            jobs = session.scalars(claim(model, JOBS)).all()
            session.commit()
        with locked(sessions, model), sessions() as session:
            assert len(session.execute(verb([job for job in jobs if job.id != 2])).all()) == JOBS - 1


@pytest.mark.parametrize("name", ["history", "returns"])
def test_attempts_are_recorded_beside_locked_jobs(create: Callable[..., sessionmaker[Session]], name: str) -> None:
    model = MODELS[name]
    # At this level an INSERT of what a SELECT finds locks each row that the SELECT looks at.
    sessions = create(model, isolation_level="REPEATABLE READ")
    fill(sessions, model, status="processing", lease_expires_at=clock() - timedelta(hours=1), attempts=1)
    with locked(sessions, model), sessions() as session:
        assert len(session.scalars(rescue(model)).all()) == JOBS - 1


def test_one_job_with_a_key_of_two_columns_is_found_by_it(create: Callable[..., sessionmaker[Session]]) -> None:
    model = MODELS["pair"]
    # At this level an UPDATE that looks at each row waits for their locks.
    sessions = create(model, isolation_level="REPEATABLE READ")
    one = sa.select(model).where(model.id == 3)
    for statement in (claim(one, 1), cancel(one)):
        fill(sessions, model)
        with locked(sessions, model), sessions() as session:
            assert len(session.execute(statement).all()) == 1


def test_held_jobs_are_deleted_beside_those_of_another_transaction(
    create: Callable[..., sessionmaker[Session]],
) -> None:
    sessions = create(Deleted)
    fill(sessions, Deleted)
    with sessions() as session, sessions() as other:
        session.scalars(claim(Deleted, 3)).all()
        jobs = other.scalars(claim(Deleted, JOBS)).all()
        assert sorted(other.scalars(complete(jobs))) == [(number, "a") for number in range(4, JOBS + 1)]
        other.commit()
        assert [job.id for job in session.scalars(sa.select(Deleted).order_by(Deleted.id))] == [1, 2, 3]


def test_held_jobs_are_returned_as_they_are_now(create: Callable[..., sessionmaker[Session]]) -> None:
    sessions = create(Held, isolation_level="REPEATABLE READ")
    fill(sessions, Held)
    with sessions() as session:
        assert len(session.scalars(sa.select(Held.id)).all()) == JOBS
        with sessions() as other:
            other.execute(sa.update(Held).where(Held.id == 1).values(note="new"))
            other.commit()
        assert [job.note for job in session.scalars(claim(Held, 2))] == ["new", ""]


def test_two_jobs_leave_the_row_of_a_dead_worker_without_a_deadlock(
    create: Callable[..., sessionmaker[Session]],
) -> None:
    sessions, spec = create(Held), spec_of(Held)
    names = [key_text((number,)) for number in (1, 2, 3)]
    entries = [JournalEntry((name,), solely_responsible=False) for name in names[:2]]
    with sessions() as session:
        for entry in (JournalEntry(tuple(names), solely_responsible=False), *entries):
            write_entry(session, spec, entry, "worker")
            session.commit()
    with sessions() as first, sessions() as second:
        for session, entry in zip((first, second), entries, strict=True):
            delete_entry(session, spec, entry)
        thread = threading.Thread(target=lambda: (close_entry(second, spec, entries[1]), second.commit()))
        thread.start()
        close_entry(first, spec, entries[0])
        first.commit()
        thread.join()
    with sessions() as session:
        left = session.scalars(sa.text("SELECT `keys` FROM sqlaqueue_crash_journal")).all()
        assert [json.loads(names) for names in left] == [["3"]]


def test_a_deadlock_in_the_steps_of_a_verb_is_raised(create: Callable[..., sessionmaker[Session]]) -> None:
    model = MODELS["unique"]
    sessions = create(model)
    fill(sessions, model, status="failed")
    table = model.__table__
    requeued = requeue(sa.select(model).where(model.id == 1))
    with sessions() as session, sessions() as other:
        session.execute(sa.update(table).where(table.c.id == 2).values(note="mine"))
        # So that it is the other one that the server gives up.
        other.execute(sa.update(table).where(table.c.id >= 3).values(note="other"))
        other.execute(sa.update(table).where(table.c.id == 1).values(note="other"))
        waits = threading.Thread(target=lambda: other.execute(sa.update(table).where(table.c.id == 2).values(note="")))
        waits.start()
        with pytest.raises(OperationalError) as caught:
            session.execute(requeued)
        assert sqlstate(caught.value) == "40P01"
        session.rollback()
        waits.join()


def test_an_alias_can_be_updated_with_returning(create: Callable[..., sessionmaker[Session]]) -> None:
    model = MODELS["plain"]
    sessions = create(model)
    fill(sessions, model)
    one = aliased(model)
    with sessions() as session:
        changed = sa.update(one).where(one.id == 1).values(note="new").returning(one.id, one.note)
        assert session.execute(changed).all() == [(1, "new")]
