"""Operations on a whole queue: pause, resume, consumers, rescue, reconcile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy.orm import Session

from sqlaqueue.admin.bulk_changes import execute
from sqlaqueue.admin.job_filter import bind_arguments
from sqlaqueue.admin.session_checks import requires_session
from sqlaqueue.statements import control, manage
from sqlaqueue.write_routing import routing_to_primary


@requires_session
def pause(session: Session, model: type[Any]) -> None:
    """Pause a queue, so that none of its jobs is claimed, and commit."""
    with routing_to_primary(session):
        session.execute(control.pause(model), bind_arguments=bind_arguments(model))
    session.commit()


@requires_session
def resume(session: Session, model: type[Any]) -> None:
    """Let Consumers claim jobs of a paused queue again, and commit."""
    with routing_to_primary(session):
        session.execute(control.resume(model), bind_arguments=bind_arguments(model))
    session.commit()


@requires_session
def paused(session: Session, model: type[Any]) -> bool:
    """Return whether a queue is paused."""
    return bool(session.scalar(control.paused(model), bind_arguments=bind_arguments(model)))


@requires_session
def consumers(session: Session, model: type[Any]) -> Sequence[Any]:
    """Return the live Consumers of a queue, as rows with the columns of :func:`sqlaqueue.consumers`."""
    return session.execute(control.consumers(model), bind_arguments=bind_arguments(model)).all()


@requires_session
def rescue(session: Session, model: type[Any]) -> int:
    """Make jobs whose lease has expired pending again, commit, and return their number."""
    return execute(session, model, manage.rescue(model))


@requires_session
def reconcile(session: Session, model: type[Any]) -> int:
    """Insert missing messages and delete superfluous ones, commit, and return the number of jobs concerned."""
    return execute(session, model, manage.reconcile(model))
