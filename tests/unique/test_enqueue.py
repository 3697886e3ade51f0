"""``enqueue()``: created, or already there."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import ORMExecuteState, Session, with_loader_criteria

from sqlaqueue import JobExists, Unique, claim, enqueue
from tests.unique.models import KINDS, create, make_job


@pytest.fixture(params=KINDS)
def job(engine: sa.Engine, request: pytest.FixtureRequest) -> Any:
    made = make_job(request.param)
    create(engine, made)
    return made


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

    with Session(engine) as session:
        session.add(job(key="a", note="hidden"))
        session.commit()
    with Hiding(engine) as session:
        [(existing, is_new)] = enqueue(session, [job(key="a", note="second")])
        assert (existing.note, is_new) == ("hidden", False)
    assert count(engine, job) == 1


def test_the_answers_are_in_order(engine: sa.Engine, job: Any) -> None:
    with Session(engine) as session:
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


def test_attributes_are_loaded_as_after_a_flush(engine: sa.Engine, job: Any) -> None:
    with Session(engine) as session:
        statements: list[str] = []
        mine, other = job(key="a"), job(key="b")
        enqueue(session, [mine, other])
        sa.event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
        assert mine.run_at.tzinfo is not None
        assert (mine.attempts, other.note, mine.id != other.id) == (0, None, True)
        session.flush()
        assert not statements


def test_null_keys_have_no_twins(engine: sa.Engine, job: Any) -> None:
    with Session(engine) as session:
        enqueue(session, job())
        result = enqueue(session, [job(), job(key="a"), job()])
        assert all(each.created for each in result)
        session.commit()
    assert count(engine, job) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_null_keys_are_twins_if_configured(engine: sa.Engine, kind: str) -> None:
    job = make_job(kind, Unique("key", nulls_distinct=False))
    create(engine, job)
    with Session(engine) as session:
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


def test_jobs_that_the_session_has_not_flushed_are_twins(engine: sa.Engine, job: Any) -> None:
    with Session(engine, autoflush=False) as session:
        first = job(key="a")
        session.add(first)
        assert enqueue(session, job(key="a")) == [(first, False)]


def test_a_job_that_was_added_to_the_session(engine: sa.Engine, job: Any) -> None:
    with Session(engine) as session:
        enqueue(session, job(key="a"))
        mine = job(key="a")
        session.add(mine)
        [(existing, created)] = enqueue(session, mine)
        assert not created
        assert mine not in session
        session.commit()
        assert existing.key == "a"


def test_on_twin_raise_inserts_nothing(engine: sa.Engine, job: Any) -> None:
    with Session(engine) as session:
        [(existing, _)] = enqueue(session, job(key="b"), on_twin="raise")
        jobs = [job(key="a"), job(key="b")]
        with pytest.raises(JobExists, match=r"a Job with key='b' exists; it has the key 1") as raised:
            enqueue(session, jobs, on_twin="raise")
        assert (raised.value.job, raised.value.twin) == (jobs[1], existing)
        with pytest.raises(JobExists, match="given in the same call"):
            enqueue(session, [job(key="c"), job(key="c")], on_twin="raise")
        session.commit()
    assert count(engine, job) == 1


def test_a_finished_job_is_no_twin(engine: sa.Engine) -> None:
    job = make_job("update_status")
    create(engine, job)
    with Session(engine) as session:
        [(first, _)] = enqueue(session, job(key="a"))
        first.status = "completed"
        session.commit()
        assert enqueue(session, job(key="a"))[0].created


def test_a_running_job_is_a_twin_unless_configured(engine: sa.Engine) -> None:
    job = make_job("update_status", Unique("key", states=("pending",)))
    create(engine, job)
    with Session(engine) as session:
        [(first, _)] = enqueue(session, job(key="a"))
        session.commit()
        session.execute(claim(job, 1))
        session.commit()
        [(second, created)] = enqueue(session, job(key="a"))
        assert created
        session.commit()
        assert (first.status, second.status) == ("processing", "pending")


@pytest.mark.parametrize("kind", KINDS)
def test_a_period(engine: sa.Engine, kind: str) -> None:
    job = make_job(kind, Unique("key", per=timedelta(hours=1)))
    create(engine, job)
    noon = datetime(2026, 3, 1, 12, tzinfo=UTC)
    with Session(engine) as session:
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


def test_on_twin_replace(engine: sa.Engine) -> None:
    job = make_job("update_status")
    create(engine, job)
    later = datetime.now(UTC) + timedelta(hours=1)
    with Session(engine) as session:
        [(first, _)] = enqueue(session, job(key="a", note="first", priority=5))
        session.commit()
        created_at, run_at = first.created_at, first.run_at
        session.execute(sa.update(job).values(attempts=2, last_error="old"))
        session.commit()
        [(same, created)] = enqueue(session, job(key="a", note="second", run_at=later), on_twin="replace")
        assert (same, created) == (first, False)
        assert (first.note, first.run_at, first.priority, first.attempts) == ("second", later, 0, 0)
        assert (first.last_error, first.created_at) == (None, created_at)
        session.commit()
        enqueue(session, job(key="a", note="third"), on_twin="replace_keep_time")
        assert (first.note, first.run_at) == ("third", later)
        session.commit()
        enqueue(session, job(key="a"), on_twin="replace")
        assert first.note is None
        assert run_at < first.run_at < later
        session.commit()
        result = enqueue(
            session, [job(key="b", note="1"), job(key="b", note="2"), job(key="b", note="3")], on_twin="replace"
        )
        assert [each.created for each in result] == [True, False, False]
        assert {id(each.job) for each in result} == {id(result[0].job)}
        assert result[0].job.note == "3"
        session.commit()
        assert result[0].job.note == "3"


def test_a_running_twin_is_never_replaced(engine: sa.Engine) -> None:
    job = make_job("update_status")
    create(engine, job)
    with Session(engine) as session:
        enqueue(session, job(key="a", note="first"))
        session.commit()
        session.execute(claim(job, 1))
        session.commit()
        [(twin, created)] = enqueue(session, job(key="a", note="second"), on_twin="replace")
        assert (twin.note, twin.status, created) == ("first", "processing", False)


def test_ten_thousand_jobs(engine: sa.Engine) -> None:
    job = make_job("update_status")
    create(engine, job)
    statements: list[str] = []
    sa.event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    with Session(engine) as session:
        enqueue(session, [job(key=str(number)) for number in range(0, 10_000, 2)])
        statements.clear()
        result = enqueue(session, [job(key=str(number)) for number in range(10_000)])
        session.commit()
    assert [each.created for each in result] == [False, True] * 5000
    assert len(statements) < 15
    assert count(engine, job) == 10_000


def test_a_visible_twin_is_not_waited_for(engine: sa.Engine, job: Any) -> None:
    with Session(engine) as session, Session(engine) as other:
        enqueue(session, job(key="a", note="first"))
        session.commit()
        other.execute(sa.delete(job))
        session.execute(sa.text("SET lock_timeout = '1ms'"))
        assert not enqueue(session, job(key="a"))[0].created
        other.rollback()


def test_an_uncommitted_twin_is_waited_for_up_to_the_lock_timeout(engine: sa.Engine, job: Any) -> None:
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
