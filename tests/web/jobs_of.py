"""What the tests about single jobs share: models of each kind, jobs in each state, and the functions with columns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import admin, claim, complete, fail, release
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.web.data.job_columns import JobColumns, columns_of
from sqlaqueue.web.data.job_filters import parse_filter
from sqlaqueue.web.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = ("update_status", "batch_select", "delete_returning", "existing_messages", "rows_are_messages")
XSS = "<script>alert('x')</script>\"'><img src=x onerror=alert(1)>"


def columns(model: Any, *redact: str) -> JobColumns:
    return columns_of(spec_of(model), Settings.of([model], redact, {}, ()).is_redacted)


def wanted(model: Any, *pairs: tuple[str, str]) -> Any:
    return parse_filter(columns(model), pairs)


def add(engine: sa.Engine, *jobs: Any) -> None:
    with Session(engine) as session:
        session.add_all(jobs)
        session.commit()
        metadata = type(jobs[0]).metadata
        if "message" in metadata.tables:
            message = metadata.tables["message"]
            session.execute(sa.insert(message), [{"job_id": job.id} for job in jobs])
            session.commit()


def settle(engine: sa.Engine, model: Any, number: int, verb: Callable[..., Any], **options: Any) -> None:
    """Claim the next jobs and settle them."""
    with Session(engine) as session:
        claimed = session.scalars(claim(model, number)).all()
        if not spec_of(model).strategy.holds_transaction:
            session.commit()
        assert len(claimed) == number
        session.execute(verb(claimed, **options))
        session.commit()


def fail_jobs(engine: sa.Engine, model: Any, number: int = 1, error: str = "ValueError: no stock") -> None:
    settle(engine, model, number, fail, error=error)


def complete_jobs(engine: sa.Engine, model: Any, number: int = 1) -> None:
    settle(engine, model, number, complete)


@contextmanager
def claimed(engine: sa.Engine, model: Any, number: int = 1) -> Iterator[list[Any]]:
    """Hold claimed jobs: by a lease or in an open transaction."""
    with Session(engine) as session:
        jobs = list(session.scalars(claim(model, number)).all())
        if not spec_of(model).strategy.holds_transaction:
            session.commit()
        yield jobs
        if not spec_of(model).strategy.holds_transaction:
            session.execute(release(jobs))
            session.commit()
        session.rollback()


def states(engine: sa.Engine, model: Any) -> dict[str, str]:
    """Return the state of each job, dead letters included, by its key."""
    with Session(engine) as session:
        return {",".join(map(str, job.key)): job.state for job in admin.jobs(session, model, limit=10_000)}
