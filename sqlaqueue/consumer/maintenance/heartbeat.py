"""The heartbeats of this consumer: its row in the table of consumers, and a notification of it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue import notify_payloads
from sqlaqueue._version import __version__
from sqlaqueue.consumer.claiming.unclaimable import UnclaimableJob
from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Routine
from sqlaqueue.consumer.core.error_text import ascii_text
from sqlaqueue.consumer.maintenance.missed_notifications import check_received
from sqlaqueue.consumer.maintenance.state import Maintenance
from sqlaqueue.postgresql.side_tables import as_json
from sqlaqueue.postgresql.triggers import notification
from sqlaqueue.queue.names import CONSUMERS
from sqlaqueue.queue.run import Run
from sqlaqueue.queue.spec import clock
from sqlaqueue.sql.inserts import insert_or_replace
from sqlaqueue.statements.claim import worker_name

_MOST_SHOWN = 100
_LONGEST_ERROR = 300


def heartbeat(maintenance: Maintenance, now: float) -> Routine:
    """Register this consumer, and prove by receiving its own heartbeat that notifications arrive."""
    context, timers = maintenance.context, maintenance.timers
    peers = context.polls.peers
    if not context.has_claimed or CONSUMERS not in context.spec.side_tables:
        return
    check_received(maintenance)
    unclaimable, news = context.claimer.unclaimable, peers.listening != maintenance.sent_listening
    changes = unclaimable.changes
    wanted = peers.wants_heartbeat or peers.until_look() <= 0 or news or changes != maintenance.sent_changes
    if not (timers.is_due("heartbeat", now) or wanted):
        return
    pause = context.intervals.heartbeat(peers.count)
    timers.set("heartbeat", now + pause)
    notify = peers.begin_heartbeat(news=news)
    maintenance.sent_listening, context.registered = peers.listening, True
    running, claimed = context.in_flight.running(), context.claimed_runs()
    waiting = max(0, len(claimed) - len(running))
    beat = Heartbeat(
        context.id, peers.listening, running, waiting, unclaimable.jobs(), expires_in=3 * pause, notify=notify
    )
    # Even if it fails: another try each moment would not help during an outage.
    maintenance.sent_changes = changes
    others, moment = yield ExecuteInOwnSession(send_heartbeat, (context, beat))
    context.polls.heartbeat_sent(others, moment - time.monotonic())


# -- operations ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heartbeat:
    """What a consumer writes about itself."""

    consumer: str
    """Its id."""
    listening: bool
    running: Sequence[Run]
    """The runs whose handler runs."""
    waiting: int
    """How many jobs it has claimed besides, which have not begun."""
    unclaimable: Sequence[UnclaimableJob]
    """The jobs that it cannot claim, rescue or settle."""
    expires_in: float
    """The seconds after which it counts as dead without another heartbeat."""
    notify: bool
    """Whether to notify the queue's channel as well."""


def send_heartbeat(session: Session, context: ConsumerContext, beat: Heartbeat) -> tuple[list[str], float]:
    """Write the heartbeat of a consumer, and query which consumers of the queue are listening.

    :return: the ids of the listening consumers, and the time of the database in seconds since the epoch.
    """
    spec, settings = context.spec, context.settings
    table = spec.side_tables[CONSUMERS]
    host, _, pid = worker_name().rpartition(":")
    running = [[str(part) for part in run.key] for run in beat.running[:_MOST_SHOWN]]
    unclaimable = [
        {"key": [str(part) for part in job.key], "error": ascii_text(job.error)[:_LONGEST_ERROR]}
        for job in beat.unclaimable[:_MOST_SHOWN]
    ]
    seen = {
        "listening": beat.listening,
        "running": as_json(sa.literal(json.dumps(running), sa.Text())),
        "claimed": beat.waiting,
        "unclaimable": as_json(sa.literal(json.dumps(unclaimable), sa.Text())),
        "heartbeat_at": clock(),
        "expires_at": clock() + sa.literal(timedelta(seconds=beat.expires_in), sa.Interval()),
    }
    own = {
        "id": beat.consumer,
        "queue": spec.name,
        "name": settings.worker(),
        "host": host,
        "pid": int(pid),
        "version": __version__,
    }
    upsert: sa.Insert = insert_or_replace(table, {**own, **seen}, replaced=list(seen))
    if settings.notifies and beat.notify:
        upsert = upsert.returning(notification(spec, notify_payloads.Heartbeat(beat.consumer)))
    alive = sa.and_(table.c.queue == spec.name, table.c.listening, table.c.expires_at > clock())
    others = sa.func.coalesce(
        sa.func.array_agg(table.c.id), sa.cast([], sa.ARRAY(sa.Text())), type_=sa.ARRAY(sa.Text())
    )
    now = sa.extract("epoch", sa.func.clock_timestamp())
    asked = sa.select(others, now).select_from(table).where(alive).add_cte(upsert.cte("sqlaqueue_heartbeat"))
    names, moment = session.execute(asked, bind_arguments=settings.bind_arguments).one()
    session.commit()
    return list(names), float(moment)


def deregister(session: Session, context: ConsumerContext) -> None:
    """Delete this consumer from the table of consumers."""
    table = context.spec.side_tables[CONSUMERS]
    gone = sa.delete(table).where(table.c.id == context.id)
    if context.settings.notifies:
        statement = gone.returning(notification(context.spec, notify_payloads.Deregistered(context.id)))
        session.execute(statement, bind_arguments=context.settings.bind_arguments)
    else:
        session.execute(gone, bind_arguments=context.settings.bind_arguments)
    session.commit()
