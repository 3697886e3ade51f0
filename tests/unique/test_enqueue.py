"""``enqueue()``, ``async_enqueue()`` and ``copy_in(on_duplicate=...)``: a job is created, or is there already."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import ORMExecuteState, Session, sessionmaker, with_loader_criteria

from sqlaqueue import Consumer, JobExists, Retry, Unique, async_copy_in, async_enqueue, claim, copy_in, enqueue, wait
from sqlaqueue.exc import ConfigurationError, StatementError
from tests.models import execute, insert
from tests.servers import Database
from tests.unique.models import KINDS, create, make_job


@pytest.fixture(params=KINDS)
def job(engine: sa.Engine, request: pytest.FixtureRequest) -> Any:
    return create(engine, make_job(request.param))


def count(engine: sa.Engine, job: Any) -> int:
    with engine.connect() as connection:
        return connection.scalar(sa.select(sa.func.count()).select_from(job.__table__)) or 0


def test_a_job_is_created_once(engine: sa.Engine, job: Any) -> None:
    with Session(engine) as session:
        first = job(key="a", note="first")
        [(created, is_new)] = enqueue(session, first)
        assert (created, is_new) == (first, True)
        assert first in session
        assert not session.new
        assert not session.dirty
        assert first.id is not None
        assert first.attempts == 0
        session.commit()
        second = job(key="a", note="second")
        [(existing, is_new)] = enqueue(session, [second])
        assert (existing, is_new) == (first, False)
        assert second not in session
        session.commit()
        assert first.note == "first"
    assert count(engine, job) == 1


def test_a_job_that_a_condition_on_all_statements_hides_exists(engine: sa.Engine, job: Any) -> None:
    """Its values are taken all the same."""

    class Hiding(Session):
        pass

    @sa.event.listens_for(Hiding, "do_orm_execute")
    def _hide(state: ORMExecuteState) -> None:
        visible = job.note.is_distinct_from("hidden")
        state.statement = state.statement.options(with_loader_criteria(job, visible, include_aliases=True))

    insert(engine, job, [{"key": "a", "note": "hidden"}])
    with Hiding(engine) as session:
        [(existing, is_new)] = enqueue(session, [job(key="a", note="second")])
        assert (existing.note, is_new) == ("hidden", False)
    assert count(engine, job) == 1


def test_the_answers_are_in_order(session: Session, job: Any) -> None:
    session.add(job(id=7, key="c"))
    session.commit()
    jobs = [job(key=key) for key in "bcabza"]
    result = enqueue(session, jobs)
    assert [each.created for each in result] == [True, False, True, False, True, False]
    assert result[1].job.id == 7
    assert result[3].job is jobs[0]
    assert result[5].job is jobs[2]
    session.commit()
    assert sorted(session.scalars(sa.select(job.key))) == ["a", "b", "c", "z"]


def test_attributes_are_loaded_as_after_a_flush(engine: sa.Engine, session: Session, job: Any) -> None:
    statements: list[str] = []
    mine, other = job(key="a"), job(key="b")
    enqueue(session, [mine, other])
    sa.event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    assert mine.run_at.tzinfo is not None
    assert (mine.attempts, other.note, mine.id != other.id) == (0, None, True)
    session.flush()
    assert not statements


def test_null_keys_have_no_duplicates(engine: sa.Engine, job: Any) -> None:
    with Session(engine) as session, session.begin():
        enqueue(session, job())
        result = enqueue(session, [job(), job(key="a"), job()])
        assert all(each.created for each in result)
    assert count(engine, job) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_null_keys_are_duplicates_if_configured(engine: sa.Engine, session: Session, kind: str) -> None:
    job = create(engine, make_job(kind, Unique("key", nulls_distinct=False)))
    first, second, third = enqueue(session, [job(), job(key="a"), job()])
    assert [first.created, second.created, third.created] == [True, True, False]
    assert third.job is first.job
    assert enqueue(session, job())[0].job is first.job
    session.commit()
    with pytest.raises(sa.exc.IntegrityError, match="ix_job_queue_unique"):
        session.add(job())
        session.flush()


def test_a_rollback_makes_the_instances_new_again(engine: sa.Engine, job: Any) -> None:
    mine = job(key="a")
    with Session(engine) as session:
        enqueue(session, mine)
        session.rollback()
        assert sa.inspect(mine).transient
        assert enqueue(session, mine) == [(mine, True)]
        session.commit()
    assert count(engine, job) == 1


def test_a_savepoint_undoes_an_enqueued_job(engine: sa.Engine, job: Any) -> None:
    with Session(engine) as session:
        enqueue(session, job(key="a"))
        with pytest.raises(ValueError, match="stop"), session.begin_nested():
            [(existing, created)] = enqueue(session, job(key="a"))
            assert not created
            enqueue(session, [job(key="b"), job(key="c")])
            raise ValueError("stop")
        assert enqueue(session, job(key="b"))[0].created
        assert existing.key == "a"
        session.commit()
    assert count(engine, job) == 2


def test_jobs_that_the_session_has_not_flushed_are_duplicates(engine: sa.Engine, job: Any) -> None:
    with Session(engine, autoflush=False) as session:
        first = job(key="a")
        session.add(first)
        assert enqueue(session, job(key="a")) == [(first, False)]


def test_a_job_that_was_added_to_the_session(session: Session, job: Any) -> None:
    enqueue(session, job(key="a"))
    mine = job(key="a")
    session.add(mine)
    [(existing, created)] = enqueue(session, mine)
    assert not created
    assert mine not in session
    session.commit()
    assert existing.key == "a"


def test_on_duplicate_raise_inserts_nothing(engine: sa.Engine, job: Any) -> None:
    with Session(engine) as session:
        [(existing, _)] = enqueue(session, job(key="b"), on_duplicate="raise")
        jobs = [job(key="a"), job(key="b")]
        with pytest.raises(JobExists, match=r": Job with key='b' exists; it has the key 1") as raised:
            enqueue(session, jobs, on_duplicate="raise")
        assert (raised.value.job, raised.value.existing) == (jobs[1], existing)
        jobs = [job(key="c"), job(key="c")]
        with pytest.raises(JobExists, match="given in the same call") as raised:
            enqueue(session, jobs, on_duplicate="raise")
        assert (raised.value.job, raised.value.existing) == (jobs[1], jobs[0])
        session.commit()
    assert count(engine, job) == 1


def test_a_finished_job_is_no_duplicate(engine: sa.Engine, session: Session) -> None:
    job = create(engine, make_job("update_status"))
    [(first, _)] = enqueue(session, job(key="a"))
    first.status = "completed"
    session.commit()
    assert enqueue(session, job(key="a"))[0].created


def test_a_running_job_is_a_duplicate_unless_configured(engine: sa.Engine, session: Session) -> None:
    job = create(engine, make_job("update_status", Unique("key", states=("pending",))))
    [(first, _)] = enqueue(session, job(key="a"))
    session.commit()
    session.execute(claim(job, 1))
    session.commit()
    [(second, created)] = enqueue(session, job(key="a"))
    assert created
    session.commit()
    assert (first.status, second.status) == ("processing", "pending")


@pytest.mark.parametrize("kind", KINDS)
def test_a_period(engine: sa.Engine, session: Session, kind: str) -> None:
    job = create(engine, make_job(kind, Unique("key", within=timedelta(hours=1))))
    noon = datetime(2026, 3, 1, 12, tzinfo=UTC)
    first = job(key="a", created_at=noon)
    second = job(key="a", created_at=noon + timedelta(minutes=59))
    third = job(key="a", created_at=noon + timedelta(minutes=60))
    assert [each.created for each in enqueue(session, [first, second, third])] == [True, False, True]
    assert [each.created for each in enqueue(session, [job(key="a"), job(key="a"), job(key="b")])] == [
        True,
        False,
        True,
    ]
    session.commit()
    assert session.scalars(sa.select(job).where(job.key == "b")).one().created_at is not None


def test_on_duplicate_replace(engine: sa.Engine, session: Session) -> None:
    job = create(engine, make_job("update_status"))
    later = datetime.now(UTC) + timedelta(hours=1)
    [(first, _)] = enqueue(session, job(key="a", note="first", priority=5))
    session.commit()
    created_at, run_at = first.created_at, first.run_at
    session.execute(sa.update(job).values(attempts=2, last_error="old"))
    session.commit()
    [(same, created)] = enqueue(session, job(key="a", note="second", run_at=later), on_duplicate="replace")
    assert (same, created) == (first, False)
    assert (first.note, first.run_at, first.priority, first.attempts) == ("second", later, 0, 0)
    assert (first.last_error, first.created_at) == (None, created_at)
    session.commit()
    enqueue(session, job(key="a", note="third"), on_duplicate="replace_keep_time")
    assert (first.note, first.run_at) == ("third", later)
    session.commit()
    enqueue(session, job(key="a"), on_duplicate="replace")
    assert first.note is None
    assert run_at < first.run_at < later
    session.commit()
    result = enqueue(
        session, [job(key="b", note="1"), job(key="b", note="2"), job(key="b", note="3")], on_duplicate="replace"
    )
    assert [each.created for each in result] == [True, False, False]
    assert {id(each.job) for each in result} == {id(result[0].job)}
    assert result[0].job.note == "3"
    session.commit()
    assert result[0].job.note == "3"


def test_a_running_duplicate_is_never_replaced(engine: sa.Engine, session: Session) -> None:
    job = create(engine, make_job("update_status"))
    enqueue(session, job(key="a", note="first"))
    session.commit()
    session.execute(claim(job, 1))
    session.commit()
    [(duplicate, created)] = enqueue(session, job(key="a", note="second"), on_duplicate="replace")
    assert (duplicate.note, duplicate.status, created) == ("first", "processing", False)


def test_ten_thousand_jobs(engine: sa.Engine) -> None:
    job = create(engine, make_job("update_status"))
    statements: list[str] = []
    sa.event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    with Session(engine) as session, session.begin():
        enqueue(session, [job(key=str(number)) for number in range(0, 10_000, 2)])
        statements.clear()
        result = enqueue(session, [job(key=str(number)) for number in range(10_000)])
    assert [each.created for each in result] == [False, True] * 5000
    assert len(statements) < 15
    assert count(engine, job) == 10_000


def test_a_visible_duplicate_is_not_waited_for(engine: sa.Engine, job: Any) -> None:
    with Session(engine) as session, Session(engine) as other:
        enqueue(session, job(key="a", note="first"))
        session.commit()
        other.execute(sa.delete(job))
        session.execute(sa.text("SET lock_timeout = '1ms'"))
        assert not enqueue(session, job(key="a"))[0].created
        other.rollback()


def test_an_uncommitted_duplicate_is_waited_for_up_to_the_lock_timeout(engine: sa.Engine, job: Any) -> None:
    with Session(engine) as session, Session(engine) as other:
        enqueue(other, job(key="a"))
        mine = job(key="a")
        session.execute(sa.text("SET LOCAL lock_timeout = '20ms'"))
        with pytest.raises(sa.exc.OperationalError, match="lock timeout"):
            enqueue(session, mine)
        session.rollback()
        other.rollback()
        assert enqueue(session, mine) == [(mine, True)]


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_transaction_with_a_snapshot_is_repeated(engine: sa.Engine, job: Any, level: Any) -> None:
    jobs = [job(key="a"), job(key="b")]
    with Session(engine) as session, Session(engine) as other:
        for time in ("first", "second"):
            session.connection(execution_options={"isolation_level": level})
            session.execute(sa.text("SELECT 1"))
            if time == "first":
                enqueue(other, job(key="b"))
                other.commit()
                with pytest.raises(sa.exc.OperationalError) as raised:
                    enqueue(session, jobs)
                assert getattr(raised.value.orig, "sqlstate", None) == "40001"
                session.rollback()
            else:
                assert [each.created for each in enqueue(session, jobs)] == [True, False]
                session.commit()
    assert count(engine, job) == 2


# -- details of ``enqueue()`` that only show under concurrency, with listeners, or under row-level security --------


@pytest.fixture
def plain(engine: sa.Engine) -> Any:
    return create(engine, make_job("update_status"))


def test_rows_are_inserted_in_the_order_of_their_values(session: Session, plain: Any) -> None:
    """Two calls with the same jobs in another order would wait for each other in a circle."""
    jobs = [plain(key=key) for key in "dbeac"]
    enqueue(session, jobs)
    assert "".join(each.key for each in sorted(jobs, key=lambda each: each.id)) == "abcde"


def test_calls_at_the_same_time_create_each_job_once(engine: sa.Engine, plain: Any) -> None:
    keys, start = "abcdefgh", threading.Barrier(4)

    def call(number: int) -> list[bool]:
        with Session(engine) as session:
            start.wait()
            turned = keys[number:] + keys[:number]
            result = enqueue(session, [plain(key=key) for key in turned])
            session.commit()
            return [each.created for _, each in sorted(zip(turned, result, strict=True))]

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(call, range(4)))
    assert [sum(created) for created in zip(*answers, strict=True)] == [1] * len(keys)


def test_a_duplicate_that_ends_between_two_statements(engine: sa.Engine, plain: Any) -> None:
    """It was seen, and is gone when it is to be loaded; or it was not seen, and is gone after the INSERT."""
    with Session(engine) as session, session.begin():
        enqueue(session, plain(key="a"))
    seen = []

    def delete_once(_: Any, __: Any, statement: str, *___: Any) -> None:
        if statement.startswith("SELECT job.id") and not seen:
            seen.append(statement)
            with engine.connect() as other:
                other.exec_driver_sql("DELETE FROM job")
                other.commit()

    with Session(engine) as session, session.begin():
        sa.event.listen(engine, "before_cursor_execute", delete_once)
        mine = plain(key="a")
        assert enqueue(session, mine) == [(mine, True)]
    assert len(seen) == 1


def test_each_flush_meets_a_new_duplicate(engine: sa.Engine, plain: Any) -> None:
    """Each is rolled back; the second and later ones halve the number of jobs, so that some get through."""
    flushes: list[list[str]] = []

    def insert_duplicate(connection: sa.Connection, _: Any, statement: str, parameters: Any, *__: Any) -> None:
        if statement.startswith("INSERT INTO job") and connection is mine:
            flushes.append([value for name, value in parameters.items() if name.startswith("key")])
            if len(flushes) < 6:
                insert(engine, plain, [{"key": flushes[-1][-1], "note": "of another transaction"}])

    with Session(engine) as session, session.begin():
        mine = session.connection()
        sa.event.listen(engine, "before_cursor_execute", insert_duplicate)
        jobs = [plain(key=f"{number:03}") for number in range(100)]
        result = enqueue(session, jobs)
        assert [each.job.key for each in result] == [job.key for job in jobs]
        existing = [each.job for each in result if not each.created]
        assert {each.key for each in existing} == {each[-1] for each in flushes[:5]}
        assert {each.note for each in existing} == {"of another transaction"}
    assert [len(each) for each in flushes] == [100, 99, 49, 24, 12, 6, 12, 24, 48, 5]
    assert count(engine, plain) == 100


def test_what_a_flush_has_set_is_unset_after_it_was_rolled_back(engine: sa.Engine, plain: Any) -> None:
    """The next one leaves the key and the columns of the queue to the server again, as the first one did."""
    columns: list[str] = []

    def insert_duplicate(connection: sa.Connection, _: Any, statement: str, *__: Any) -> None:
        if statement.startswith("INSERT INTO job") and connection is mine:
            columns.append(statement.partition("(")[2].partition(")")[0])
            if len(columns) == 2:
                insert(engine, plain, [{"key": "b", "note": "of another transaction"}])

    with Session(engine) as session, session.begin():
        mine = session.connection()
        sa.event.listen(engine, "before_cursor_execute", insert_duplicate)
        # Two statements, as they have other attributes.
        result = enqueue(session, [plain(key="a"), plain(key="b", priority=3)])
        assert [each.created for each in result] == [True, False]
    assert columns == ["payload, key, note", "payload, key, note, priority", "payload, key, note"]


def test_statements_of_a_call(engine: sa.Engine, plain: Any) -> None:
    """The numbers of docs/evidence/enqueue.md."""
    statements: list[str] = []
    with Session(engine) as session, session.begin():
        enqueue(session, plain(key="first"))
        sa.event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2].split()[0]))
        enqueue(session, [plain(key="a"), plain(key="b")])
        assert statements == ["SELECT", "SAVEPOINT", "INSERT", "RELEASE"]
        statements.clear()
        session.expunge_all()
        enqueue(session, [plain(key="a"), plain(key="b")])
        assert statements == ["SELECT", "SELECT"]
        statements.clear()
        enqueue(session, [plain(key="b"), plain(key="c")])
        assert statements == ["SELECT", "SAVEPOINT", "INSERT", "SELECT", "RELEASE"]
        statements.clear()
        enqueue(session, [plain(key="b"), plain(key="c")], on_duplicate="replace")
        assert statements == ["SELECT", "SAVEPOINT", "SELECT", "SELECT", "UPDATE", "SELECT", "RELEASE"]


def test_jobs_that_are_unique_by_a_constant_of_the_queue(engine: sa.Engine, session: Session) -> None:
    """The server computes it for an INSERT that leaves it out, so that the search has to know it."""
    job = create(engine, make_job("update_status", Unique("key", "priority")))
    result = enqueue(session, [job(key="a"), job(key="a", priority=0), job(key="a", priority=1)])
    assert [each.created for each in result] == [True, False, True]


@pytest.fixture
def listener(plain: Any) -> Iterator[None]:
    def lower(_: Any, __: Any, target: Any) -> None:
        target.key = target.key.lower()

    sa.event.listen(plain, "before_insert", lower)
    yield
    sa.event.remove(plain, "before_insert", lower)


@pytest.mark.usefixtures("listener")
def test_a_listener_that_changes_a_unique_value(session: Session, plain: Any) -> None:
    first, second = plain(key="A"), plain(key="B")
    assert all(each.created for each in enqueue(session, [first, second]))
    assert (first.key, second.key) == ("a", "b")
    session.commit()
    assert enqueue(session, [plain(key="A"), plain(key="B")]) == [(first, False), (second, False)]


def test_a_duplicate_that_row_level_security_hides(engine: sa.Engine, plain: Any) -> None:
    with Session(engine) as session, session.begin():
        enqueue(session, plain(key="a"))
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
            with pytest.raises(
                StatementError, match="this Job has a duplicate that cannot be seen; does row-level security"
            ):
                enqueue(session, plain(key="a", note="clerk"))
    finally:
        with engine.connect() as connection:
            connection.exec_driver_sql("DROP OWNED BY clerk; DROP ROLE clerk")
            connection.commit()


def test_wait_returns_a_job_that_was_cancelled_because_of_a_duplicate(engine: sa.Engine) -> None:
    plain = create(engine, make_job("update_status", Unique("key", states=("pending",))))
    with Session(engine, expire_on_commit=False) as session, session.begin():
        [(first, _)] = enqueue(session, plain(key="a"))

    def handle(session: Session, each: Any) -> None:
        if each.id == first.id:
            with Session(engine) as other, other.begin():
                enqueue(other, plain(key="a"))
            raise Retry(0)

    with Consumer(plain, handle, sessionmaker(engine)):
        result = wait(sessionmaker(engine), first, timeout=20)
    assert result.state == "cancelled"
    assert str(result.error).startswith("duplicate of job ")


def test_a_duplicate_is_replaced_or_running(engine: sa.Engine, plain: Any) -> None:
    """A replacement waits for an open claim, and then leaves the running job alone."""
    with Session(engine) as session, Session(engine) as worker:
        enqueue(session, plain(key="a", note="first"))
        session.commit()
        worker.execute(claim(plain, 1))
        with ThreadPoolExecutor(1) as thread:
            call = thread.submit(lambda: enqueue(session, plain(key="a", note="second"), on_duplicate="replace"))
            worker.commit()
            [(duplicate, created)] = call.result(20)
        assert (duplicate.status, duplicate.note, created) == ("processing", "first", False)


def test_a_running_duplicate_that_is_pending_again_is_replaced(engine: sa.Engine, plain: Any) -> None:
    """It runs when it is to be locked, and has been retried when it is loaded."""
    with Session(engine) as session:
        enqueue(session, plain(key="a", note="first"))
        session.commit()
        session.execute(claim(plain, 1))
        session.commit()
    retried = []

    def retry_once(_: Any, __: Any, statement: str, *___: Any) -> None:
        if statement.startswith("SELECT job.id, job.payload") and not retried:
            retried.append(statement)
            execute(engine, "UPDATE job SET status = 'pending', lease_token = NULL")

    with Session(engine) as session, session.begin():
        sa.event.listen(engine, "before_cursor_execute", retry_once)
        [(duplicate, created)] = enqueue(session, plain(key="a", note="second"), on_duplicate="replace")
        assert (duplicate.status, duplicate.note, created, len(retried)) == ("pending", "second", False, 1)


@pytest.mark.parametrize("change", [{"key": None}, {"status": "cancelled"}])
def test_a_listener_after_which_a_job_has_no_duplicate(engine: sa.Engine, plain: Any, change: dict[str, Any]) -> None:
    def clear(_: Any, __: Any, target: Any) -> None:
        if target.key != "a":
            for name, value in change.items():
                setattr(target, name, value)

    sa.event.listen(plain, "before_insert", clear)
    try:
        with Session(engine) as session:
            result = enqueue(session, [plain(key="x"), plain(key="a"), plain(key="y")])
            assert [each.created for each in result] == [True, True, True]
            assert len({each.job.id for each in result}) == 3
            session.commit()
            assert session.scalar(sa.select(sa.func.count()).select_from(plain)) == 3
    finally:
        sa.event.remove(plain, "before_insert", clear)


def test_a_trigger_that_changes_a_unique_value(engine: sa.Engine, session: Session, plain: Any) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE FUNCTION fold() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN NEW.key := lower(NEW.key); RETURN NEW; END $$"
        )
        connection.exec_driver_sql("CREATE TRIGGER fold BEFORE INSERT ON job FOR EACH ROW EXECUTE FUNCTION fold()")
    assert all(each.created for each in enqueue(session, [plain(key="B"), plain(key="c")]))
    with pytest.raises(StatementError, match="a duplicate that cannot be seen; does .* a trigger change its values"):
        enqueue(session, [plain(key="a"), plain(key="B")])
    session.commit()
    assert sorted(session.scalars(sa.select(plain.key))) == ["b", "c"]


def test_an_after_insert_listener_that_raises(engine: sa.Engine, plain: Any) -> None:
    def refuse(_: Any, __: Any, target: Any) -> None:
        raise ValueError(target.key)

    sa.event.listen(plain, "after_insert", refuse)
    mine = plain(key="a")
    try:
        with Session(engine) as session:
            with pytest.raises(ValueError, match="a"):
                enqueue(session, mine)
            assert sa.inspect(mine).transient
            session.commit()
            assert session.scalar(sa.select(sa.func.count()).select_from(plain)) == 0
    finally:
        sa.event.remove(plain, "after_insert", refuse)


@pytest.mark.parametrize("choice", ["raise", "replace", "replace_keep_time"])
def test_autocommit(engine: sa.Engine, plain: Any, choice: Any) -> None:
    with Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
        assert [each.created for each in enqueue(session, [plain(key="a"), plain(key="a")])] == [True, False]
        with pytest.raises(StatementError, match="it needs a transaction, and the engine has AUTOCOMMIT"):
            enqueue(session, plain(key="a"), on_duplicate=choice)


# -- ``async_enqueue()``, with asyncpg and psycopg -----------------------------------------------------------------


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_async_enqueue(shared: Database, engine: sa.Engine, driver: Any) -> None:
    job = create(engine, make_job("update_status", Unique("key", nulls_distinct=False)))

    async def run() -> None:
        of_driver = create_async_engine(shared.url(driver))
        async with AsyncSession(of_driver) as session:
            jobs = [job(key="a"), job(key="b"), job(key="a"), job()]
            first, second, third, fourth = await async_enqueue(session, jobs)
            assert [first.created, second.created, third.created, fourth.created] == [True, True, False, True]
            assert third.job is first.job
            # No attribute is left to be loaded, which would need an await.
            assert [each.attempts for each in jobs[:2]] == [0, 0]
            await session.commit()
            [again] = await async_enqueue(session, job(key="b", note="new"), on_duplicate="replace")
            assert (again.job, again.job.note, again.created) == (second.job, "new", False)
            same = await async_enqueue(session, [job(key="c"), job(key="c", note="last")], on_duplicate="replace")
            assert same[0].job.note == "last"
            await session.commit()
        scoped = async_scoped_session(async_sessionmaker(of_driver), asyncio.current_task)
        assert not (await async_enqueue(scoped, job()))[0].created
        await scoped.remove()
        await of_driver.dispose()

    asyncio.run(run())


def test_the_wrong_kind_of_session(engine: sa.Engine) -> None:
    job = make_job("update_status")
    with pytest.raises(ConfigurationError, match=r"enqueue\(\): this is an AsyncSession; use async_enqueue\(\)"):
        enqueue(AsyncSession(), job(key="a"))  # type: ignore[arg-type] # wrong on purpose
    with pytest.raises(ConfigurationError, match=r"this is an Engine; give a Session"):
        enqueue(engine, job(key="a"))  # type: ignore[arg-type] # wrong on purpose
    with Session(engine) as session, pytest.raises(ConfigurationError, match=r"use enqueue\(\)"):
        asyncio.run(async_enqueue(session, job(key="a")))  # type: ignore[arg-type] # wrong on purpose


def test_wrong_jobs(engine: sa.Engine) -> None:
    job, plain, held = make_job("update_status"), make_job("update_status", None), make_job("batch_select")
    create(engine, job)
    with Session(engine) as session, Session(engine) as other:
        one = job(key="a")
        with pytest.raises(StatementError, match="one Job is given twice"):
            enqueue(session, [one, one])
        with pytest.raises(StatementError, match="^on_duplicate='update': use one of 'skip', 'raise', 'replace'"):
            enqueue(session, one, on_duplicate="update")  # type: ignore[arg-type] # wrong on purpose
        with pytest.raises(StatementError, match="Job is not unique, so no job is a duplicate"):
            enqueue(session, plain(key="a"), on_duplicate="replace")
        with pytest.raises(
            StatementError, match='under the strategy "batch_select" a running job still reads as pending'
        ):
            enqueue(session, held(key="a"), on_duplicate="replace")
        other.add(one)
        with pytest.raises(StatementError, match="was added to another session"):
            enqueue(session, one)
        other.expunge(one)
        enqueue(session, one)
        with pytest.raises(StatementError, match="is in the database already"):
            enqueue(session, one)
        assert [each.created for each in enqueue(session, [plain(key="x"), plain(key="y")])] == [True, True]
        assert enqueue(session, []) == []


def test_a_database_without_the_index(engine: sa.Engine) -> None:
    job = create(engine, make_job("update_status"))
    execute(engine, "DROP INDEX ix_job_queue_unique")
    with (
        Session(engine) as session,
        pytest.raises(ConfigurationError, match="lacks the index ix_job_queue_unique.*Run `alembic"),
    ):
        enqueue(session, job(key="a"))


# -- ``copy_in(on_duplicate="skip")``: COPY of rows of which some have a duplicate -------------------------------------

ROWS = [{"key": "a"}, {"key": None}, {"key": "b"}, {"key": "a"}, {"key": None}]


@pytest.mark.parametrize("kind", KINDS)
def test_duplicates_are_left_out(engine: sa.Engine, session: Session, kind: str) -> None:
    job = create(engine, make_job(kind))
    session.add(job(key="b"))
    assert copy_in(session, job, ROWS, on_duplicate="skip") == 3
    assert copy_in(session, job, [{"key": "a"}, {"key": "z"}], on_duplicate="skip") == 1
    session.commit()
    assert sorted(str(key) for key in session.scalars(sa.select(job.key))) == ["None", "None", "a", "b", "z"]
    if kind != "existing_messages":
        assert len(session.scalars(claim(job, 9)).all()) == 5
    session.rollback()
    with pytest.raises(sa.exc.IntegrityError, match="ix_job_queue_unique"):
        copy_in(session, job, ROWS)


@pytest.mark.parametrize("driver", ["psycopg2", "asyncpg"])
def test_other_drivers(shared: Database, engine: sa.Engine, driver: Any) -> None:
    job = create(engine, make_job("update_status"))
    if driver == "psycopg2":
        with Session(sa.create_engine(shared.url(driver))) as session:
            assert copy_in(session, job, ROWS, on_duplicate="skip") == 4
            session.rollback()
        return

    async def copy() -> int:
        of_driver = create_async_engine(shared.url(driver))
        async with AsyncSession(of_driver) as session:
            number = await async_copy_in(session, job, ROWS, on_duplicate="skip")
            await session.rollback()
        await of_driver.dispose()
        return number

    assert asyncio.run(copy()) == 4


def test_a_translated_schema(engine: sa.Engine) -> None:
    job = make_job("update_status")
    execute(engine, "CREATE SCHEMA tenant")
    translated = engine.execution_options(schema_translate_map={None: "tenant"})
    job.metadata.create_all(translated)
    with Session(translated) as session, session.begin():
        assert copy_in(session, job, ROWS, on_duplicate="skip") == 4
    with engine.begin() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM tenant.job").scalar() == 4
        connection.exec_driver_sql("DROP SCHEMA tenant CASCADE")


def test_wrong_values(session: Session) -> None:
    plain, job = make_job("update_status", unique=None), make_job("update_status")
    with pytest.raises(StatementError, match="use 'raise' or 'skip'"):
        copy_in(session, job, ROWS, on_duplicate="replace")  # type: ignore[arg-type] # wrong on purpose
    with pytest.raises(
        StatementError, match=r"copy_in\(Job\): on_duplicate='skip': Job is not unique; set QueueConfig"
    ):
        copy_in(session, plain, ROWS, on_duplicate="skip")
