"""Opens sessions, and sends all of their statements to the engine for writes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

WRITES_OPTION = "sqlaqueue_writes"
"""The execution option that marks a SELECT as a statement that writes, as claims and most verbs are."""


def is_write(statement: object) -> bool:
    """Return whether a statement writes: an INSERT, UPDATE or DELETE, a claim, or another verb.

    It is for the ``get_bind()`` of a session class that reads from a replica, which takes a claim for a SELECT::

        class RoutingSession(Session):
            def get_bind(self, mapper=None, *, clause=None, **more):
                return primary if self._flushing or is_write(clause) else replica

    :param statement: what ``get_bind()`` received as ``clause``; None counts as a read.
    """
    if isinstance(statement, sa.UpdateBase):
        return True
    return isinstance(statement, sa.Executable) and bool(statement.get_execution_options().get(WRITES_OPTION))


def open_session(factory: Any) -> Any:
    """Return a new session, with autobegin on whatever the factory's setting is.

    A Consumer and a handler share the session, and neither knows whether the other has begun a transaction.
    """
    session = factory()
    getattr(session, "sync_session", session).autobegin = True
    return session


def has_own_routing(session: Session) -> bool:
    """Return whether a session class overrides ``get_bind()``."""
    return type(session).get_bind is not Session.get_bind


@contextlib.contextmanager
def routing_to_primary(session: Session) -> Iterator[None]:
    """Make a session with its own routing send every statement to the engine for writes.

    For its ``get_bind()`` a claim is a SELECT, which it may send to a replica. So ``get_bind()`` is called with an
    UPDATE of the same table instead, also for an INSERT: SQLAlchemy's own example takes only UPDATE and DELETE for
    writes, as the INSERTs of a flush say so in another way. ``bind_arguments`` cannot do this: SQLAlchemy sets the
    clause itself.
    """
    if not has_own_routing(session) or "get_bind" in session.__dict__:
        yield
        return
    ask = session.get_bind

    def get_bind(mapper: Any = None, *, clause: Any = None, **more: Any) -> Any:
        if mapper is not None and not isinstance(clause, sa.Update | sa.Delete):
            clause = sa.update(sa.inspect(mapper).local_table)
        return ask(mapper=mapper, clause=clause, **more)

    # An attribute of this session, as its class belongs to the application.
    session.__dict__["get_bind"] = get_bind
    try:
        yield
    finally:
        del session.__dict__["get_bind"]


def primary_bind(session: Session, mapper: Any) -> sa.Engine | sa.Connection:
    """Return the engine or connection to which a session writes the rows of a mapper."""
    with routing_to_primary(session):
        return session.get_bind(mapper)


def execute(session: Session, operation: Callable[..., Any], arguments: Sequence[Any] = ()) -> Any:
    """Call an operation of the Consumer in a session, with all of its statements sent to the primary."""
    if has_own_routing(session):
        with routing_to_primary(session):
            return operation(session, *arguments)
    return operation(session, *arguments)
