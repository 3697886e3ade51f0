"""What Consumers tell others with the transactions in which it becomes true."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.consumer.notifications.poll_schedule import Look
from sqlaqueue.consumer.settings import Plan
from sqlaqueue.consumer.settling.outcomes import RELEASED, Ended
from sqlaqueue.keys import Key, key_text
from sqlaqueue.payloads import ALL_JOBS, Claimed, Signal, settled_payloads
from sqlaqueue.postgresql.side_tables import notification


def notify_settled(session: Session, plan: Plan, keys: Iterable[Key]) -> None:
    """Tell those who wait for the end of some jobs, when the transaction commits; nobody, where nobody waits."""
    if not plan.awaited:
        return
    for payload in settled_payloads(plan.awaited.take([key_text(key) for key in keys])):
        session.execute(sa.select(notification(plan.spec, payload)), bind_arguments=plan.bind)


def notify_released(session: Session, plan: Plan, ended: Sequence[Ended]) -> None:
    """Have the others look for jobs that a batch has not begun: no trigger calls out what read as waiting all along."""
    if plan.is_told and any(one.outcome is RELEASED for one in ended):
        session.execute(sa.select(notification(plan.spec, Signal.POLL)), bind_arguments=plan.bind)


def notify_all_claimed(session: Session, plan: Plan, look: Look) -> None:
    """Tell the others, when the transaction commits, that a look has found nothing, where that spares them theirs."""
    if look.spares_others and plan.takes_all:
        told = notification(plan.spec, Claimed(ALL_JOBS, look.tickets))
        session.execute(sa.select(told), bind_arguments=plan.bind)


def notify_all_claimed_and_commit(session: Session, plan: Plan, look: Look) -> None:
    """The same, in a transaction of its own."""
    notify_all_claimed(session, plan, look)
    session.commit()
