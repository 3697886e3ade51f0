"""Failed jobs, grouped by kind of error."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.admin.job_filter import NO_ERROR, JobFilter, bind_arguments, filtered_jobs, kind_of
from sqlaqueue.admin.session_checks import requires_session
from sqlaqueue.queue.run import Key
from sqlaqueue.statements.selection import select_jobs
from sqlaqueue.strategies.listing import key_labels


@dataclass(frozen=True, kw_only=True)
class FailureGroup:
    """The failed jobs with one kind of error."""

    kind: str
    """The name of the error's class, or the kind given to ``Fail(kind=...)``; ``other`` for a text that starts with
    neither, empty without an error."""
    count: int
    newest: datetime | None
    """When the newest one failed; None if the model leaves out ``finished_at``."""
    error: str | None
    """The full text of its error."""
    keys: list[Key]
    """The keys of some of them, newest first."""


@requires_session
def failures(session: Session, model: type[Any], *, examples: int = 3) -> list[FailureGroup]:
    """Return the failed jobs in groups, the largest first.

    :param examples: number of keys for each group.
    :raises NotAQueueError: if ``model`` is not a queue.
    """
    spec = select_jobs(model, "failures").spec
    labels = key_labels(spec)
    jobs = filtered_jobs(model, JobFilter(states=("failed",))).subquery("sqlaqueue_jobs")
    error = jobs.c.last_error if "last_error" in jobs.c else sa.cast(sa.null(), sa.Text())
    moment = jobs.c.finished_at if "finished_at" in jobs.c else sa.cast(sa.null(), sa.DateTime(timezone=True))
    kind = kind_of(error) if "last_error" in jobs.c else sa.literal(NO_ERROR, sa.Text())
    keys = [jobs.c[name] for name in labels]
    newest_first = [moment.desc().nulls_last(), *(key.desc() for key in keys)]
    ranked = sa.select(
        kind.label("kind"),
        error.label("error"),
        sa.func.max(moment).over(partition_by=kind).label("newest"),
        sa.func.count().over(partition_by=kind).label("jobs"),
        sa.func.row_number().over(partition_by=kind, order_by=newest_first).label("rank"),
        *keys,
    ).subquery("sqlaqueue_ranked")
    shown = (
        sa.select(ranked)
        .where(ranked.c.rank <= max(examples, 1))
        .order_by(ranked.c.jobs.desc(), ranked.c.kind, ranked.c.rank)
    )
    groups: dict[str, FailureGroup] = {}
    for row in session.execute(shown, bind_arguments=bind_arguments(model)):
        group = groups.setdefault(
            row.kind, FailureGroup(kind=row.kind, count=row.jobs, newest=row.newest, error=row.error, keys=[])
        )
        if row.rank <= examples:
            group.keys.append(tuple(getattr(row, name) for name in labels))
    return list(groups.values())
