"""A class of jobs for each test, and what the tests do with its rows."""

from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, mapped_column

from sqlaqueue import claim
from tests import models
from tests.models import create, execute, shared

HELD: dict[str, dict[str, Any]] = {
    "batch_select": {"strategy": "batch_select"},
    "delete_returning": {"strategy": "delete_returning"},
    "rows_are_messages": {"strategy": "delete_returning", "rows_are_messages": True, "columns": {"status": None}},
}
"""The configurations of strategies whose transaction holds the jobs."""


@shared
def make_job(**config: Any) -> Any:
    """Return a class of jobs with the attributes that keys of flow control are made of."""
    attributes = {
        "customer_id": mapped_column(sa.Integer),
        "kind": mapped_column(sa.String(20), nullable=False, default="a"),
        "document_id": mapped_column(sa.Integer, nullable=False, default=0),
        "most": mapped_column(sa.Integer),
    }
    return models.make_job(attributes=attributes, **config)


def make_queue(engine: sa.Engine, rows: Iterable[dict[str, Any]], **config: Any) -> Any:
    """Make a class of jobs and its tables, insert jobs, and return the class."""
    job = create(engine, make_job(**config))
    insert(engine, job, rows)
    return job


def insert(engine: sa.Engine, model: Any, rows: Iterable[dict[str, Any]]) -> None:
    with Session(engine) as session, session.begin():
        session.execute(sa.insert(model), list(rows))


def of_customers(*customers: int | None, **values: Any) -> list[dict[str, Any]]:
    return [{"customer_id": customer, **values} for customer in customers]


def claimed(session: Session, model: Any, n: int = 100) -> list[Any]:
    return list(session.scalars(claim(model, n)))


def claim_and_commit(engine: sa.Engine, model: Any, n: int = 100) -> list[Any]:
    with Session(engine, expire_on_commit=False) as session:
        jobs = claimed(session, model, n)
        session.commit()
        return jobs


def customers(jobs: Sequence[Any]) -> list[Any]:
    return [job.customer_id for job in jobs]


def ids(jobs: Sequence[Any]) -> list[int]:
    return [job.id for job in jobs]


def set_status(engine: sa.Engine, model: Any, status: str, *keys: int) -> None:
    """Set the status of jobs by plain SQL; of all jobs if none is given."""
    table = model.__table__
    where = table.c.id.in_(keys) if keys else sa.true()
    execute(engine, sa.update(table).where(where).values(status=status))
