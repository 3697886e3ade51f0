"""Cancel jobs and tell apart what became of each: cancelled, asked to stop, or not there to be cancelled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.admin.changes import BATCH, QUIET, still
from sqlaqueue.admin.sessions import takes_session
from sqlaqueue.admin.which import JobFilter, bind, count, next_keys
from sqlaqueue.consumer.sessions.write_routing import routing_to_primary
from sqlaqueue.keys import Key, key_value
from sqlaqueue.queue.backend import CONTROL, backend
from sqlaqueue.queue.spec import QueueSpec, clock
from sqlaqueue.statements import manage
from sqlaqueue.statements.selection import instances, key_of, select_jobs

_ACTIVE = JobFilter(states=("pending", "processing"))


@dataclass(frozen=True, kw_only=True)
class Cancelled:
    """What :func:`cancel` did. Keys are as the verbs return them: values, or tuples of a composite key."""

    cancelled: list[Any] = field(default_factory=list)
    """The jobs that waited: they are cancelled now."""
    asked: list[Any] = field(default_factory=list)
    """The jobs that run: their workers are asked to stop them."""
    missing: list[Any] = field(default_factory=list)
    """What was named and neither waits nor runs: there is no such job, or it has ended. Keys that
    ``JobFilter(keys=...)`` names are texts here. Of a class or a select only jobs that end meanwhile are missing."""


@takes_session
def cancel(
    session: Session, jobs: Any, which: JobFilter = _ACTIVE, *, batch_size: int = BATCH, limit: int | None = None
) -> Cancelled:
    """Cancel jobs that wait, ask those that run to stop, and commit batch by batch.

    :param jobs: instances, a queue class, or ``select(Model).where(...)``.
    :param which: which jobs of a class or a select are meant; all that wait or run.
    :param batch_size: how many jobs are changed in one transaction.
    :param limit: the most jobs to cancel or ask, of a class or a select; None for all.
    """
    done = Cancelled()
    if isinstance(jobs, type | sa.Select):
        model: Any = jobs
        texts = which.keys or ()
        done.missing.extend(text for text in texts if not count(session, model, replace(which, keys=(text,))))
        for keys in _pages(session, model, which, batch_size, limit):
            _cancel_page(session, model, still(model, which, keys), keys, done)
        return done
    listed = instances(jobs, "cancel")
    for start in range(0, len(listed), batch_size):
        page = listed[start : start + batch_size]
        _cancel_page(session, type(page[0]), page, [key_of(job, "cancel") for job in page], done)
    return done


def _pages(session: Session, model: Any, which: JobFilter, size: int, limit: int | None) -> Iterator[list[Key]]:
    after, left = None, limit
    while left is None or left > 0:
        keys = next_keys(session, model, which, after, size if left is None else min(size, left))
        if not keys:
            return
        yield keys
        after, left = keys[-1], None if left is None else left - len(keys)


def _cancel_page(session: Session, model: Any, jobs: Any, keys: Sequence[Key], done: Cancelled) -> None:
    spec, where = select_jobs(model, "cancel").spec, bind(model)
    # Before the verb: what it asks of running jobs is dated later.
    with routing_to_primary(session):
        began = session.scalar(sa.select(clock()), bind_arguments=where)
        verb = manage.cancel(jobs)
        cancelled = set(session.execute(verb, execution_options=QUIET, bind_arguments=where).scalars())
        asked = set()
        if CONTROL in spec.side_tables:
            asked = {key_value(row) for row in session.execute(_asked(spec, keys, began), bind_arguments=where)}
    session.commit()
    for key in map(key_value, keys):
        found = done.cancelled if key in cancelled else done.asked if key in asked else done.missing
        found.append(key)


def _asked(spec: QueueSpec, keys: Sequence[Key], began: Any) -> AnySelect:
    """Return a SELECT of those of ``keys`` that were asked to stop since ``began``."""
    control = spec.side_tables[CONTROL]
    requested = sa.and_(control.c.queue == spec.name, control.c.key == backend().side_tables.key_json(spec.keys))
    return (
        sa.select(*spec.keys)
        .select_from(spec.table)
        .join(control, requested)
        .where(spec.key_in(spec.keys, keys), control.c.created_at >= sa.literal(began, control.c.created_at.type))
    )
