"""Cancel pending jobs, request the cancellation of running ones, and return the outcome for each job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.admin.bulk_changes import BATCH_SIZE, in_parts, unchanged_jobs
from sqlaqueue.admin.job_filter import JobFilter, bind_arguments, counts, next_keys
from sqlaqueue.admin.session_checks import requires_session
from sqlaqueue.admin.shards import by_shard
from sqlaqueue.postgresql.side_tables import key_json
from sqlaqueue.queue.names import CONTROL
from sqlaqueue.queue.run import Key, key_value
from sqlaqueue.queue.spec import QueueSpec, clock
from sqlaqueue.sql.engine import WRITES_LATER
from sqlaqueue.statements import verbs
from sqlaqueue.statements.selection import instances, key_of, select_jobs
from sqlaqueue.write_routing import routing_to_primary

_ACTIVE = JobFilter(states=("pending", "processing"))


@dataclass(frozen=True, kw_only=True)
class Cancelled:
    """The result of :func:`cancel`. A key is a value, or a tuple for a composite primary key."""

    cancelled: list[Any] = field(default_factory=list)
    """The jobs that were pending, and are cancelled now."""
    asked: list[Any] = field(default_factory=list)
    """The running jobs whose cancellation has been requested."""
    missing: list[Any] = field(default_factory=list)
    """Jobs that are neither pending nor running. These are given instances, and keys of ``JobFilter(keys=...)`` as
    texts, whose jobs do not exist or have finished; and jobs that finished after they had been selected."""
    refused: dict[Any, str] = field(default_factory=dict)
    """Of several jobs those that the database refuses to change, each with the error."""


@requires_session
def cancel(
    session: Session,
    jobs: Any,
    job_filter: JobFilter = _ACTIVE,
    *,
    batch_size: int = BATCH_SIZE,
    limit: int | None = None,
) -> Cancelled:
    """Cancel pending jobs, request the cancellation of running ones, and commit each batch.

    :param jobs: instances, a queue class, or ``select(Model).where(...)``.
    :param job_filter: selects jobs of a class or a select; all pending and running ones by default.
    :param batch_size: number of jobs that are changed in one transaction.
    :param limit: maximum number of jobs of a class or a select; None for all.
    """
    done = Cancelled()
    if isinstance(jobs, type | sa.Select):
        model: Any = jobs
        texts = job_filter.keys or ()
        with routing_to_primary(session):
            options = {WRITES_LATER: True}
            missing = [key for key in texts if not counts(session, model, replace(job_filter, keys=(key,)), **options)]
        done.missing.extend(missing)
        for keys in _pages(session, model, job_filter, batch_size, limit):
            _cancel_page(session, model, keys, lambda some: unchanged_jobs(model, job_filter, some), done)
        return done
    listed = instances(jobs, "cancel")
    for start in range(0, len(listed), batch_size):
        page = listed[start : start + batch_size]
        by_key = {key_of(job, "cancel"): job for job in page}

        def found(some: Sequence[Key], by_key: dict[Key, Any] = by_key) -> list[Any]:
            return [by_key[key] for key in some]

        _cancel_page(session, type(page[0]), [key_of(job, "cancel") for job in page], found, done)
    return done


def _pages(session: Session, model: Any, job_filter: JobFilter, size: int, limit: int | None) -> Iterator[list[Key]]:
    after, left = None, limit
    while left is None or left > 0:
        keys = next_keys(session, model, job_filter, after, size if left is None else min(size, left))
        if not keys:
            return
        yield keys
        after, left = keys[-1], None if left is None else left - len(keys)


def _cancel_page(
    session: Session, model: Any, keys: Sequence[Key], jobs: Callable[[Sequence[Key]], Any], done: Cancelled
) -> None:
    """Cancel the jobs with these keys, and commit.

    :param jobs: returns what the verb takes, for some of the keys.
    """
    spec, bind = select_jobs(model, "cancel").spec, bind_arguments(model)
    # Before the verb: a request for cancellation is younger than this.
    with routing_to_primary(session):
        started = session.scalar(sa.select(clock()), bind_arguments=bind)
        cancelled = set[Any]()
        for some in by_shard(session, spec, keys):
            rows = in_parts(session, model, some, lambda keys: verbs.cancel(jobs(keys)), done.refused)
            cancelled.update(row[0] for row in rows)
        asked = set()
        if CONTROL in spec.side_tables:
            asked = {key_value(row) for row in session.execute(_requested(spec, keys, started), bind_arguments=bind)}
    session.commit()
    for key in map(key_value, keys):
        if key in done.refused:
            continue
        outcome = done.cancelled if key in cancelled else done.asked if key in asked else done.missing
        outcome.append(key)


def _requested(spec: QueueSpec, keys: Sequence[Key], started: Any) -> AnySelect:
    """Return a SELECT of those of ``keys`` whose cancellation was requested since ``started``."""
    control = spec.side_tables[CONTROL]
    is_requested = sa.and_(control.c.queue == spec.name, control.c.key == key_json(spec.keys))
    return (
        sa.select(*spec.keys)
        .select_from(spec.table)
        .join(control, is_requested)
        .where(spec.key_in(spec.keys, keys), control.c.created_at >= sa.literal(started, control.c.created_at.type))
    )
