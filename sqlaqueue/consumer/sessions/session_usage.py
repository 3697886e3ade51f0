"""Whether a handler has used its session, so that its run needs a commit of its own. No I/O."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.orm.attributes import instance_state


def was_used(session: Session, job: Any) -> bool:
    """Return whether a handler has used a session that was clean, to read or to write.

    :param job: one of the handler's jobs.
    """
    # Adding, deleting or changing an instance begins a transaction as well.
    if session.in_transaction():
        return transaction_used(session, session.get_transaction())
    # The handler may have committed, rolled back or closed the session, or deleted the job and committed.
    state = instance_state(job)
    return state.expired or state.session_id is None or state.was_deleted


def transaction_used(session: Session, transaction: SessionTransaction | None) -> bool:
    """Return whether there is something to flush, or a transaction has executed a statement."""
    if not session._is_clean():  # noqa: SLF001 - the public attributes new, dirty and deleted build a set each, for every job
        return True
    return transaction is not None and bool(transaction._connections)  # noqa: SLF001 - session.connection() would begin a transaction


def has_lost_connection(session: Session) -> bool:
    """Return whether a connection of the session's transaction is lost; the handler may have caught that error."""
    transaction = session.get_transaction()
    if transaction is None:
        return False
    used = {id(each[0]): each[0] for each in transaction._connections.values()}  # noqa: SLF001 - as above
    return any(connection.invalidated for connection in used.values())


def is_expired(job: Any) -> bool:
    """Return whether a job is expired, and with it all jobs of its session."""
    return instance_state(job).expired
