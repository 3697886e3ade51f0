"""Sessions: whether one is of the right kind, how one is opened, and how all of its statements reach the primary."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from sqlaqueue.exc import ConfigurationError

__all__ = ["is_write"]

WRITES_OPTION = "sqlaqueue_writes"
"""The execution option that marks a SELECT as a statement that writes, as claims and most verbs are."""


def is_write(statement: object) -> bool:
    """Return whether a statement writes: an INSERT, UPDATE or DELETE, a claim, or another statement about jobs.

    It is for the ``get_bind()`` of a session class that reads from a replica, which takes a claim for a SELECT::

        primary, replica = engine, create_engine("postgresql+psycopg://localhost/app")

        class RoutingSession(Session):
            def get_bind(self, mapper=None, *, clause=None, **more):
                return primary if self._flushing or is_write(clause) else replica

        with RoutingSession() as routed:
            routed.scalars(claim(Email, 1)).all()
            routed.commit()

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


# -- kinds -------------------------------------------------------------------------------------------------------------
# A mistake is found before the first job.


def check_session(session: object, what: str, *, is_async: bool, has_async_version: bool = False) -> None:
    """Refuse anything but a session, such as an engine or a session factory.

    :param what: the function or class that was given it, for error messages.
    :param has_async_version: whether there is one for an AsyncSession as well.
    :raises ConfigurationError: if it is no session of this kind.
    """
    of_async = is_of_asyncio(session, "AsyncSession", "async_scoped_session")
    if of_async if is_async else isinstance(session, Session | scoped_session):
        return
    name = "AsyncSession" if is_async else "Session"
    fix = f"give {_article_of(name)}, as in `{'async ' * is_async}with {name}(engine) as session`"
    if of_async:
        fix = f"use {_other_kind(what)}()" if has_async_version else f"use `await session.run_sync({what}, ...)`"
    elif isinstance(session, Session):
        fix = f"use {_other_kind(what)}()"
    msg = f"{what}(): this is {article(session)}; {fix}"
    raise ConfigurationError(msg)


def resolve_factory(session_factory: Any, what: str, *, is_async: bool) -> Any:
    """Return the factory of new sessions; of a scoped_session, the factory that it uses.

    :param what: the class or function that was given the factory, for error messages.
    :raises ConfigurationError: for an engine, a session or a URL, and for a factory of the other kind of sessions.
    """
    given: Any = getattr(session_factory, "session_factory", session_factory)
    maker = "async_sessionmaker" if is_async else "sessionmaker"
    of_async = is_of_asyncio(given, "AsyncEngine", "AsyncConnection", "AsyncSession")
    if of_async or isinstance(given, sa.Engine | sa.Connection | Session):
        fix = f"give {maker}(engine)"
        if of_async != is_async:
            create = "create_async_engine" if is_async else "create_engine"
            fix = f"give {maker}(engine) of an engine from {create}(), or use {_other_kind(what)}"
        msg = f"{what}: {given!r} is {article(given)}, where a session factory is needed; {fix}"
        raise ConfigurationError(msg)
    if not callable(given):
        # Its value is left out, as a URL may contain a password.
        msg = f"{what}: the session factory is {article(given)}, which is not callable; give {maker}(engine)"
        raise ConfigurationError(msg)
    if isinstance(given, sessionmaker) or is_of_asyncio(given, "async_sessionmaker"):
        made: Any = given.class_  # pyright: ignore[reportFunctionMemberAccess] # it narrows a callable to a function
        check_session_class(made, given, what, is_async=is_async)
    return given


def check_session_class(made: type[Any], factory: Any, what: str, *, is_async: bool) -> None:
    """Refuse a factory that makes the other kind of sessions.

    :param made: the class of its sessions.
    :raises ConfigurationError: if sync code was given AsyncSessions, or async code Sessions.
    """
    if issubclass(made, async_class("AsyncSession") if is_async else Session):
        return
    maker = "an async_sessionmaker" if is_async else "a sessionmaker"
    msg = f"{what}: {factory!r} makes {made.__name__}; give {maker}, or use {_other_kind(what)}"
    raise ConfigurationError(msg)


def _other_kind(what: str) -> str:
    """Return the name of the class or function for the other kind of sessions."""
    if what.lower().startswith("async"):
        return what.removeprefix("Async").removeprefix("async_")
    return f"Async{what}" if what[0].isupper() else f"async_{what}"


def session_in_scope(session: Any) -> Any:
    """Return the session itself; of a scoped session, the one of the current scope."""
    is_scoped = isinstance(session, scoped_session) or is_of_asyncio(session, "async_scoped_session")
    return session.registry() if is_scoped else session


def is_of_asyncio(given: Any, *names: str) -> bool:
    """Return whether an object is of one of these classes of SQLAlchemy's asyncio extension."""
    return any(isinstance(given, async_class(name)) for name in names)


def makes_async(session_factory: Any) -> bool:
    """Return whether a session factory, an engine or a session is of SQLAlchemy's asyncio extension."""
    given: Any = getattr(session_factory, "session_factory", session_factory)
    made: Any = getattr(given, "class_", None)
    asyncio_names = ("AsyncEngine", "AsyncConnection", "AsyncSession", "async_sessionmaker")
    return is_of_asyncio(given, *asyncio_names) or hasattr(given if isinstance(given, type) else made, "run_sync")


def async_class(name: str) -> Any:
    """Return a class of SQLAlchemy's asyncio extension, for isinstance(); an empty tuple if nothing has imported it."""
    # Not imported here, as sync code does not need greenlet. If nothing imported the module, there are no instances.
    module = sys.modules.get("sqlalchemy.ext.asyncio")
    return () if module is None else getattr(module, name)


def article(given: Any) -> str:
    """Return the class of an object with its article, for errors."""
    return _article_of(type(given).__name__)


def _article_of(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
