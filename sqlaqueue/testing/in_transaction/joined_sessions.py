"""Sessions that work in the transaction of a test's session, each in a savepoint of its own.

SQLAlchemy calls this "joining a session into an external transaction": a commit of such a session releases its
savepoint, and the test's rollback undoes everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.session_types import check_session, session_in_scope
from sqlaqueue.testing.in_transaction.transaction_guard import TransactionGuard
from sqlaqueue.write_routing import routing_to_primary

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession


_OPTIONS = ("_query_cls", "enable_baked_queries", "execution_options")
"""The attributes for options of a Session beside those that its constructor is given; the last is of SQLAlchemy 2.1."""


def resolve_session(session: Any, function: str, *, is_async: bool) -> Any:
    """Return the session itself; of a scoped session, the one of the current scope.

    :param function: the function that was given it, for errors.
    :raises ConfigurationError: if it is no session of this kind.
    """
    check_session(session, function, is_async=is_async, has_async_version=True)
    return session_in_scope(session)


def joined_session(session: Session, guard: TransactionGuard) -> Session:
    """Return a new session of the same class, in the transaction of ``session``.

    It has the options and attributes of ``session``, but not the event listeners of that instance: a session factory
    would not have added them either.

    :param guard: watches the connections that it uses.
    """
    cls = type(session)
    joined = cls.__new__(cls)
    # The class may have a constructor of its own. What that has stored is copied, and SQLAlchemy's part made anew.
    joined.__dict__.update((name, value) for name, value in vars(session).items() if name not in {"dispatch", "info"})
    Session.__init__(
        joined,
        autoflush=session.autoflush,
        expire_on_commit=session.expire_on_commit,
        info=dict(session.info),
        join_transaction_mode="create_savepoint",
    )
    joined.__dict__.update((name, vars(session)[name]) for name in _OPTIONS if name in vars(session))

    def get_bind(mapper: Any = None, **arguments: Any) -> sa.Connection:
        # Other connections do not see what the test has written.
        with routing_to_primary(session):
            connection = session.connection(bind_arguments={"mapper": mapper, **arguments})
        guard.watch(connection)
        return connection

    joined.__dict__["get_bind"] = get_bind
    return joined


def joined_factory(session: Session, guard: TransactionGuard) -> Callable[[], Session]:
    """Return a session factory for a Consumer that works in the transaction of ``session``."""
    return lambda: joined_session(session, guard)


def joined_async_factory(session: AsyncSession, guard: TransactionGuard) -> Callable[[], AsyncSession]:
    """Return the same for an AsyncConsumer."""
    from sqlalchemy.ext.asyncio import AsyncSession as Base  # noqa: PLC0415 - it needs greenlet, which sync code may lack

    cls = type(session)

    def make() -> AsyncSession:
        joined = cls.__new__(cls)
        joined.__dict__.update(vars(session))
        Base.__init__(joined, sync_session_class=lambda **_: joined_session(session.sync_session, guard))  # type: ignore[arg-type]  # it takes any callable that makes a session
        return joined

    return make
