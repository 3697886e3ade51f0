"""Keeps handlers from ending the transaction of a test."""

from __future__ import annotations

from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self

import sqlalchemy as sa

from sqlaqueue.consumer import sessions
from sqlaqueue.consumer.sessions import ends_transaction
from sqlaqueue.exc import HandlerMisuseError
from sqlaqueue.sql.engine import OF_TEST

_METHODS = ("commit", "rollback", "close")


class TransactionGuard:
    """Refuses to commit or roll back the connections of a test while a worker uses them.

    The worker's sessions end only savepoints. A handler may end more: by ``session.connection().commit()``, or by a
    statement such as COMMIT. Then nothing could be rolled back after the test.
    """

    def __init__(self) -> None:
        self._watched: dict[sa.Connection, tuple[sa.RootTransaction | None, Any, Any]] = {}

    def watch(self, connection: sa.Connection) -> None:
        """Guard a connection from now on."""
        if connection in self._watched:
            return

        def execute(_: sa.Connection, __: Any, statement: str, *___: Any) -> None:
            if ends_transaction(statement):
                raise _refusal(f"the statement {statement}")

        sessions.listen(connection, "before_cursor_execute", execute)
        # Not by the events of commit and rollback: an error in them would leave SQLAlchemy's transaction half ended.
        for name in _METHODS:
            connection.__dict__[name] = partial(_refuse, f"session.connection().{name}()")
        info = connection.info
        info[OF_TEST] = True
        self._watched[connection] = (connection.get_transaction(), execute, info)

    def check(self) -> None:
        """Raise an error if a transaction was ended all the same, such as by ``get_transaction().commit()``.

        :raises HandlerMisuseError: if one was.
        """
        if any(transaction is None or not transaction.is_active for transaction, *_ in self._watched.values()):
            raise _refusal("the object of the connection's transaction")

    def __enter__(self) -> Self:
        """Begin with no connection."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the connections as they were."""
        for connection, (_, execute, info) in self._watched.items():
            info.pop(OF_TEST, None)
            sessions.remove(connection, "before_cursor_execute", execute)
            for name in _METHODS:
                del connection.__dict__[name]
        self._watched.clear()


def _refuse(what: str) -> NoReturn:
    raise _refusal(what)


def _refusal(what: str) -> HandlerMisuseError:
    return HandlerMisuseError(
        f"a handler ended its transaction by {what}, which in a test is the transaction of the test; use "
        "session.commit() and session.rollback() under a lease, and neither in a held transaction"
    )
