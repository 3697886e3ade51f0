"""Whether a session or a factory of sessions is of the right kind, so that a mistake is found before the first job."""

from __future__ import annotations

import sys
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from sqlaqueue.exc import ConfigurationError


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
