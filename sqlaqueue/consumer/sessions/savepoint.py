"""The part of a held transaction in which handlers run: undone by itself, without losing the batch."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session, SessionTransaction

from sqlaqueue.consumer.sessions.handler_misuse import ends_transaction, transaction_ended_error
from sqlaqueue.consumer.sessions.session_usage import transaction_used
from sqlaqueue.consumer.settings import Plan
from sqlaqueue.exc import HandlerMisuseError

_GUARD = "sqlaqueue_guard"


class BatchLost(Exception):
    """The connection of the transaction that holds a batch is gone, and the batch with it."""


class Savepoint:
    """A savepoint for calls of the handler, of which the last one only may leave a trace.

    While it is open, the session refuses to commit: the commit would unlock the whole batch, without an error. A
    rollback or close cannot be refused; :meth:`close` finds out.
    """

    def __init__(self, session: Session, plan: Plan) -> None:
        self._session = session
        self._bind = plan.bind
        self._root = session.get_transaction()
        if not session.info.get(_GUARD):
            event.listen(session, "before_commit", _guard)
            # Before the savepoint begins: to ask for the connection in it would set it for handlers that need none.
            self._guard_connection(session.connection(bind_arguments=plan.bind))
        self._own: SessionTransaction = session.begin_nested()
        self._open = True
        session.info[_GUARD] = self

    def _guard_connection(self, connection: sa.Connection) -> None:
        """Refuse as well what would end the transaction without the session."""
        session = self._session

        def commit(_: sa.Connection) -> None:
            _guard(session)

        def execute(_: sa.Connection, __: Any, statement: str, *___: Any) -> None:
            if ends_transaction(statement):
                raise transaction_ended_error()

        event.listen(connection, "commit", commit)
        event.listen(connection, "before_cursor_execute", execute)

    def refuses(self) -> bool:
        """Return whether a commit that is under way would end more than a part of the handler's own."""
        return self._open and self._session.get_nested_transaction() in {self._own, None}

    def was_used(self) -> bool:
        """Return whether a handler has left a trace since it was opened, if only by ending what it should not."""
        session = self._session
        if session.get_transaction() is not self._root or session.get_nested_transaction() is not self._own:
            return True
        return transaction_used(session, self._own)

    def close(self, *, keep: bool) -> None:
        """Keep or undo what the handler wrote.

        :raises HandlerMisuseError: when the handler has ended the transaction that holds the batch.
        :raises BatchLost: when the connection has gone, which a handler that caught the error may have hidden.
        """
        if self._session.get_transaction() is not self._root or self._root is None or not self._root.is_active:
            msg = (
                "the handler ended the transaction that holds its batch (session.rollback() or close()); "
                "leave it to the Consumer, and use session.begin_nested() for a part that may be undone"
            )
            raise HandlerMisuseError(msg)
        if self._session.get_nested_transaction() is not None:  # else the handler has undone its part itself
            self._open = False
            if keep:
                self._own.commit()
            else:
                self._own.rollback()
        self._open = False
        # A cancelled task takes the connection along without any later step noticing before the last one.
        if self._session.connection(bind_arguments=self._bind).invalidated:
            raise BatchLost


def _guard(session: Session) -> None:
    savepoint: Savepoint | None = session.info.get(_GUARD)
    if savepoint is not None and savepoint.refuses():
        msg = (
            "a handler must not commit the transaction that holds its batch; leave the commit to the Consumer, "
            "and use session.begin_nested() for a part that may be undone"
        )
        raise HandlerMisuseError(msg)
