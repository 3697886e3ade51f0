"""Notifications of Consumers, sent by the transaction that makes them true."""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.consumer.configuration.settings import ConsumerSettings
from sqlaqueue.consumer.notifications.poll_schedule import Poll
from sqlaqueue.consumer.notifications.waiter_registry import WaiterRegistry
from sqlaqueue.notify_payloads import ALL_JOBS, Claimed, Payload, Signal, settled_payloads
from sqlaqueue.postgresql.triggers import notification
from sqlaqueue.queue.run import Key, key_text
from sqlaqueue.queue.spec import QueueSpec


def notify_settled(session: Session, spec: QueueSpec, waiters: WaiterRegistry, keys: Iterable[Key]) -> None:
    """Notify the callers that wait for some of these jobs that they are settled; send nothing if there are none."""
    if not waiters:
        return
    for payload in settled_payloads(waiters.take([key_text(key) for key in keys])):
        _send(session, spec, payload)


def notify_released(session: Session, spec: QueueSpec) -> None:
    """Have other consumers poll for released jobs: no trigger announces rows that have read as pending all the time."""
    _send(session, spec, Signal.POLL)


def notify_all_claimed(session: Session, settings: ConsumerSettings, poll: Poll) -> None:
    """Notify other consumers that a poll has found nothing, where that spares them their own."""
    if poll.spares_others and settings.serves_whole_queue:
        _send(session, settings.spec, Claimed(ALL_JOBS, poll.announcements))


def notify_all_claimed_and_commit(session: Session, settings: ConsumerSettings, poll: Poll) -> None:
    """Do the same in a transaction of its own."""
    notify_all_claimed(session, settings, poll)
    session.commit()


def _send(session: Session, spec: QueueSpec, payload: Payload) -> None:
    # A session with several engines chooses one by the mapper.
    session.execute(sa.select(notification(spec, payload)), bind_arguments={"mapper": spec.mapper})
