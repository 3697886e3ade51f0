"""Notifications that do not arrive: they are noticed, and the times of jobs that none has announced are queried."""

from __future__ import annotations

from sqlalchemy.orm import Session

from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Routine
from sqlaqueue.consumer.maintenance.state import Maintenance
from sqlaqueue.log import logger

_LOGGED_AFTER = 2
"""How many heartbeats in a row have to be missed before it is logged: the first may be a connection that just broke."""

_UPCOMING = 50
"""How many times are queried at once."""


def check_received(maintenance: Maintenance) -> None:
    """Check that the last heartbeat has come back as a notification; if not, poll, and try another connection."""
    context = maintenance.context
    peers = context.polls.peers
    if peers.until_proof() > 0:
        if peers.listening:
            maintenance.missed_proofs = 0
        return
    context.polls.listening_lost()
    # By this connection another heartbeat would be missed as well.
    peers.wants_heartbeat = False
    maintenance.missed_proofs += 1
    if maintenance.missed_proofs.bit_count() == 1:
        # Less and less often: behind a pooler each try leaves a server connection that listens in vain.
        context.runner.reconnect()
    if maintenance.missed_proofs == _LOGGED_AFTER and not maintenance.logged_missed:
        maintenance.logged_missed = True
        logger.warning(
            "%s: notifications do not arrive, as behind a pooler in transaction mode, so new jobs are found by "
            "polling; give the Consumer an engine that is connected to the server itself, or set "
            "QueueConfig(notify=False)",
            context.name,
            extra=context.log_fields("notifications_missed"),
        )


def find_upcoming(maintenance: Maintenance, now: float) -> Routine:  # noqa: ARG001 - as all tasks
    """Query when jobs will be due that no notification has announced, such as those from before the start."""
    context = maintenance.context
    if context.polls.wants_upcoming():
        times = yield ExecuteInOwnSession(upcoming_times, (context, _UPCOMING))
        context.polls.add_upcoming(times, complete=len(times) < _UPCOMING)


def upcoming_times(session: Session, context: ConsumerContext, limit: int) -> list[float]:
    """Return when the next jobs will be due that are not yet, in seconds since the epoch, up to ``limit``."""
    spec = context.spec
    if not spec.has("run_at"):
        return []
    statement = spec.strategy.upcoming(spec, limit)
    times = session.execute(statement, bind_arguments=context.settings.bind_arguments).scalars().all()
    session.rollback()
    return [float(time) for time in times]
