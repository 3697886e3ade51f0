"""The maintenance task that rescues jobs whose lease has expired, as their worker died."""

from __future__ import annotations

from sqlalchemy.orm import Session

from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Routine
from sqlaqueue.consumer.executing.report import emit_rescued
from sqlaqueue.consumer.maintenance.extend_leases import limit_transaction
from sqlaqueue.consumer.maintenance.state import Maintenance
from sqlaqueue.consumer.notifications.notify import notify_settled
from sqlaqueue.consumer.settling.settle import BESIDE_ORM
from sqlaqueue.keys import Key, keys_from
from sqlaqueue.notify_payloads import Signal
from sqlaqueue.queue.backend import backend
from sqlaqueue.statements.manage import rescue


def rescue_expired(maintenance: Maintenance, now: float) -> Routine:  # noqa: ARG001 - as all tasks
    """Rescue the jobs of workers that died, when it is this consumer's turn."""
    context = maintenance.context
    rescues, peers = context.polls.rescues, context.polls.peers
    if not rescues.is_due:
        return
    rescues.begin(peers.rank)
    rescued = yield ExecuteInOwnSession(rescue_jobs, (context,))
    emit_rescued(context, rescued)
    context.quarantine.may_wait |= bool(rescued) or not peers.listening


def rescue_jobs(session: Session, context: ConsumerContext) -> list[Key]:
    """Rescue jobs whose lease has expired, of any worker; the other consumers are notified of it."""
    settings, spec = context.settings, context.spec
    rescuing = [backend().notification(spec, Signal.RESCUED)] if settings.notifies else []
    limit_transaction(session, context, *rescuing)
    statement = rescue(spec.model)
    found = session.execute(statement, execution_options=BESIDE_ORM, bind_arguments=settings.bind_arguments).scalars()
    rescued = keys_from(found, len(spec.keys))
    # Some of them may have failed by that.
    notify_settled(session, spec, context.waiters, rescued)
    session.commit()
    return rescued
