"""What notifications and claims miss.

Notifications may not arrive: this is noticed, and the times of jobs that none has announced are queried. A claim may
miss a row without an error, since a trigger of the application leaves it as it is: the row is found and left out, since
it would take the place of another one in each claim.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from sqlalchemy.orm import Session

from sqlaqueue.consumer.claiming.unclaimable import TRY_AGAIN_AFTER
from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.database_errors import may_be_of_a_row
from sqlaqueue.consumer.core.effects import Effect, ExecuteInOwnSession, Routine
from sqlaqueue.consumer.executing.report import report_unclaimable
from sqlaqueue.consumer.maintenance.state import Maintenance
from sqlaqueue.consumer.notifications.notify import notify_released
from sqlaqueue.log import logger
from sqlaqueue.queue.run import Key

_LOGGED_AFTER = 2
"""How many heartbeats in a row have to be missed before it is logged: the first may be a connection that just broke."""

_LOOKED_AT = 100
"""How many due jobs a look for unchanged rows claims at most."""

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


def find_unchanged(maintenance: Maintenance, now: float) -> Routine:
    """Look for unchanged rows now and then, unless the queue is drained, which looks at its end.

    Until then, a claim that finds nothing because of a look would end it.
    """
    context, timers = maintenance.context, maintenance.timers
    if not context.has_claimed or not timers.is_due("unchanged", now):
        return
    # Set in a drain as well: a timer that stays due would wake the loop fifty times in each second.
    timers.set("unchanged", now + TRY_AGAIN_AFTER)
    # A claim of as many jobs as it may take has left some for the next one.
    if not context.draining and (context.claimer.was_short or context.claimer.unclaimable.unchanged()):
        yield from look_for_unchanged(context)


def look_for_unchanged(context: ConsumerContext) -> Generator[Effect, Any, int]:
    """Find the jobs that claims should take and do not: their UPDATE or DELETE leaves the row as it is.

    Due jobs are claimed, and the claim is rolled back.

    :return: how many were found that were not known, or that the next claim may take.
    """
    unclaimable = context.claimer.unclaimable
    # On a distributed table a claim goes from shard to shard, and cannot look at chosen jobs.
    if context.settings.distribution is not None:
        return 0
    known = unclaimable.unchanged()
    try:
        looked: tuple[list[Key], list[Key]] = yield ExecuteInOwnSession(_look, (context, known), slow=True)
    except Exception as error:
        if may_be_of_a_row(error):
            # The next claim meets the row, and begins to search for it.
            return 0
        raise
    keys, unchanged = looked
    # Others that were known may be locked or held back; if they are not due any more, they are forgotten later.
    for key in set(keys).difference(unchanged):
        unclaimable.remove(key)
    reason, found = RowUnchanged(), len(keys) - len(unchanged)
    for key in unchanged:
        job = unclaimable.add(key, str(reason), "unchanged")
        found += job is not None
        report_unclaimable(context, job, reason, "claimed")
    if found:
        context.polls.poll_at_once()
    return found


def _look(session: Session, context: ConsumerContext, known: Sequence[Key]) -> tuple[list[Key], list[Key]]:
    """Return the keys of the jobs that were looked at, and of those whose rows a claim leaves as they are."""
    keys, unchanged = context.claimer.look(session, known, _LOOKED_AT)
    if len(keys) > len(unchanged) and context.settings.notifies:
        # The others were locked for a moment, in which the claim of another Consumer has missed them.
        notify_released(session, context.spec)
        session.commit()
    return keys, unchanged


class RowUnchanged(Exception):
    """A statement has left a row as it is, without an error."""

    def __str__(self) -> str:
        return "the database leaves its row as it is, without an error: a trigger returns NULL, or a policy hides it"


def upcoming_times(session: Session, context: ConsumerContext, limit: int) -> list[float]:
    """Return when the next jobs will be due that are not yet, in seconds since the epoch, up to ``limit``."""
    spec = context.spec
    if not spec.has("run_at"):
        return []
    statement = spec.strategy.upcoming(spec, limit)
    times = session.execute(statement, bind_arguments=context.settings.bind_arguments).scalars().all()
    session.rollback()
    return [float(time) for time in times]
