"""The attempts of one job, from the attempt history of its queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Literal, TypeAlias

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.admin.job_filter import bind_arguments, key_parts
from sqlaqueue.admin.session_checks import requires_session
from sqlaqueue.exc import StatementError
from sqlaqueue.postgresql.side_tables import key_json
from sqlaqueue.queue.config import is_count
from sqlaqueue.queue.names import ATTEMPT
from sqlaqueue.queue.run import key_text
from sqlaqueue.statements.selection import select_jobs

AttemptOutcome: TypeAlias = Literal["completed", "retried", "failed", "cancelled", "released", "rescued"]
"""How an attempt ended."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One ended attempt of a job; times are those of the database's clock."""

    attempt: int
    """Its number, from 1. A released attempt does not count, so the next one has the same number."""
    outcome: AttemptOutcome
    started_at: datetime | None
    """When the handler was called, None if it was not. Of a rescued attempt: when the job was claimed, if its row
    has ``started_at``."""
    ended_at: datetime
    """When the handler returned or raised. Of a rescued attempt: when the job was rescued."""
    worker: str | None
    """The worker that ran the job, as in ``claimed_by``; None if it is not known."""
    error: str | None
    traceback: str | None

    @property
    def seconds(self) -> float | None:
        """The seconds between the start and the end; None without a start."""
        return None if self.started_at is None else (self.ended_at - self.started_at).total_seconds()


@requires_session
def attempts(session: Session, model: type[Any], key: Any, *, limit: int = 20) -> list[Attempt]:
    """Return the ended attempts of one job, newest first; the job itself may be deleted already.

    :param key: its primary key: a value, or a tuple for a composite key; texts are converted by the database.
    :param limit: maximum number of attempts.
    :raises StatementError: if the queue has no attempt history, or ``limit`` is not a positive integer.
    """
    spec = select_jobs(model, "attempts").spec
    if ATTEMPT not in spec.side_tables:
        msg = (
            f"attempts({spec.model.__name__}): the queue has no attempt history; turn it on with "
            "QueueConfig(attempt_history=timedelta(days=14))"
        )
        raise StatementError(msg)
    if not is_count(limit):
        msg = f"attempts(limit={limit!r}): the limit must be an integer of 1 or more"
        raise StatementError(msg)
    table = spec.side_tables[ATTEMPT]
    parts: Sequence[Any] = key if isinstance(key, tuple | list) else [key]
    mine = key_json(key_parts(spec, key if isinstance(key, str) else key_text(parts)))
    names = [field.name for field in fields(Attempt)]
    # The runs of a job end one after the other, so ids are in the order of time, whatever happens to the clock.
    found = (
        sa.select(*(table.c[name] for name in names))
        .where(table.c.queue == spec.name, table.c.key == mine)
        .order_by(table.c.id.desc())
    )
    rows = session.execute(found.limit(limit), bind_arguments=bind_arguments(model))
    return [Attempt(**dict(zip(names, row, strict=True))) for row in rows]
