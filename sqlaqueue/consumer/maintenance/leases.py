"""What a Consumer does for its queue beside running jobs: operations on a Session, each with its commit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue._version import __version__
from sqlaqueue.consumer.notifications.notify import notify_settled
from sqlaqueue.consumer.settings import Plan
from sqlaqueue.consumer.settling import crash_journal
from sqlaqueue.consumer.settling.settle import QUIET
from sqlaqueue.keys import Key, keys_by_token, keys_from
from sqlaqueue.payloads import Deregistered, Heartbeat, Signal
from sqlaqueue.queue.backend import CONSUMERS, CONTROL, CRASH_JOURNAL, backend
from sqlaqueue.queue.run import Run
from sqlaqueue.queue.spec import clock
from sqlaqueue.statements.claim import worker_name
from sqlaqueue.statements.manage import reconcile, rescue
from sqlaqueue.statements.returning import returning_keys
from sqlaqueue.strategies import ClaimedJobs, KeyRange

_FORGET = timedelta(days=1)
_MOST_SHOWN = 100

PART = 20_000
"""How many jobs are compared with their messages at once."""

_LONGEST_TIMEOUT = 2**31 - 1


def _be_brief(session: Session, plan: Plan, *others: sa.ColumnElement[Any]) -> None:
    """Have the server end this transaction if it does not come to its commit within a lease.

    A process that is frozen just before it would keep the rows locked, and nobody could rescue them.
    """
    patience = min(int(plan.lease.total_seconds() * 1000), _LONGEST_TIMEOUT)
    setting = sa.func.set_config("idle_in_transaction_session_timeout", str(patience), sa.true())
    session.execute(sa.select(setting, *others), bind_arguments=plan.bind)


def extend_leases(session: Session, plan: Plan, runs: Sequence[Run]) -> None:
    """Move the leases of runs that are alive; rows that are locked are passed over."""
    held = ClaimedJobs(list(keys_by_token(runs).items()))
    verb = plan.spec.strategy.extend(plan.spec, held, sa.literal(plan.lease, sa.Interval()))
    _be_brief(session, plan)
    session.execute(returning_keys(plan.spec, verb), execution_options=QUIET, bind_arguments=plan.bind)
    session.commit()


def rescue_expired(session: Session, plan: Plan) -> list[Key]:
    """Take back jobs whose lease has expired, of whatever worker; the others hear that it is done."""
    _be_brief(session, plan, *([backend().notification(plan.spec, Signal.RESCUED)] if plan.is_told else []))
    keys = session.execute(rescue(plan.spec.model), execution_options=QUIET, bind_arguments=plan.bind).scalars().all()
    rescued = keys_from(keys, len(plan.spec.keys))
    # Some of them may have failed with that.
    notify_settled(session, plan, rescued)
    session.commit()
    return rescued


def reconcile_messages(session: Session, plan: Plan) -> list[Key]:
    """Mend what bypassed the triggers, and forget what the side tables no longer need."""
    mended = session.execute(reconcile(plan.spec.model), execution_options=QUIET, bind_arguments=plan.bind)
    keys = keys_from(mended.scalars(), len(plan.spec.keys))
    _forget_old(session, plan)
    session.commit()
    return keys


def reconcile_range(session: Session, plan: Plan, after: Key | None) -> tuple[list[Key], Key | None]:
    """Do the same for the next :data:`PART` of the jobs, in the order of their keys, where the strategy can.

    To compare all of a large table at once keeps the disk from everybody else for as long as it takes.

    :param after: up to where the last part went; None to begin.
    :return: the keys of what was wrong, and up to where this part went; None at the end.
    """
    spec = plan.spec
    if spec.strategy.reconcile_range(spec, KeyRange()) is None:
        return reconcile_messages(session, plan), None
    # Whatever the planner expects of the tables: for a part of the keys both are looked into, and not read.
    off = [sa.func.set_config(f"enable_{way}", "off", sa.true()) for way in ("seqscan", "hashjoin", "mergejoin")]
    session.execute(sa.select(*off), bind_arguments=plan.bind)
    ahead = sa.select(*spec.keys).where(KeyRange(after).holds(spec.keys), backend().claims.planned_anew())
    last = ahead.order_by(*spec.keys).offset(PART - 1).limit(1)
    upto = session.execute(last, bind_arguments=plan.bind).one_or_none()
    part = KeyRange(after, None if upto is None else tuple(upto))
    verb: Any = spec.strategy.reconcile_range(spec, part)
    mended = session.execute(returning_keys(spec, verb), execution_options=QUIET, bind_arguments=plan.bind)
    keys = keys_from(mended.scalars(), len(spec.keys))
    if upto is None:
        _forget_old(session, plan)
    session.commit()
    return keys, part.upto


def _forget_old(session: Session, plan: Plan) -> None:
    if CRASH_JOURNAL in plan.spec.side_tables:
        crash_journal.forget(session, plan.spec)
    control = plan.spec.side_tables.get(CONTROL)
    if control is not None:
        old = control.c.created_at < clock() - _FORGET
        mine = sa.and_(control.c.queue == plan.spec.name, control.c.key != backend().side_tables.PAUSE)
        session.execute(sa.delete(control).where(mine, old), bind_arguments=plan.bind)
    consumers = plan.spec.side_tables.get(CONSUMERS)
    if consumers is not None:
        dead = consumers.c.expires_at < clock() - _FORGET
        session.execute(sa.delete(consumers).where(consumers.c.queue == plan.spec.name, dead), bind_arguments=plan.bind)


@dataclass(frozen=True)
class SignOfLife:
    """What a Consumer says of itself when it checks in."""

    me: str
    """Its name in the table of Consumers."""
    hears: bool
    running: Sequence[Run]
    """Those whose handler is at work."""
    claimed: int
    """How many jobs it has claimed besides, which have not begun."""
    patience: float
    """The seconds after which it counts as dead, should it not check in again."""
    aloud: bool
    """Whether to call it out on the queue's channel as well."""


def check_in(session: Session, plan: Plan, sign: SignOfLife) -> tuple[list[str], float]:
    """Say that a Consumer is alive and find out who else is; aloud for the others that hear, and to hear oneself.

    :return: the Consumers that hear calls, and the time of the database in seconds since the epoch.
    """
    spec, table = plan.spec, plan.spec.side_tables[CONSUMERS]
    host, _, pid = worker_name().rpartition(":")
    running = [[str(part) for part in run.key] for run in sign.running[:_MOST_SHOWN]]
    seen = {
        "listening": sign.hears,
        "running": backend().side_tables.as_json(sa.literal(json.dumps(running), sa.Text())),
        "claimed": sign.claimed,
        "heartbeat_at": clock(),
        "expires_at": clock() + sa.literal(timedelta(seconds=sign.patience), sa.Interval()),
    }
    row = {"id": sign.me, "queue": spec.name, "name": plan.worker(), "host": host, "pid": int(pid)}
    upsert = backend().insert_or_replace(table, {**row, "version": __version__, **seen}, replaced=list(seen))
    if plan.is_told and sign.aloud:
        upsert = upsert.returning(backend().notification(spec, Heartbeat(sign.me)))
    alive = sa.and_(table.c.queue == spec.name, table.c.listening, table.c.expires_at > clock())
    others = sa.func.coalesce(
        sa.func.array_agg(table.c.id), sa.cast([], sa.ARRAY(sa.Text())), type_=sa.ARRAY(sa.Text())
    )
    now = sa.extract("epoch", sa.func.clock_timestamp())
    asked = sa.select(others, now).select_from(table).where(alive).add_cte(upsert.cte("checked_in"))
    names, time = session.execute(asked, bind_arguments=plan.bind).one()
    session.commit()
    return list(names), float(time)


def check_out(session: Session, plan: Plan, me: str) -> None:
    """Say that a Consumer ends."""
    table = plan.spec.side_tables[CONSUMERS]
    gone = sa.delete(table).where(table.c.id == me)
    told = gone.returning(backend().notification(plan.spec, Deregistered(me))) if plan.is_told else gone
    session.execute(told, bind_arguments=plan.bind)
    session.commit()


def times_ahead(session: Session, plan: Plan, limit: int) -> list[float]:
    """Return when the next jobs will be due that are not yet, in seconds since the epoch, up to ``limit``."""
    if not plan.spec.has("run_at"):
        return []
    times = session.execute(plan.spec.strategy.upcoming(plan.spec, limit), bind_arguments=plan.bind).scalars().all()
    session.rollback()
    return [float(time) for time in times]


def requests_to_stop(session: Session, plan: Plan, runs: Sequence[Run]) -> list[tuple[Key, float]]:
    """Return which of ``runs`` somebody asked to stop, with the age of the request in seconds, and take it down."""
    control, spec = plan.spec.side_tables.get(CONTROL), plan.spec
    if control is None or not runs:
        return []
    mine = sa.select(*spec.keys).where(spec.key_in(spec.keys, [run.key for run in runs])).subquery("mine")
    key = backend().side_tables.key_json([mine.c[column.key] for column in spec.keys])
    # A request that its author has not committed yet must not hold up the leases that the same thread extends.
    asked = (
        sa.select(control.c.queue.label("asked_queue"), control.c.key.label("asked_key"), *mine.c)
        .where(control.c.queue == spec.name, control.c.key == key)
        .with_for_update(of=control, skip_locked=True)
        .cte("asked")
    )
    age = sa.extract("epoch", sa.func.clock_timestamp() - control.c.created_at)
    taken = (
        sa.delete(control)
        .where(control.c.queue == asked.c.asked_queue, control.c.key == asked.c.asked_key)
        .returning(*(asked.c[column.key] for column in spec.keys), age)
    )
    found = [(tuple(row[:-1]), float(row[-1])) for row in session.execute(taken, bind_arguments=plan.bind)]
    session.commit()
    return found
