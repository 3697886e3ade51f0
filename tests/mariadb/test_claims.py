"""What claims and settlements lock: the rows that they take, and no other."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import claim, complete, rescue
from tests.mariadb.models import Child, Job

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def two(engine: sa.Engine) -> Iterator[tuple[Session, Session]]:
    """Two sessions; a statement that waits for the other's locks fails after a second."""
    with Session(engine) as first, Session(engine) as second:
        for session in (first, second):
            session.execute(sa.text("SET SESSION innodb_lock_wait_timeout = 1"))
            session.commit()
        yield first, second


def test_a_claim_beside_an_open_one_takes_the_next_jobs(two: tuple[Session, Session], engine: sa.Engine) -> None:
    """Had the first one sorted, it would hold the locks of all jobs."""
    with Session(engine) as session:
        later = datetime.now(UTC) + timedelta(hours=1)
        session.add_all([Job(id=n, priority=n % 3) for n in range(1, 301)])
        session.add_all([Job(id=n, priority=-1, run_at=later) for n in range(301, 331)])
        session.commit()
    first, second = two
    assert [job.id for job in first.scalars(claim(Job, 5))] == [3, 6, 9, 12, 15]
    assert [job.id for job in second.scalars(claim(Job, 5))] == [18, 21, 24, 27, 30]


def test_a_claim_reads_the_index_in_order(engine: sa.Engine) -> None:
    with Session(engine) as session:
        session.add_all([Job(id=n, priority=n % 3) for n in range(1, 301)])
        session.commit()
    sent: list[str] = []

    @sa.event.listens_for(engine, "before_cursor_execute")
    def keep(
        connection: object,
        cursor: object,
        statement: str,
        parameters: object,
        context: object,
        _: bool,  # noqa: FBT001 - the event's signature
    ) -> None:
        if statement.startswith("SELECT job.id") and "SKIP LOCKED" in statement:
            assert isinstance(parameters, dict)
            sent.append(statement % {name: repr(value) for name, value in parameters.items()})

    with Session(engine) as session:
        session.scalars(claim(Job, 5)).all()
        session.rollback()
        (locking,) = sent
        plan, *_ = session.execute(sa.text(f"EXPLAIN {locking}")).all()
    assert plan.key == "ix_job_queue_claim"
    assert "filesort" not in plan.Extra


def test_settlements_in_a_small_table_do_not_wait_for_each_other(
    two: tuple[Session, Session], engine: sa.Engine
) -> None:
    """The server would rather scan a table of a few rows, and so wait for the locks of others."""
    with Session(engine) as session:
        session.add_all([Job(id=n) for n in range(1, 9)])
        session.commit()
    first, second = two
    mine = first.scalars(claim(Job, 3)).all()
    first.commit()
    theirs = second.scalars(claim(Job, 3)).all()
    second.commit()
    assert first.scalars(complete(mine)).all() == [1, 2, 3]
    assert second.scalars(complete(theirs)).all() == [4, 5, 6]
    assert [job.id for job in second.scalars(claim(Job, 3))] == [7, 8]


def test_a_rescue_passes_over_locked_rows(two: tuple[Session, Session], engine: sa.Engine) -> None:
    with Session(engine) as session:
        session.add_all([Job(id=n) for n in range(1, 4)])
        session.commit()
        session.scalars(claim(Job, 3)).all()
        session.execute(sa.update(Job).values(lease_expires_at=datetime(2020, 1, 1, tzinfo=UTC)))
        session.commit()
    first, second = two
    first.execute(sa.update(Job).where(Job.id == 2).values(payload="held by its handler"))
    assert sorted(second.scalars(rescue(Job)).all()) == [1, 3]


def test_a_job_whose_child_is_inserted_is_passed_over(two: tuple[Session, Session], engine: sa.Engine) -> None:
    """The foreign key takes a shared lock of the job. This is weaker than on PostgreSQL, as the docs say."""
    with Session(engine) as session:
        session.add_all([Job(id=1), Job(id=2)])
        session.commit()
    first, second = two
    first.add(Child(job_id=1))
    first.flush()
    assert [job.id for job in second.scalars(claim(Job, 2))] == [2]
    second.rollback()
    first.commit()
    assert [job.id for job in second.scalars(claim(Job, 2))] == [1, 2]


def test_claims_of_several_threads_take_each_job_once(engine: sa.Engine) -> None:
    with Session(engine) as session:
        session.add_all([Job(id=n, priority=n % 2) for n in range(1, 401)])
        session.commit()
    taken: list[int] = []

    def work() -> None:
        with Session(engine) as session:
            while jobs := session.scalars(claim(Job, 7)).all():
                session.commit()
                taken.extend(session.scalars(complete(jobs)).all())
                session.commit()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Session(engine) as session:
        # A claim passes over the rows that others lock, so the last ones may end before all jobs are taken.
        taken += session.scalars(complete(session.scalars(claim(Job, 400)).all())).all()
    assert sorted(taken) == [*range(1, 401)]
