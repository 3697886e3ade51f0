"""What has failed, by kind of error."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.admin.sessions import takes_session
from sqlaqueue.admin.which import NO_ERROR, JobFilter, bind, kind_of, surveyed
from sqlaqueue.keys import Key
from sqlaqueue.statements.selection import select_jobs
from sqlaqueue.strategies.job_listing import key_labels


@dataclass(frozen=True, kw_only=True)
class FailureGroup:
    """The failed jobs with one kind of error."""

    kind: str
    """The name of the error's class, or what ``Fail(kind=...)`` has said; ``other`` for texts that begin with neither,
    empty where there is no error."""
    count: int
    newest: datetime | None
    """When the last one failed; None where the model does not say."""
    error: str | None
    """The whole text of that one's error."""
    keys: list[Key]
    """Some of them, the newest first."""


@takes_session
def failures(session: Session, model: type[Any], *, examples: int = 3) -> list[FailureGroup]:
    """Return what has failed, the most frequent kind of error first.

    :param examples: how many keys to show for each kind.
    :raises NotAQueueError: when ``model`` is no queue.
    """
    spec = select_jobs(model, "failures").spec
    labels = key_labels(spec)
    jobs = surveyed(model, JobFilter(states=("failed",))).subquery("jobs")
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
        sa.func.row_number().over(partition_by=kind, order_by=newest_first).label("place"),
        *keys,
    ).subquery("ranked")
    shown = (
        sa.select(ranked)
        .where(ranked.c.place <= max(examples, 1))
        .order_by(ranked.c.jobs.desc(), ranked.c.kind, ranked.c.place)
    )
    groups: dict[str, FailureGroup] = {}
    for row in session.execute(shown, bind_arguments=bind(model)):
        group = groups.setdefault(
            row.kind, FailureGroup(kind=row.kind, count=row.jobs, newest=row.newest, error=row.error, keys=[])
        )
        if row.place <= examples:
            group.keys.append(tuple(getattr(row, name) for name in labels))
    return list(groups.values())
