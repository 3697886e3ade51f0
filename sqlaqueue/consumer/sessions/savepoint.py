"""The savepoint in a held transaction within which handlers run: it can be rolled back without losing the batch."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, SessionTransaction

from sqlaqueue.consumer.sessions import connection_events
from sqlaqueue.consumer.sessions.handler_misuse import ends_transaction, transaction_ended_error
from sqlaqueue.consumer.sessions.session_usage import transaction_used
from sqlaqueue.exc import HandlerMisuseError

_GUARD = "sqlaqueue_guard"


class BatchLost(Exception):
    """The connection of the transaction that holds a batch is lost, and the batch with it."""


class Savepoint:
    """A savepoint for calls of a handler, which is closed after the first call that used the session.

    While it is open, the session refuses to commit, which would unlock the rows of the whole batch. A rollback cannot
    be refused; :meth:`close` detects it.
    """

    def __init__(self, session: Session, bind: dict[str, Any]) -> None:
        self._session = session
        self._bind = bind
        self._root = session.get_transaction()
        if not session.info.get(_GUARD):
            event.listen(session, "before_commit", _guard)
            # Before the savepoint: asking for the connection within it would send SAVEPOINT, even for a handler that
            # executes nothing.
            connection = session.connection(bind_arguments=bind)
            # The transaction of a test is guarded by what runs the handler in it.
            if not connection.in_nested_transaction():
                self._guard_connection(connection)
        self._own: SessionTransaction = session.begin_nested()
        self.is_open = True
        self._not_released: list[tuple[sa.Connection, str]] = []
        session.info[_GUARD] = self

    def _guard_connection(self, connection: sa.Connection) -> None:
        """Refuse commits by the connection, and statements that end the transaction."""
        session = self._session

        def commit(_: sa.Connection) -> None:
            _guard(session)

        def execute(_: sa.Connection, __: Any, statement: str, *___: Any) -> None:
            if _is_open(session) and ends_transaction(statement):
                raise transaction_ended_error()

        connection_events.listen(connection, "commit", commit)
        connection_events.listen(connection, "before_cursor_execute", execute)

    def refuses(self) -> bool:
        """Return whether the commit in progress would end more than a savepoint of the handler."""
        return self.is_open and self._session.get_nested_transaction() in {self._own, None}

    def was_used(self) -> bool:
        """Return whether a handler has used the session, or ended the savepoint or the transaction."""
        session = self._session
        if session.get_transaction() is not self._root or session.get_nested_transaction() is not self._own:
            return True
        return transaction_used(session, self._own)

    def _release(self) -> None:
        # SQLAlchemy has no public access to the savepoints of a transaction.
        connections: Any = self._own._connections.values()  # noqa: SLF001 - see above
        used = {nested: (connection, nested) for connection, nested, *_ in connections}.values()
        try:
            self._own.commit()
        except DBAPIError:
            self._not_released = [(connection, nested._savepoint) for connection, nested in used]  # noqa: SLF001 - see above
            raise

    def _roll_back(self) -> None:
        """Roll back to the savepoint, also if the database has refused to release it.

        It refuses after the handler has caught the error of a statement. SQLAlchemy regards the savepoint as ended by
        then and sends nothing, and the server would refuse all further statements of the batch.
        """
        self._own.rollback()
        for connection, name in self._not_released:
            connection.dialect.do_rollback_to_savepoint(connection, name)
        self._not_released = []

    def close(self, *, keep: bool) -> None:
        """Release the savepoint, or roll back to it.

        :raises HandlerMisuseError: if the handler has ended the transaction that holds the batch.
        :raises BatchLost: if the connection is lost; the handler may have caught that error.
        """
        if self._session.get_transaction() is not self._root or self._root is None or not self._root.is_active:
            msg = (
                "the handler ended the transaction that holds its batch (session.rollback() or close()); "
                "leave this to the Consumer, and use session.begin_nested() to undo a part"
            )
            raise HandlerMisuseError(msg)
        if self._session.get_nested_transaction() is not None:  # else the handler has rolled it back itself
            self.is_open = False
            if keep:
                self._release()
            else:
                self._roll_back()
        self.is_open = False
        # Cancelling a task invalidates its connection; without this check only the commit of the batch would fail.
        if self._session.connection(bind_arguments=self._bind).invalidated:
            raise BatchLost


def _is_open(session: Session) -> bool:
    """Return whether a handler of the session is running in a savepoint."""
    savepoint: Savepoint | None = session.info.get(_GUARD)
    return savepoint is not None and savepoint.is_open


def _guard(session: Session) -> None:
    savepoint: Savepoint | None = session.info.get(_GUARD)
    if savepoint is not None and savepoint.refuses():
        msg = (
            "a handler must not commit the transaction that holds its batch; leave the commit to the Consumer, and use "
            "session.begin_nested() to undo a part"
        )
        raise HandlerMisuseError(msg)
