"""Checks of session factories and sessions where they are given, so that a mistake is found before the first job."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.session_types import article, async_class, is_of_asyncio


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
