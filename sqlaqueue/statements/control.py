"""Statements about a queue as a whole: let it pause, let it go on, and see who serves it.

::

    session.execute(pause(Email))
    session.commit()
    for consumer in session.execute(consumers(Email)):
        print(consumer.host, consumer.pid, consumer.running)

A pause is kept in the database, and every claim obeys it: those of Consumers and those of your own code. What is
running goes on to its end.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from sqlaqueue.exc import StatementError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.payloads import Signal
from sqlaqueue.queue.backend import CONSUMERS, CONTROL, backend
from sqlaqueue.queue.spec import QueueSpec, clock


def pause(model: type[Any], /) -> Any:
    """Return the statement after whose commit nobody claims jobs of this queue.

    :raises NotAQueueError: when ``model`` is no queue.
    """
    spec, _ = _queue(model, "pause", CONTROL)
    return backend().side_tables.pause(spec)


def resume(model: type[Any], /) -> Any:
    """Return the statement after whose commit jobs of this queue are claimed again.

    :raises NotAQueueError: when ``model`` is no queue.
    """
    spec, table = _queue(model, "resume", CONTROL)
    paused = sa.and_(table.c.queue == spec.name, table.c.key == backend().side_tables.PAUSE)
    deleted = sa.delete(table).where(paused)
    return deleted.returning(backend().notification(spec, Signal.POLL)) if backend().triggers.wakes(spec) else deleted


def paused(model: type[Any], /) -> Any:
    """Return a SELECT of one truth value: whether a queue is paused.

    :raises NotAQueueError: when ``model`` is no queue.
    """
    spec, _ = _queue(model, "paused", CONTROL)
    return sa.select(backend().side_tables.is_paused(spec).label("paused"))


def consumers(model: type[Any], /) -> Any:
    """Return a SELECT of the Consumers that serve a queue now, the oldest first.

    Its columns: ``name`` as jobs show it in ``claimed_by``, ``host``, ``pid``, ``version``, ``created_at``,
    ``heartbeat_at``, ``listening`` (true: notifications wake it; false: it polls), ``running``, the keys of the jobs
    whose handler ran at the heartbeat, as lists of texts, and ``claimed``, the number of other jobs it had claimed. A
    Consumer writes a heartbeat every ten seconds, and less often if there are many Consumers.

    :raises NotAQueueError: when ``model`` is no queue.
    """
    spec, table = _queue(model, "consumers", CONSUMERS)
    shown = ("name", "host", "pid", "version", "created_at", "heartbeat_at", "listening", "running", "claimed")
    alive = sa.and_(table.c.queue == spec.name, table.c.expires_at > clock())
    return sa.select(*(table.c[name] for name in shown)).where(alive).order_by(table.c.created_at, table.c.id)


def _queue(model: Any, verb: str, needed: str) -> tuple[QueueSpec, sa.Table]:
    spec = spec_of(model)
    if needed not in spec.side_tables:
        msg = f"{verb}({model.__name__}): its strategy {spec.strategy.name!r} attaches no table {needed}"
        raise StatementError(msg)
    return spec, spec.side_tables[needed]
