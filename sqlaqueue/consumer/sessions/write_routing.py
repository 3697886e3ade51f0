"""The sessions that a Consumer is given: those that it cannot work with, and the engine for its own statements."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session


def open_session(factory: Any) -> Any:
    """Return a new session.

    It begins transactions by itself, whatever the factory says: a Consumer and a handler share it, and each of them
    would have to know whether the other one has begun.
    """
    session = factory()
    getattr(session, "sync_session", session).autobegin = True
    return session


def has_own_routing(session: Session) -> bool:
    """Return whether a session chooses its engine by a ``get_bind()`` of its own."""
    return type(session).get_bind is not Session.get_bind


@contextlib.contextmanager
def routing_to_primary(session: Session) -> Iterator[None]:
    """Have a session that routes its statements take each one for a write.

    A claim is a SELECT to it, and would be sent to a replica. What it asks for is the bind of an UPDATE of the same
    table, since SQLAlchemy sets the clause of an ORM statement itself, whatever ``bind_arguments`` say.
    """
    if not has_own_routing(session) or "get_bind" in session.__dict__:
        yield
        return
    ask = session.get_bind

    def get_bind(mapper: Any = None, *, clause: Any = None, **more: Any) -> Any:
        if mapper is not None and not isinstance(clause, sa.UpdateBase):
            clause = sa.update(sa.inspect(mapper).local_table)
        return ask(mapper=mapper, clause=clause, **more)

    # An attribute of this one session: its class is the user's.
    session.__dict__["get_bind"] = get_bind
    try:
        yield
    finally:
        del session.__dict__["get_bind"]


def primary_bind(session: Session, mapper: Any) -> sa.Engine | sa.Connection:
    """Return what a session writes the rows of a mapper to."""
    with routing_to_primary(session):
        return session.get_bind(mapper)
