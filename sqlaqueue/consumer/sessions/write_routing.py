"""The sessions that a Consumer is given: those that it cannot work with, and the engine for its own statements."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session
from sqlalchemy.pool import AssertionPool, Pool, SingletonThreadPool, StaticPool

from sqlaqueue.exc import ConfigurationError

_SHARING = (StaticPool, SingletonThreadPool, AssertionPool)
"""Pools that do not give each session a connection of its own."""


def opened(factory: Any) -> Any:
    """Return a new session.

    It begins transactions by itself, whatever the factory says: a Consumer and a handler share it, and each of them
    would have to know whether the other one has begun.
    """
    session = factory()
    getattr(session, "sync_session", session).autobegin = True
    return session


# -- routing ---------------------------------------------------------------------------------------------------


def routes(session: Session) -> bool:
    """Return whether a session chooses its engine by a ``get_bind()`` of its own."""
    return type(session).get_bind is not Session.get_bind


@contextlib.contextmanager
def writing(session: Session) -> Iterator[None]:
    """Have a session that routes its statements take each one for a write.

    A claim is a SELECT to it, and would be sent to a replica. What it asks for is the bind of an UPDATE of the same
    table, since SQLAlchemy sets the clause of an ORM statement itself, whatever ``bind_arguments`` say.
    """
    if not routes(session) or "get_bind" in session.__dict__:
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


def bind_for_writing(session: Session, mapper: Any) -> sa.Engine | sa.Connection:
    """Return what a session writes the rows of a mapper to."""
    with writing(session):
        return session.get_bind(mapper)


def check_writable(session: Session, model: str, bind: dict[str, Any]) -> None:
    """Refuse a session that routes even writes to a server that accepts none.

    Without routing it is left to the database: it may be a standby that is about to be promoted.

    :param bind: the bind arguments of the queue.
    :raises ConfigurationError: naming the class of the session.
    """
    if routes(session):
        read_only = sa.func.current_setting("transaction_read_only")
        if session.scalar(sa.select(read_only), bind_arguments=bind) == "on":
            msg = (
                f"{type(session).__name__}.get_bind() sends the writes of {model} to a server that is read-only; let "
                f"it return the primary's engine when it is asked with clause=update({model}), as Consumers do "
                "for all of their statements, or give the Consumer a sessionmaker of the primary's engine"
            )
            raise ConfigurationError(msg)


# -- connections -----------------------------------------------------------------------------------------------


def check_bind(bind: sa.Engine | sa.Connection, who: str) -> sa.Engine:
    """Return the engine of sessions, and refuse those that share one connection.

    :param who: the Consumer, as the errors name it.
    :raises ConfigurationError: naming what to give instead.
    """
    if isinstance(bind, sa.Connection):
        msg = (
            f"{who}: its sessions are bound to one connection, and a Consumer needs one for each handler and one to "
            "tend the queue; give it sessionmaker(engine). In a test that rolls its connection back at the end, call "
            "the handler with the session and a job, or let the test commit and delete its rows afterwards"
        )
        raise ConfigurationError(msg)
    return bind


def check_sharing(pool: Pool, who: str) -> None:
    """Refuse a pool that gives several sessions one connection: what one of them commits would be another one's.

    :raises ConfigurationError: naming what to give instead.
    """
    if isinstance(pool, _SHARING):
        raise ConfigurationError(one_connection(who, f"the engine's {type(pool).__name__}"))


def one_connection(who: str, what: str) -> str:
    """Return the error's text for ``what`` gives several sessions one connection."""
    return (
        f"{who}: {what} does not give each session a connection of its own, so handlers would commit and roll back "
        "each other's work; make the engine without poolclass= and creator=, or with poolclass=NullPool"
    )


def driver_connection(session: Session, bind: dict[str, Any]) -> Any:
    """Return the driver's connection that a session uses."""
    return session.connection(bind_arguments=dict(bind)).connection.driver_connection
