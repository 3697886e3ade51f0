"""Details of ``enqueue()`` that only show under concurrency, with listeners, or under row-level security."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue import Consumer, Retry, Unique, claim, enqueue, wait
from sqlaqueue.exc import StatementError
from tests.unique.models import create, make_job


@pytest.fixture
def job(engine: sa.Engine) -> Any:
    made = make_job("update_status")
    create(engine, made)
    return made


def test_rows_are_inserted_in_the_order_of_their_values(engine: sa.Engine, job: Any) -> None:
    """Two calls with the same jobs in another order would wait for each other in a circle."""
    with Session(engine) as session:
        jobs = [job(key=key) for key in "dbeac"]
        enqueue(session, jobs)
        assert "".join(each.key for each in sorted(jobs, key=lambda each: each.id)) == "abcde"


def test_calls_at_the_same_time_create_each_job_once(engine: sa.Engine, job: Any) -> None:
    keys, start = "abcdefgh", threading.Barrier(4)

    def call(number: int) -> list[bool]:
        with Session(engine) as session:
            start.wait()
            turned = keys[number:] + keys[:number]
            result = enqueue(session, [job(key=key) for key in turned])
            session.commit()
            return [each.created for _, each in sorted(zip(turned, result, strict=True))]

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(call, range(4)))
    assert [sum(created) for created in zip(*answers, strict=True)] == [1] * len(keys)


def test_a_twin_that_ends_between_two_statements(engine: sa.Engine, job: Any) -> None:
    """It was seen, and is gone when it is to be loaded; or it was not seen, and is gone after the INSERT."""
    with Session(engine) as session:
        enqueue(session, job(key="a"))
        session.commit()
    seen = []

    def delete_once(_: Any, __: Any, statement: str, *___: Any) -> None:
        if statement.startswith("SELECT job.id") and not seen:
            seen.append(statement)
            with engine.connect() as other:
                other.exec_driver_sql("DELETE FROM job")
                other.commit()

    with Session(engine) as session:
        sa.event.listen(engine, "before_cursor_execute", delete_once)
        mine = job(key="a")
        assert enqueue(session, mine) == [(mine, True)]
        session.commit()
    assert len(seen) == 1


@pytest.fixture
def listener(job: Any) -> Iterator[None]:
    def lower(_: Any, __: Any, target: Any) -> None:
        target.key = target.key.lower()

    sa.event.listen(job, "before_insert", lower)
    yield
    sa.event.remove(job, "before_insert", lower)


@pytest.mark.usefixtures("listener")
def test_a_listener_that_changes_a_unique_value(engine: sa.Engine, job: Any) -> None:
    with Session(engine) as session:
        first, second = job(key="A"), job(key="B")
        assert all(each.created for each in enqueue(session, [first, second]))
        assert (first.key, second.key) == ("a", "b")
        session.commit()
        assert enqueue(session, [job(key="A"), job(key="B")]) == [(first, False), (second, False)]


def test_a_twin_that_row_level_security_hides(engine: sa.Engine, job: Any) -> None:
    with Session(engine) as session:
        enqueue(session, job(key="a"))
        session.commit()
    with engine.connect() as connection:
        connection.exec_driver_sql("CREATE ROLE clerk")
        connection.exec_driver_sql("GRANT ALL ON SCHEMA public TO clerk")
        connection.exec_driver_sql("GRANT ALL ON ALL TABLES IN SCHEMA public TO clerk")
        connection.exec_driver_sql("GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO clerk")
        connection.exec_driver_sql("ALTER TABLE job ENABLE ROW LEVEL SECURITY")
        connection.exec_driver_sql("CREATE POLICY own ON job USING (note = 'clerk') WITH CHECK (true)")
        connection.commit()
    try:
        with Session(engine) as session:
            session.execute(sa.text("SET LOCAL ROLE clerk"))
            with pytest.raises(StatementError, match="a Job has a twin that cannot be seen; does row-level security"):
                enqueue(session, job(key="a", note="clerk"))
    finally:
        with engine.connect() as connection:
            connection.exec_driver_sql("DROP OWNED BY clerk; DROP ROLE clerk")
            connection.commit()


def test_wait_returns_a_job_that_was_cancelled_because_of_a_twin(engine: sa.Engine) -> None:
    job = make_job("update_status", Unique("key", states=("pending",)))
    create(engine, job)
    with Session(engine, expire_on_commit=False) as session:
        [(first, _)] = enqueue(session, job(key="a"))
        session.commit()

    def handle(session: Session, each: Any) -> None:
        if each.id == first.id:
            with Session(engine) as other:
                enqueue(other, job(key="a"))
                other.commit()
            raise Retry(0)

    with Consumer(job, handle, sessionmaker(engine)):
        result = wait(sessionmaker(engine), first, timeout=20)
    assert result.state == "cancelled"
    assert str(result.error).startswith("twin: ")


def test_a_twin_is_replaced_or_running(engine: sa.Engine, job: Any) -> None:
    """A replacement waits for an open claim, and then leaves the running job alone."""
    with Session(engine) as session, Session(engine) as worker:
        enqueue(session, job(key="a", note="first"))
        session.commit()
        worker.execute(claim(job, 1))
        with ThreadPoolExecutor(1) as thread:
            call = thread.submit(lambda: enqueue(session, job(key="a", note="second"), on_twin="replace"))
            worker.commit()
            [(twin, created)] = call.result(20)
        assert (twin.status, twin.note, created) == ("processing", "first", False)


def test_a_running_twin_that_is_pending_again_is_replaced(engine: sa.Engine, job: Any) -> None:
    """It runs when it is to be locked, and has been retried when it is loaded."""
    with Session(engine) as session:
        enqueue(session, job(key="a", note="first"))
        session.commit()
        session.execute(claim(job, 1))
        session.commit()
    retried = []

    def retry_once(_: Any, __: Any, statement: str, *___: Any) -> None:
        if statement.startswith("SELECT job.id, job.key") and not retried:
            retried.append(statement)
            with engine.begin() as other:
                other.exec_driver_sql("UPDATE job SET status = 'pending', lease_token = NULL")

    with Session(engine) as session:
        sa.event.listen(engine, "before_cursor_execute", retry_once)
        [(twin, created)] = enqueue(session, job(key="a", note="second"), on_twin="replace")
        assert (twin.status, twin.note, created, len(retried)) == ("pending", "second", False, 1)
        session.commit()


@pytest.mark.parametrize("change", [{"key": None}, {"status": "cancelled"}])
def test_a_listener_after_which_a_job_has_no_twin(engine: sa.Engine, job: Any, change: dict[str, Any]) -> None:
    def clear(_: Any, __: Any, target: Any) -> None:
        if target.key != "a":
            for name, value in change.items():
                setattr(target, name, value)

    sa.event.listen(job, "before_insert", clear)
    try:
        with Session(engine) as session:
            result = enqueue(session, [job(key="x"), job(key="a"), job(key="y")])
            assert [each.created for each in result] == [True, True, True]
            assert len({each.job.id for each in result}) == 3
            session.commit()
            assert session.scalar(sa.select(sa.func.count()).select_from(job)) == 3
    finally:
        sa.event.remove(job, "before_insert", clear)


def test_a_trigger_that_changes_a_unique_value(engine: sa.Engine, job: Any) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE FUNCTION fold() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN NEW.key := lower(NEW.key); RETURN NEW; END $$"
        )
        connection.exec_driver_sql("CREATE TRIGGER fold BEFORE INSERT ON job FOR EACH ROW EXECUTE FUNCTION fold()")
    with Session(engine) as session:
        with pytest.raises(StatementError, match="was inserted with other unique values than it was given"):
            enqueue(session, [job(key="B"), job(key="c")])
        session.commit()
        assert session.scalar(sa.select(sa.func.count()).select_from(job)) == 0


def test_an_after_insert_listener_that_raises(engine: sa.Engine, job: Any) -> None:
    def refuse(_: Any, __: Any, target: Any) -> None:
        raise ValueError(target.key)

    sa.event.listen(job, "after_insert", refuse)
    mine = job(key="a")
    try:
        with Session(engine) as session:
            with pytest.raises(ValueError, match="a"):
                enqueue(session, mine)
            assert sa.inspect(mine).transient
            session.commit()
            assert session.scalar(sa.select(sa.func.count()).select_from(job)) == 0
    finally:
        sa.event.remove(job, "after_insert", refuse)


def test_autocommit(engine: sa.Engine, job: Any) -> None:
    with Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
        assert [each.created for each in enqueue(session, [job(key="a"), job(key="a")])] == [True, False]
        with pytest.raises(StatementError, match="it needs a transaction, and the engine has AUTOCOMMIT"):
            enqueue(session, job(key="a"), on_twin="raise")
