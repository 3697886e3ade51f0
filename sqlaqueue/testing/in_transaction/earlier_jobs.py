"""Which jobs the transaction of a test has enqueued, and which were there before."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.postgresql.due_times import written_here
from sqlaqueue.queue.run import Key
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.statements.selection import JobSelection
from sqlaqueue.testing.in_transaction.existing_rows import existing_keys

_EARLIER = "sqlaqueue_earlier_jobs"
"""The key in ``Connection.info`` of jobs that were enqueued before the test's transaction, and written by a function of
this package: such a row looks like one that the transaction has enqueued."""


def enqueued_keys(session: Session, selection: JobSelection) -> list[Key]:
    """Return the keys of selected jobs that wait, and that the session's transaction has enqueued."""
    spec = selection.spec
    keys = spec.strategy.pick(spec, selection.select, *spec.keys).where(_written_here(spec)).order_by(*spec.keys)
    if spec.has("status"):
        keys = keys.where(spec.in_state("pending"))
    earlier = _earlier(session, spec)
    found = (tuple(row) for row in session.execute(keys, bind_arguments={"mapper": spec.mapper}))
    return [key for key in found if key not in earlier]


def remember_earlier_jobs(session: Session, spec: QueueSpec, key: Key | None = None) -> None:
    """Remember which jobs are not of this transaction, before their rows are written.

    :param key: the only pending job that will be written; by default all will.
    """
    others = sa.select(*spec.keys).where(~_written_here(spec))
    if spec.has("status"):
        pending = spec.in_state("pending")
        # Those with an expired lease become pending.
        expired = [] if spec.strategy.holds_transaction else [spec.in_state("processing")]
        if key is not None:
            pending = sa.and_(pending, spec.key_in(spec.keys, [key]))
        others = others.where(sa.or_(pending, *expired))
    elif key is not None:
        others = others.where(spec.key_in(spec.keys, [key]))
    found = session.execute(others, bind_arguments={"mapper": spec.mapper})
    _earlier(session, spec).update(tuple(row) for row in found)


def forget_deleted_jobs(session: Session, spec: QueueSpec, keys: Collection[Key]) -> None:
    """Forget those of some jobs whose rows are deleted: another job may be enqueued under the same key."""
    earlier = _earlier(session, spec)
    among = earlier.intersection(keys)
    if among:
        earlier -= among - existing_keys(session, spec, among)


def _written_here(spec: QueueSpec) -> sa.ColumnElement[bool]:
    written = spec.table.alias("sqlaqueue_written")
    same = [written.c[key.key] == key for key in spec.keys]
    return sa.exists().where(*same, written_here(written))


def _earlier(session: Session, spec: QueueSpec) -> set[Key]:
    """Return the remembered keys of the connection's present transaction, which several sessions may share."""
    connection = session.connection(bind_arguments={"mapper": spec.mapper})
    transaction, tables = connection.info.get(_EARLIER, (None, {}))
    if transaction is not connection.get_transaction():
        tables = {}
        connection.info[_EARLIER] = (connection.get_transaction(), tables)
    # By name, as several classes may be mapped to one table.
    remembered: set[Key] = tables.setdefault((spec.table.schema, spec.table.name), set())
    return remembered
