"""Whether the server's queue of notifications fills up, since a listener does not receive them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from sqlaqueue.admin.diagnosis.checks.horizon import describe_session
from sqlaqueue.admin.diagnosis.examination import Examination
from sqlaqueue.admin.diagnosis.finding import Finding
from sqlaqueue.postgresql.server import notification_queue
from sqlaqueue.texts import duration_text, moment_text


def check_notification_queue(examination: Examination) -> Iterator[Finding]:
    """Find a full notification queue, and the session that most likely keeps it full.

    A listener receives no notifications within a transaction. The server does not tell which sessions listen, so the
    session with the oldest transaction is named. Thresholds: ``notification_queue``, ``notification_queue_critical``.
    """
    queue = notification_queue(examination.connection)
    limits = examination.thresholds
    if queue.usage < limits.notification_queue:
        return
    holder = ""
    fixes: tuple[str, ...] = ()
    if queue.oldest is not None:
        holder = (
            f" {describe_session(queue.oldest)} has the oldest transaction, since {moment_text(queue.oldest.since)} "
            f"({duration_text(queue.oldest.seconds)}); if it listens, it keeps the queue full."
        )
        fixes = (f"SELECT pg_terminate_backend({queue.oldest.pid});",)
    yield Finding(
        severity="critical" if queue.usage >= limits.notification_queue_critical else "warning",
        code="notification_queue_full",
        queue=None,
        summary=(
            f"The server's notification queue is {queue.usage:.0%} full: a session that listens does not receive its "
            f"notifications.{holder}"
        ),
        consequence="When the queue is full, each commit that notifies fails, so that no job can be added.",
        fixes=fixes,
        facts={"usage": queue.usage, "oldest": None if queue.oldest is None else asdict(queue.oldest)},
    )
