"""Single jobs: a list of jobs, or one job with all columns of its row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.admin.job_filter import JobFilter, bind_arguments, filtered_jobs
from sqlaqueue.admin.session_checks import requires_session
from sqlaqueue.consumer.errors import may_be_of_a_row
from sqlaqueue.postgresql.side_tables import key_json
from sqlaqueue.queue.names import DEAD_LETTER
from sqlaqueue.queue.run import Key, key_text
from sqlaqueue.queue.spec import QueueSpec, within_calendar
from sqlaqueue.statements.selection import select_jobs
from sqlaqueue.strategies.listing import SHOWN, key_labels


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """One job. Attributes that the queue leaves out are None."""

    queue: str
    key: Key
    """The primary key, as a tuple."""
    state: str
    """The name of its state; ``other`` for a status value that the queue does not use."""
    priority: int | None = None
    run_at: datetime | None = None
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    attempts: int | None = None
    max_attempts: int | None = None
    last_error: str | None = None
    claimed_by: str | None = None
    lease_expires_at: datetime | None = None


@requires_session
def jobs(session: Session, model: type[Any], job_filter: JobFilter | None = None, *, limit: int = 20) -> list[JobInfo]:
    """Return jobs of a queue, newest first: by the time when they finished or else were enqueued.

    :param job_filter: selects jobs; None for all.
    :param limit: maximum number of jobs.
    :raises StatementError: if the model leaves out an attribute that ``job_filter`` needs.
    """
    spec = select_jobs(model, "jobs").spec
    found = filtered_jobs(model, job_filter or JobFilter()).subquery("sqlaqueue_jobs")
    moments = [found.c[role] for role in ("finished_at", "created_at") if role in found.c]
    keys = [found.c[name].desc() for name in key_labels(spec)]
    newest = [sa.func.coalesce(*moments).desc().nulls_last()] if moments else []
    listed = sa.select(*_readable(found)).order_by(*newest, *keys).limit(limit)
    rows = session.execute(listed, bind_arguments=bind_arguments(model))
    return [_info(spec, row) for row in rows]


@requires_session
def job(session: Session, model: type[Any], key: Any) -> tuple[JobInfo, dict[str, Any]] | None:
    """Return one job, with the values of its row by column name; None if there is no such job.

    :param key: its primary key: a value, or a tuple for a composite key; texts are converted by the database.
    """
    info = job_info(session, model, key)
    return None if info is None else (info, _values(session, select_jobs(model, "job").spec, info))


def job_info(session: Session, model: type[Any], key: Any) -> JobInfo | None:
    """Return one job without the values of its row, which may be large; None if there is no such job."""
    spec = select_jobs(model, "job").spec
    parts: Sequence[Any] = key if isinstance(key, tuple | list) else [key]
    found = filtered_jobs(model, JobFilter(keys=(key_text(parts),))).subquery("sqlaqueue_jobs")
    # A key may be used again after a job with it has failed and its row was deleted: a pending job comes first.
    rows = session.execute(
        sa.select(*_readable(found)).order_by(found.c.state != "pending").limit(1), bind_arguments=bind_arguments(model)
    )
    row = rows.first()
    return None if row is None else _info(spec, row)


def _readable(found: sa.FromClause) -> list[sa.ColumnElement[Any]]:
    """Return the columns of a listing, with times that every driver can load."""
    return [
        within_calendar(column).label(column.key)
        if isinstance(column.type, sa.DateTime) and column.type.timezone and column.key in SHOWN
        else column
        for column in found.c
    ]


def _info(spec: QueueSpec, row: Any) -> JobInfo:
    shown = {role: getattr(row, role) for role in SHOWN if role in row._fields}
    key = tuple(getattr(row, name) for name in key_labels(spec))
    return JobInfo(queue=spec.name, key=key, state=row.state, **shown)


def _values(session: Session, spec: QueueSpec, info: JobInfo) -> dict[str, Any]:
    bind = {"mapper": spec.mapper}
    if not spec.has("status") and info.state != "pending" and DEAD_LETTER in spec.side_tables:
        dead = spec.side_tables[DEAD_LETTER]
        parts = [sa.literal(part, column.type) for part, column in zip(info.key, spec.keys, strict=True)]
        letter = sa.select(dead.c.row).where(dead.c.queue == spec.name, dead.c.key == key_json(parts))
        return dict(session.scalar(letter, bind_arguments=bind) or {})
    mine = spec.key_in(spec.keys, [info.key])
    try:
        row = session.execute(sa.select(*spec.table.c).where(mine), bind_arguments=bind).first()
    except Exception as error:
        if not may_be_of_a_row(error):
            raise
        # A value that this program cannot load: operators see it as a text.
        texts = (sa.cast(column, sa.Text()) for column in spec.table.c)
        row = session.execute(sa.select(*texts).where(mine), bind_arguments=bind).first()
    return {} if row is None else {column.name: value for column, value in zip(spec.table.c, row, strict=True)}
