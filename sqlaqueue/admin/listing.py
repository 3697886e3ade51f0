"""Single jobs as their operator sees them: a list of some, or all that is known of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.admin.sessions import takes_session
from sqlaqueue.admin.which import JobFilter, bind, surveyed
from sqlaqueue.keys import Key, key_text
from sqlaqueue.queue.backend import DEAD_LETTER, backend
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.statements.selection import select_jobs
from sqlaqueue.strategies.job_listing import SHOWN, key_labels


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """One job. What the queue leaves out is None."""

    queue: str
    key: Key
    """The primary key, as a tuple."""
    state: str
    """The name of its state; ``other`` for a status that is none of the queue's."""
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


@takes_session
def jobs(session: Session, model: type[Any], which: JobFilter | None = None, *, limit: int = 20) -> list[JobInfo]:
    """Return some jobs of a queue, those that ended or were enqueued last first.

    :param which: which jobs are meant; None for all.
    :param limit: the most to return.
    :raises StatementError: when the model leaves out what ``which`` asks for.
    """
    spec = select_jobs(model, "jobs").spec
    found = surveyed(model, which or JobFilter()).subquery("jobs")
    moments = [found.c[role] for role in ("finished_at", "created_at") if role in found.c]
    keys = [found.c[name].desc() for name in key_labels(spec)]
    newest = [sa.func.coalesce(*moments).desc().nulls_last()] if moments else []
    rows = session.execute(sa.select(found).order_by(*newest, *keys).limit(limit), bind_arguments=bind(model))
    return [_info(spec, row) for row in rows]


@takes_session
def job(session: Session, model: type[Any], key: Any) -> tuple[JobInfo, dict[str, Any]] | None:
    """Return one job with the values of its row by the names of its columns, None when there is no such job.

    :param key: its primary key: a value, or a tuple for a composite key; texts are read as the column's values.
    """
    spec = select_jobs(model, "job").spec
    parts: Sequence[Any] = key if isinstance(key, tuple | list) else [key]
    found = surveyed(model, JobFilter(keys=(key_text(parts),))).subquery("jobs")
    # A row may have been enqueued after its namesake failed, and been deleted: what waits comes first.
    rows = session.execute(sa.select(found).order_by(found.c.state != "pending").limit(1), bind_arguments=bind(model))
    row = rows.first()
    if row is None:
        return None
    info = _info(spec, row)
    return info, _values(session, spec, info)


def _info(spec: QueueSpec, row: Any) -> JobInfo:
    shown = {role: getattr(row, role) for role in SHOWN if role in row._fields}
    key = tuple(getattr(row, name) for name in key_labels(spec))
    return JobInfo(queue=spec.name, key=key, state=row.state, **shown)


def _values(session: Session, spec: QueueSpec, info: JobInfo) -> dict[str, Any]:
    where = {"mapper": spec.mapper}
    if not spec.has("status") and info.state != "pending" and DEAD_LETTER in spec.side_tables:
        dead = spec.side_tables[DEAD_LETTER]
        parts = [sa.literal(part, column.type) for part, column in zip(info.key, spec.keys, strict=True)]
        letter = sa.select(dead.c.row).where(
            dead.c.queue == spec.name, dead.c.key == backend().side_tables.key_json(parts)
        )
        return dict(session.scalar(letter, bind_arguments=where) or {})
    mine = sa.select(*spec.table.c).where(spec.key_in(spec.keys, [info.key]))
    row = session.execute(mine, bind_arguments=where).first()
    return {} if row is None else {column.name: value for column, value in zip(spec.table.c, row, strict=True)}
