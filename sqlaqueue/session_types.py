"""The sessions that functions are given: checks of their type, and the session of a scope."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy.orm import Session, scoped_session

from sqlaqueue.exc import ConfigurationError

P = ParamSpec("P")
T = TypeVar("T")


def check_session(session: object, what: str, *, is_async: bool, has_async_version: bool = False) -> None:
    """Refuse anything but a session, such as an engine or a session factory.

    :param what: the function that was given it, for error messages.
    :param has_async_version: whether there is such a function for an AsyncSession.
    :raises ConfigurationError: if it is no session of this kind.
    """
    of_async = is_of_asyncio(session, "AsyncSession", "async_scoped_session")
    if of_async if is_async else isinstance(session, Session | scoped_session):
        return
    name = "AsyncSession" if is_async else "Session"
    fix = f"give {_article_of(name)}, as in `{'async ' * is_async}with {name}(engine) as session`"
    if of_async:
        fix = f"use async_{what}()" if has_async_version else f"use `await session.run_sync({what}, ...)`"
    elif isinstance(session, Session):
        fix = f"use {what.removeprefix('async_')}()"
    msg = f"{what}(): this is {article(session)}; {fix}"
    raise ConfigurationError(msg)


def requires_session(operation: Callable[Concatenate[Session, P], T]) -> Callable[Concatenate[Session, P], T]:
    """Decorate a function so that it refuses an engine or a session factory, with an error that names the fix."""

    @functools.wraps(operation)
    def run(session: Session, /, *args: P.args, **kwargs: P.kwargs) -> T:
        check_session(session, operation.__name__, is_async=False)
        return operation(session, *args, **kwargs)

    return run


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
