"""What a test's session sees: the jobs that its transaction has enqueued, and the rows that others changed in it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import Session

from sqlaqueue.keys import Key, keys_from
from sqlaqueue.mapping.mixin import queue_spec
from sqlaqueue.queue.backend import backend
from sqlaqueue.queue.spec import QueueSpec

_EARLIER = "sqlaqueue_earlier_jobs"
"""The key in ``Session.info`` of jobs that were enqueued before the test's transaction, and written by a function of
this package: such a row looks like one that the transaction has enqueued."""


def enqueued_here(session: Session, spec: QueueSpec) -> list[sa.ColumnElement[bool]]:
    """Return the conditions that a job waits, and that the session's transaction has enqueued it."""
    written = spec.table.alias("sqlaqueue_written")
    same = [written.c[key.key] == key for key in spec.keys]
    conditions: list[sa.ColumnElement[bool]] = [sa.exists().where(*same, backend().claims.written_here(written))]
    if spec.has("status"):
        conditions.append(spec.in_state("pending"))
    earlier = _earlier(session, spec)
    if earlier:
        conditions.append(~spec.key_in(spec.keys, list(earlier)))
    return conditions


def remember_earlier_jobs(session: Session, spec: QueueSpec) -> None:
    """Remember which waiting jobs are not of this transaction, before their rows are written."""
    own = sa.and_(*enqueued_here(session, spec))
    waiting = spec.in_state("pending") if spec.has("status") else sa.true()
    others = sa.select(*spec.keys).where(waiting, ~own)
    found = session.execute(others, bind_arguments={"mapper": spec.mapper}).all()
    _earlier(session, spec).update(tuple(row) for row in found)


def _earlier(session: Session, spec: QueueSpec) -> set[Key]:
    remembered: set[Key] = session.info.setdefault(_EARLIER, {}).setdefault(spec.table, set())
    return remembered


def show_changes(session: Session, *, is_async: bool = False) -> None:
    """Let the session's instances show what other sessions have written in its transaction.

    Instances of jobs whose rows are deleted are detached, and keep their values. The others expire, as after a commit;
    in async code they are read again, since the next access to an expired attribute would raise.
    """
    loaded: dict[QueueSpec, dict[Key, Any]] = {}
    for instance in session.identity_map.values():
        spec = queue_spec(type(instance))
        if spec is not None:
            loaded.setdefault(spec, {})[sa.inspect(instance).identity or ()] = instance
    for spec, jobs in loaded.items():
        for key in jobs.keys() - _existing(session, spec, jobs.keys()):
            session.expunge(jobs[key])
    if not is_async:
        session.expire_all()
        return
    for instance in list(session.identity_map.values()):
        try:
            session.refresh(instance)
        except InvalidRequestError:
            session.expunge(instance)


def _existing(session: Session, spec: QueueSpec, keys: Collection[Key]) -> set[Key]:
    found = sa.select(*spec.keys).where(spec.key_in(spec.keys, list(keys)))
    rows = session.execute(found, bind_arguments={"mapper": spec.mapper}).all()
    return set(keys_from((row if len(row) > 1 else row[0] for row in rows), len(spec.keys)))
