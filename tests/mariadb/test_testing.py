"""The functions of sqlaqueue.testing, in a transaction that is rolled back at the end."""

from __future__ import annotations

from datetime import timedelta

import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue.testing import crash, drain, enqueued, run_job, travel
from tests.mariadb.models import Job, Pair


def test_only_the_jobs_of_this_transaction_are_enqueued(sessions: sessionmaker[Session]) -> None:
    with sessions() as session:
        session.add_all([Job(id=1, payload="before"), Pair(site="a", number=1)])
        session.commit()
        assert not enqueued(session, Job)
        session.add_all([Job(id=2, payload="a"), Job(id=3, payload="b"), Pair(site="a", number=2)])
        session.flush()
        session.execute(sa.insert(Job).values(id=4, payload="a"))
        assert [job.id for job in enqueued(session, Job)] == [2, 3, 4]
        assert [job.id for job in enqueued(session, Job, payload="a")] == [2, 4]
        assert [(job.site, job.number) for job in enqueued(session, Pair)] == [("a", 2)]
        session.rollback()
        assert not enqueued(session, Job)


def test_jobs_run_in_the_session_of_the_test(sessions: sessionmaker[Session]) -> None:
    seen: list[int] = []

    def handle(session: Session, job: Job) -> None:
        seen.append(job.id)
        job.payload = "done"

    with sessions() as session:
        later = Job(id=3, run_at=sa.func.now() + sa.literal(timedelta(hours=1), sa.Interval()))
        session.add_all([Job(id=1), Job(id=2), later])
        session.flush()
        assert run_job(session, session.get_one(Job, 2), handle).state == "completed"
        crash(session, session.get_one(Job, 1))
        travel(session, timedelta(minutes=30))
        drain(session, Job, handle)
        assert seen == [2, 1]
        travel(session, timedelta(hours=1))
        drain(session, Job, handle)
        assert seen == [2, 1, 3]
        session.rollback()
        assert not session.scalars(sa.select(Job)).all()
