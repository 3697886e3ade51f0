"""Whether a handler has left a trace in its session, so that its run ends with a commit of its own. No I/O."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.orm.attributes import instance_state


def was_used(session: Session, job: Any) -> bool:
    """Return whether a handler has used a session that was clean: it may have read or written something.

    :param job: one of its jobs.
    """
    # Adding, deleting or changing an instance begins a transaction as well, so most handlers are done with here.
    if session.in_transaction():
        return transaction_used(session, session.get_transaction())
    # It may have committed, rolled back or closed the session.
    state = instance_state(job)
    return state.expired or state.session_id is None


def transaction_used(session: Session, transaction: SessionTransaction | None) -> bool:
    """Return whether there is something to flush, or the transaction has been to the database."""
    if not session._is_clean():  # noqa: SLF001 - new, dirty and deleted make a set each, for every job
        return True
    return transaction is not None and bool(transaction._connections)  # noqa: SLF001 - asking by session.connection() would begin one


def has_lost_connection(session: Session) -> bool:
    """Return whether a connection of the session's transaction is gone, which a handler may have hidden."""
    transaction = session.get_transaction()
    if transaction is None:
        return False
    used = {id(each[0]): each[0] for each in transaction._connections.values()}  # noqa: SLF001 - as above
    return any(connection.invalidated for connection in used.values())


def is_expired(job: Any) -> bool:
    """Return whether a job is no longer as it was loaded, and neither are those that share its session."""
    return instance_state(job).expired
