"""What concerns a queue as a whole: pause, resume, who serves it, rescue, reconcile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy.orm import Session

from sqlaqueue.admin.changes import execute
from sqlaqueue.admin.sessions import takes_session
from sqlaqueue.admin.which import bind
from sqlaqueue.consumer.sessions.write_routing import routing_to_primary
from sqlaqueue.statements import control, manage


@takes_session
def pause(session: Session, model: type[Any]) -> None:
    """Hand out no more jobs of a queue, and commit."""
    with routing_to_primary(session):
        session.execute(control.pause(model), bind_arguments=bind(model))
    session.commit()


@takes_session
def resume(session: Session, model: type[Any]) -> None:
    """Hand out jobs of a queue again, and commit."""
    with routing_to_primary(session):
        session.execute(control.resume(model), bind_arguments=bind(model))
    session.commit()


@takes_session
def paused(session: Session, model: type[Any]) -> bool:
    """Return whether a queue is paused."""
    return bool(session.scalar(control.paused(model), bind_arguments=bind(model)))


@takes_session
def consumers(session: Session, model: type[Any]) -> Sequence[Any]:
    """Return the Consumers that serve a queue now, as rows with the columns of :func:`sqlaqueue.consumers`."""
    return session.execute(control.consumers(model), bind_arguments=bind(model)).all()


@takes_session
def rescue(session: Session, model: type[Any]) -> int:
    """Take back jobs whose lease has expired, commit, and return how many."""
    return execute(session, model, manage.rescue(model))


@takes_session
def reconcile(session: Session, model: type[Any]) -> int:
    """Mend what bypassed the triggers of a message table, commit, and return how many jobs that were."""
    return execute(session, model, manage.reconcile(model))
