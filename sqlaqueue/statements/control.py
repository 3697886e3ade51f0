"""Statements about a queue as a whole: ``pause()``, ``resume()``, ``paused()``, ``consumers()``.

::

    session.execute(pause(Email))
    session.commit()
    for consumer in session.execute(consumers(Email)):
        print(consumer.host, consumer.pid, consumer.running)

A pause is stored in the database. It applies to every claim, of Consumers and of the application. Running jobs are not
affected.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from sqlaqueue.exc import StatementError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.notify_payloads import Signal
from sqlaqueue.postgresql.side_tables import PAUSE, is_paused, pause_row
from sqlaqueue.postgresql.triggers import notification, wakes
from sqlaqueue.queue.names import CONSUMERS, CONTROL
from sqlaqueue.queue.spec import QueueSpec, clock


def pause(model: type[Any], /) -> Any:
    """Return a statement that pauses a queue: after its commit no job is claimed.

    :raises NotAQueueError: if ``model`` is not a queue.
    """
    spec, _ = _queue(model, "pause", CONTROL)
    return pause_row(spec)


def resume(model: type[Any], /) -> Any:
    """Return a statement that resumes a queue: after its commit jobs are claimed again.

    :raises NotAQueueError: if ``model`` is not a queue.
    """
    spec, table = _queue(model, "resume", CONTROL)
    paused = sa.and_(table.c.queue == spec.name, table.c.key == PAUSE)
    deleted = sa.delete(table).where(paused)
    return deleted.returning(notification(spec, Signal.POLL)) if wakes(spec) else deleted


def paused(model: type[Any], /) -> Any:
    """Return a SELECT of one boolean: whether the queue is paused.

    :raises NotAQueueError: if ``model`` is not a queue.
    """
    spec, _ = _queue(model, "paused", CONTROL)
    return sa.select(is_paused(spec).label("paused"))


def consumers(model: type[Any], /) -> Any:
    """Return a SELECT of the Consumers of a queue that are alive, the oldest first.

    Its columns are ``name`` (as in ``claimed_by`` of its jobs), ``host``, ``pid``, ``version``, ``created_at``,
    ``heartbeat_at``, ``listening`` (True if notifications wake it, False if it only polls), ``running`` (the keys of
    the jobs whose handlers were running at the last heartbeat, each a list of texts), ``claimed`` (the number of its
    other claimed jobs), and ``unclaimable`` (the jobs that it cannot claim, rescue or settle, a hundred at most, each
    with its ``key`` and the ``error``). A Consumer writes a heartbeat every ten seconds, less often if there are many
    Consumers.

    :raises NotAQueueError: if ``model`` is not a queue.
    """
    spec, table = _queue(model, "consumers", CONSUMERS)
    shown = (
        "name",
        "host",
        "pid",
        "version",
        "created_at",
        "heartbeat_at",
        "listening",
        "running",
        "claimed",
        "unclaimable",
    )
    alive = sa.and_(table.c.queue == spec.name, table.c.expires_at > clock())
    return sa.select(*(table.c[name] for name in shown)).where(alive).order_by(table.c.created_at, table.c.id)


def _queue(model: Any, verb: str, needed: str) -> tuple[QueueSpec, sa.Table]:
    spec = spec_of(model)
    if needed not in spec.side_tables:
        msg = f"{verb}({model.__name__}): the strategy {spec.strategy.name!r} does not attach the table {needed}"
        raise StatementError(msg)
    return spec, spec.side_tables[needed]
