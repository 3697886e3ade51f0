"""``requeue()`` of jobs that have a twin by now."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import Unique, admin, claim, fail, requeue
from tests.unique.models import KEEPING_ROWS, KINDS, create, make_job, status_of


def fail_jobs(session: Session, job: Any, *jobs: Any) -> None:
    """Enqueue each of the jobs and let it fail, one after the other."""
    for each in jobs:
        session.add(each)
        session.flush()
        if "message" in job.metadata.tables:
            session.execute(job.metadata.tables["message"].insert().values(job_id=each.id))
        session.commit()
        claimed = session.scalars(claim(job, 1)).all()
        session.execute(fail(claimed, error="failed"))
        session.commit()


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_without_a_twin_comes_back(engine: sa.Engine, kind: str) -> None:
    job = make_job(kind)
    create(engine, job)
    with Session(engine) as session:
        fail_jobs(session, job, job(id=1, key="a"))
        assert session.execute(requeue(job)).all() == [(1, None)]
        session.commit()
        assert [each.id for each in session.scalars(claim(job, 9))] == [1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nulls_distinct", [True, False])
def test_the_newest_of_failed_twins_comes_back(engine: sa.Engine, kind: str, nulls_distinct: Any) -> None:
    job = make_job(kind, Unique("key", nulls_distinct=nulls_distinct))
    create(engine, job)
    with Session(engine) as session:
        fail_jobs(session, job, job(id=1, key="a"), job(id=2, key="a"), job(id=3, key="b"), job(id=4), job(id=5))
        found = session.execute(requeue(job)).all()
        session.commit()
        last = "5" if not nulls_distinct else None
        assert sorted(found) == [(1, "2"), (2, None), (3, None), (4, last), (5, None)]
        assert {each.id for each in session.scalars(claim(job, 9))} == {2, 3, 5} | ({4} if nulls_distinct else set())
        session.rollback()
        ended = admin.jobs(session, job, admin.JobFilter(states=("cancelled",)))
        assert {(info.key, info.last_error) for info in ended} >= {((1,), "twin: 2\nfailed")}
        assert session.execute(requeue(sa.select(job).where(job.id == 1))).all() == [(1, "2")]


@pytest.mark.parametrize("kind", KEEPING_ROWS)
def test_a_twin_that_waits_cancels_the_requeued_job(engine: sa.Engine, kind: str) -> None:
    job = make_job(kind)
    create(engine, job)
    with Session(engine) as session:
        fail_jobs(session, job, job(id=1, key="a"))
        session.add_all([job(id=2, key="a"), job(id=3, key="b")])
        session.commit()
        older = session.get_one(job, 1)
        assert session.execute(requeue(older)).all() == [(1, "2")]
        session.commit()
        assert (older.status, older.last_error, older.attempts) == ("cancelled", "twin: 2\nfailed", 1)
        assert older.finished_at is not None
    assert status_of(engine, job) == {1: "cancelled", 2: "pending", 3: "pending"}


@pytest.mark.parametrize("kind", KEEPING_ROWS)
def test_on_return_wait_leaves_the_requeued_job_as_it_is(engine: sa.Engine, kind: str) -> None:
    job = make_job(kind, Unique("key", on_return="wait"))
    create(engine, job)
    with Session(engine) as session:
        fail_jobs(session, job, job(id=1, key="a"), job(id=2, key="c"))
        session.add(job(id=3, key="a"))
        session.commit()
        version = sa.select(sa.literal_column("xmin::text", sa.Text())).select_from(job).where(job.id == 1)
        before = session.scalar(version)
        assert sorted(session.execute(requeue(job)).all()) == [(1, "3"), (2, None)]
        session.commit()
        assert session.scalar(version) == before, "the row was written"
    assert status_of(engine, job) == {1: "failed", 2: "pending", 3: "pending"}


def test_an_error_names_one_twin_however_often_the_job_is_requeued(engine: sa.Engine) -> None:
    job = make_job("update_status")
    create(engine, job)
    with Session(engine) as session:
        fail_jobs(session, job, job(id=1, key="a"))
        session.add(job(id=2, key="a"))
        session.commit()
        for _ in range(2):
            session.execute(requeue(sa.select(job).where(job.id == 1)))
            session.commit()
        assert session.get_one(job, 1).last_error == "twin: 2\nfailed"


@pytest.mark.parametrize("kind", KEEPING_ROWS)
def test_a_completed_job_stays_completed(engine: sa.Engine, kind: str) -> None:
    job = make_job(kind)
    create(engine, job)
    with Session(engine) as session:
        session.add_all([job(id=1, key="a", status="completed"), job(id=2, key="a")])
        session.commit()
        assert session.execute(requeue(job)).all() == [(1, "2")]
        session.commit()
    assert status_of(engine, job) == {1: "completed", 2: "pending"}
