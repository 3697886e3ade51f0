"""Which jobs a test's transaction has enqueued: :func:`enqueued`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.exc import StatementError
from sqlaqueue.statements.selection import JobSelection, select_jobs
from sqlaqueue.testing._types import AnySession, Jobs
from sqlaqueue.testing.in_transaction.earlier_jobs import enqueued_keys
from sqlaqueue.testing.in_transaction.joined_sessions import resolve_session
from sqlaqueue.write_routing import execute

T = TypeVar("T")

_MOST_SHOWN = 5
"""How many other jobs a failed assertion shows."""


def enqueued(session: AnySession, model: Jobs[T], /, **columns: Any) -> list[T]:
    """Return the pending jobs whose rows the transaction of ``session`` has written, by key.

    The rows may have been written by the ORM, bulk inserts, COPY or SQL, in this session or in another one on its
    connection. A retried job is pending again, so it is included. A job from before the transaction is included if the
    code under test has changed its row, as ``requeue()`` does, and not if only functions of this package have.

    :param session: the test's session. Its pending changes are flushed first.
    :param model: the queue class, or a select of its jobs.
    :param columns: values that attributes of the job must have: ``enqueued(session, Email, to="ada@example.com")``.
    :raises StatementError: if the class has no attribute of a given name.
    """
    own = resolve_session(session, "enqueued", is_async=False)
    selection = select_jobs(model, "enqueued")
    known = sa.inspect(selection.entity).all_orm_descriptors.keys()
    for name in columns:
        if name not in known:
            msg = (
                f"enqueued({selection.entity.__name__}, {name}=...): the class has no attribute {name!r}; it has "
                f"{', '.join(sorted(known))}"
            )
            raise StatementError(msg)
    jobs: list[T] = execute(own, _jobs, (selection,))
    # Compared in Python: a JSON column has no equality in the database, and a relationship is compared as an instance.
    found = [job for job in jobs if all(getattr(job, name) == value for name, value in columns.items())]
    return found or _NoJobs(jobs, columns)


class _NoJobs(list[T]):
    """An empty list that shows in the report of a failed assertion which other jobs are enqueued."""

    def __init__(self, others: Sequence[T], columns: Iterable[str]) -> None:
        super().__init__()
        self._others, self._columns = others, columns

    def __repr__(self) -> str:
        if not self._others:
            return super().__repr__()
        shown = [
            ", ".join(f"{name}={getattr(job, name)!r}" for name in self._columns) for job in self._others[:_MOST_SHOWN]
        ]
        more = ["..."] if len(self._others) > _MOST_SHOWN else []
        return f"[], but {len(self._others)} with {'; '.join([*shown, *more])}"


def _jobs(session: Session, selection: JobSelection) -> list[Any]:
    session.flush()
    spec, keys = selection.spec, enqueued_keys(session, selection)
    jobs = sa.select(selection.entity).where(spec.key_in(spec.keys, keys)).order_by(*spec.keys)
    # Rows may have been changed by statements that the session's instances do not show.
    fresh = jobs.options(*selection.options).execution_options(populate_existing=True)
    return list(session.scalars(fresh).unique()) if keys else []
