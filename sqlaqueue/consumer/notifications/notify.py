"""The notifications that Consumers send about jobs; PostgreSQL delivers them when the transaction commits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.consumer.notifications.poll_schedule import Look
from sqlaqueue.consumer.settings import Plan
from sqlaqueue.consumer.settling.outcomes import RELEASED, Ended
from sqlaqueue.keys import Key, key_text
from sqlaqueue.payloads import ALL_JOBS, Claimed, Payload, Signal, settled_payloads
from sqlaqueue.queue.backend import backend


def notify_settled(session: Session, plan: Plan, keys: Iterable[Key]) -> None:
    """Notify the callers that wait for some of these jobs; without such callers, send nothing."""
    if plan.awaited:
        for payload in settled_payloads(plan.awaited.take([key_text(key) for key in keys])):
            _notify(session, plan, payload)


def notify_released(session: Session, plan: Plan, ended: Sequence[Ended]) -> None:
    """Make the other Consumers poll if jobs of a held batch are released.

    For other transactions the state of such a job has never changed, so no trigger sends a backend().notification.
    """
    if plan.is_told and any(one.outcome is RELEASED for one in ended):
        _notify(session, plan, Signal.POLL)


def notify_all_claimed(session: Session, plan: Plan, look: Look) -> None:
    """Notify the other Consumers that a poll has found no job, if that saves more than it costs."""
    if look.spares_others and plan.takes_all:
        _notify(session, plan, Claimed(ALL_JOBS, look.tickets))


def notify_all_claimed_and_commit(session: Session, plan: Plan, look: Look) -> None:
    """Do the same and commit."""
    notify_all_claimed(session, plan, look)
    session.commit()


def _notify(session: Session, plan: Plan, payload: Payload) -> None:
    session.execute(sa.select(backend().notification(plan.spec, payload)), bind_arguments=plan.bind)
