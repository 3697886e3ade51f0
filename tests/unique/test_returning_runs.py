"""Runs that end beside a twin, where jobs are unique only while they wait: retry, release and rescue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import Unique, cancel, claim, complete, extend, release, rescue, retry
from tests.unique.models import create, make_job, status_of

END_RUN: dict[str, Callable[[Session, Any, Any], Any]] = {
    "retry": lambda session, _, jobs: session.execute(retry(jobs, error="again")).all(),
    "release": lambda session, _, jobs: session.execute(release(jobs, delay=1)).all(),
    "rescue": lambda session, job, jobs: session.execute(extend(jobs, lease=0)) and session.execute(rescue(job)).all(),
}


@pytest.fixture(params=["cancel", "wait"])
def on_return(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def job(engine: sa.Engine, on_return: Any) -> Any:
    made = make_job("update_status", Unique("key", states=("pending",), on_return=on_return))
    create(engine, made)
    return made


@pytest.mark.parametrize("end", END_RUN)
def test_a_run_ends_beside_a_twin(engine: sa.Engine, job: Any, on_return: str, end: str) -> None:
    with Session(engine) as session:
        session.add_all([job(id=1, key="a"), job(id=2, key="b")])
        session.commit()
        claimed = session.scalars(claim(job, 2)).all()
        session.commit()
        session.add(job(id=3, key="a"))
        session.commit()
        assert sorted(END_RUN[end](session, job, claimed)) == [(1, "3"), (2, None)]
        session.commit()
        first, second = claimed
        assert (second.status, second.lease_expires_at) == ("pending", None)
        if on_return == "cancel":
            error = "twin: 3\nagain" if end == "retry" else "twin: 3"
            assert (first.status, first.last_error, first.lease_token) == ("cancelled", error, None)
            return
        assert first.status == "processing"
        assert session.execute(rescue(job)).all() == []
        session.commit()
        (twin,) = session.scalars(claim(sa.select(job).where(job.id == 3), 1)).all()
        session.commit()
        before = (first.attempts, first.last_error)
        assert session.execute(rescue(job)).all() == [(1, None)]
        session.commit()
        assert (first.status, first.attempts, first.last_error) == ("pending", *before)
        assert session.scalars(complete(twin)).all() == [3]
        session.commit()


def test_two_runs_of_twins_that_end_together(engine: sa.Engine, job: Any, on_return: str) -> None:
    with Session(engine) as session:
        runs = []
        for number in (1, 2, 3):
            session.add(job(id=number, key="a"))
            session.commit()
            runs += session.scalars(claim(job, 1)).all()
            session.commit()
        assert sorted(session.execute(retry(runs)).all()) == [(1, "3"), (2, "3"), (3, None)]
        session.commit()
    left = "cancelled" if on_return == "cancel" else "processing"
    assert status_of(engine, job) == {1: left, 2: left, 3: "pending"}


def test_cancel_of_a_job_that_waits_for_its_twin(engine: sa.Engine) -> None:
    job = make_job("update_status", Unique("key", states=("pending",), on_return="wait"))
    create(engine, job)
    with Session(engine) as session:
        session.add(job(id=1, key="a"))
        session.commit()
        claimed = session.scalars(claim(job, 1)).all()
        session.commit()
        session.add(job(id=2, key="a"))
        session.commit()
        session.execute(retry(claimed))
        session.commit()
        assert session.scalars(cancel(sa.select(job).where(job.id == 1))).all() == [1]
        session.commit()
    assert status_of(engine, job) == {1: "cancelled", 2: "pending"}


def test_a_poisonous_run_fails_beside_a_twin(engine: sa.Engine) -> None:
    """A run that is rescued for the last time fails, and takes no place from its twin."""
    job = make_job("update_status", Unique("key", states=("pending",)), max_attempts=1)
    create(engine, job)
    with Session(engine) as session:
        for number in (1, 2):
            session.add(job(id=number, key="a"))
            session.commit()
            session.execute(extend(session.scalars(claim(job, 1)).all(), lease=0))
            session.commit()
        session.execute(sa.update(job).where(job.id == 1).values(max_attempts=2))
        session.commit()
        assert sorted(session.execute(rescue(job)).all()) == [(1, None), (2, None)]
        session.commit()
    assert status_of(engine, job) == {1: "pending", 2: "failed"}


def test_a_run_without_attempts_fails_although_it_has_a_twin(engine: sa.Engine, job: Any) -> None:
    with Session(engine) as session:
        session.add(job(id=1, key="a", max_attempts=1))
        session.commit()
        session.execute(extend(session.scalars(claim(job, 1)).all(), lease=0))
        session.add(job(id=2, key="a"))
        session.commit()
        assert session.execute(rescue(job)).all() == [(1, None)]
        session.commit()
    assert status_of(engine, job) == {1: "failed", 2: "pending"}
