"""Maintenance of leases: extend those of live runs, send heartbeats, and rescue jobs whose worker died."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue._version import __version__
from sqlaqueue.consumer.claim import TRY_AGAIN_AFTER, UnclaimableJob
from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.effects import Effect, ExecuteInOwnSession, Routine
from sqlaqueue.consumer.core.errors import (
    ascii_text,
    error_line,
    is_duplicate,
    is_lock_or_timeout,
    is_transient,
    may_be_of_a_row,
)
from sqlaqueue.consumer.leased import RescuedJob, report_rescued, report_unclaimable
from sqlaqueue.consumer.maintenance.state import Maintenance
from sqlaqueue.consumer.notifications.polls import notify_released, notify_settled
from sqlaqueue.consumer.pace import FailingClaims
from sqlaqueue.consumer.settle import LOCK_TIMEOUT_ONE_BY_ONE, execute_for_keys, extend_claims
from sqlaqueue.consumer.statements import LOCK_TIMEOUT
from sqlaqueue.exc import DatabaseNotReadyError
from sqlaqueue.log import logger
from sqlaqueue.notify_payloads import Deregistered, Heartbeat, Signal
from sqlaqueue.postgresql.checks_of import refuse_newer
from sqlaqueue.postgresql.side_tables import REQUESTS, as_json, is_requested, withdraw_request
from sqlaqueue.postgresql.triggers import notification
from sqlaqueue.queue.names import ATTEMPT, CONSUMERS
from sqlaqueue.queue.run import Key, Run, keys_by_token
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.engine import engine_of, violated_table
from sqlaqueue.sql.portable import Span, clock, collected, converted, epoch, later, set_setting, ticking_clock
from sqlaqueue.sql.types import insert_or_replace
from sqlaqueue.statements.claim import worker_name
from sqlaqueue.strategies import Verb
from sqlaqueue.strategies.columns import by_index, index_for
from sqlaqueue.strategies.listing import has_history, without_history
from sqlaqueue.strategies.unique_key import unique_key

_LONGEST_TIMEOUT = 2**31 - 1


def extend(maintenance: Maintenance, now: float) -> Routine:
    context, timers, after = maintenance.context, maintenance.timers, maintenance.context.extend_after
    if not context.settings.has_leases:
        return
    since = context.busy_since
    if since is None:
        # A timer that stays due would wake an idle loop without end.
        timers.cancel("leases")
        timers.cancel("locked")
        maintenance.locked = ()
        return
    timers.start("leases", since + after)
    if timers.is_due("leases", now):
        timers.set("leases", now + min(after, 1.0))
        runs = context.live_runs()
        if runs:
            yield from _extend_runs(maintenance, runs)
        timers.set("leases", now + after)
    elif maintenance.locked and timers.is_due("locked", now):
        # They have to come before the second look of a rescue, so they cannot wait until all are extended again.
        mine = {id(run) for run in maintenance.locked}
        yield from _extend_runs(maintenance, [run for run in context.live_runs() if id(run) in mine])


def _extend_runs(maintenance: Maintenance, runs: Sequence[Run]) -> Routine:
    maintenance.timers.set("locked", time.monotonic() + maintenance.second_look / 4)
    maintenance.locked = runs
    if runs:
        extended = set((yield ExecuteInOwnSession(extend_leases, (maintenance.context, runs))))
        maintenance.locked = [run for run in runs if run.key not in extended]
    if not maintenance.locked:
        maintenance.timers.cancel("locked")


def extend_leases(session: Session, context: ConsumerContext, runs: Sequence[Run]) -> list[Key]:
    """Move the end of the leases of live runs, and return their keys; locked rows are passed over."""
    settings = context.settings
    claims = list(keys_by_token(runs).items())
    if settings.distribution is None:
        return _extend(session, context, claims)
    extended, failed = list[Key](), None
    for claim in claims:
        # All jobs of one claim are on one shard, and a statement locks rows on one shard only. If the server of one
        # does not answer, the leases on the others are extended all the same.
        try:
            extended += _extend(session, context, [claim])
        except DBAPIError as error:
            session.rollback()
            failed = error
    if failed is not None:
        raise failed
    return extended


def _extend(session: Session, context: ConsumerContext, claims: Sequence[tuple[Any, Sequence[Key]]]) -> list[Key]:
    limit_transaction(session, context)
    extended = extend_claims(session, context.settings, claims)
    session.commit()
    return extended


def limit_transaction(session: Session, context: ConsumerContext, *others: sa.ColumnElement[Any]) -> None:
    """Have the server end this transaction if it does not come to its commit within a lease.

    A process that is frozen just before the commit would keep the rows locked, and no consumer could rescue them.

    :param others: expressions that are executed by the same statement.
    """
    limit = min(int(context.settings.lease.total_seconds() * 1000), _LONGEST_TIMEOUT)
    setting = set_setting("idle_in_transaction_session_timeout", str(limit))
    session.execute(sa.select(setting, *others), bind_arguments=context.settings.bind_arguments)


# -- missed notifications ----------------------------------------------------------------------------------------------
# Notifications may not arrive: this is noticed, and the times of jobs that none has announced are queried. A claim
# may miss a row without an error, since a trigger of the application leaves it as it is: the row is found and left
# out, since it would take the place of another one in each claim.


_LOGGED_AFTER = 2
"""How many heartbeats in a row have to be missed before it is logged: the first may be a connection that just broke."""

_LOOKED_AT = 100
"""How many due jobs a look for unchanged rows claims at most."""

_UPCOMING = 50


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
            "queue %s: notifications do not arrive, as behind a pooler in transaction mode, so new jobs are found by "
            "polling; give the Consumer an engine that is connected to the server itself, or set "
            "QueueConfig(notify=False)",
            context.spec.name,
            extra=context.log_fields("notifications_missed"),
        )


def find_upcoming(maintenance: Maintenance, now: float) -> Routine:  # noqa: ARG001 - as all tasks
    """Query when jobs will be due that no notification has announced, such as those from before the start."""
    context, polls = maintenance.context, maintenance.context.polls
    if polls.wants_upcoming():
        version = polls.version
        times = yield ExecuteInOwnSession(upcoming_times, (context, _UPCOMING))
        polls.add_upcoming(times, complete=len(times) < _UPCOMING, version=version)


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
    """Claim due jobs and roll back, to find those that stay as they are; return how many are new or can be claimed."""
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
    def __str__(self) -> str:
        return "the database leaves its row as it is, without an error: a trigger returns NULL, or a policy hides it"


def upcoming_times(session: Session, context: ConsumerContext, limit: int) -> list[float]:
    """Return when the next jobs will be due that are not yet, in seconds since the epoch, up to ``limit``."""
    spec = context.spec
    if not spec.has("run_at"):
        return []
    bind = context.settings.bind_arguments
    by_priority = engine_of(session.connection(bind_arguments=bind).dialect) is None
    statement = spec.strategy.upcoming(spec, limit, by_priority=by_priority)
    times = session.execute(statement, bind_arguments=bind).scalars().all()
    session.rollback()
    return [float(time) for time in times]


# -- heartbeat ---------------------------------------------------------------------------------------------------------


_MOST_SHOWN = 100
_LONGEST_ERROR = 300


def heartbeat(maintenance: Maintenance, now: float) -> Routine:
    """Register this consumer, and prove by receiving its own heartbeat that notifications arrive."""
    context, timers = maintenance.context, maintenance.timers
    peers = context.polls.peers
    if not context.has_claimed or CONSUMERS not in context.spec.side_tables:
        return
    if isinstance(context.error, DatabaseNotReadyError):
        # Its handlers have the grace period. Another look would be refused as well.
        return
    check_received(maintenance)
    # While it is quiet, the others share its jobs among them.
    listening = peers.listening and not context.quiet
    unclaimable, news = context.claimer.unclaimable, listening != maintenance.sent_listening
    failing = context.failing_claims()
    changes = unclaimable.changes, failing is None, context.quiet
    wanted = peers.wants_heartbeat or peers.until_look() <= 0 or news or changes != maintenance.sent_changes
    if not (timers.is_due("heartbeat", now) or wanted):
        return
    pause = context.intervals.heartbeat(peers.count)
    timers.set("heartbeat", now + pause)
    notify = peers.begin_heartbeat(news=news)
    maintenance.sent_listening, context.registered = listening, True
    running, claimed = context.in_flight.running(), context.claimed_runs()
    waiting = max(0, len(claimed) - len(running))
    jobs = unclaimable.jobs()
    beat = SentHeartbeat(listening, running, waiting, jobs, failing, expires_in=3 * pause, notify=notify)
    # Even if it fails: another try each moment would not help during an outage.
    maintenance.sent_changes = changes
    try:
        others, moment = yield ExecuteInOwnSession(send_heartbeat, (context, beat))
    except DatabaseNotReadyError as error:
        # As at a signal: what has not begun is released, and the handlers have the grace period.
        if not context.stopping:
            context.fail(error)
        return
    context.clock_ahead = ahead = moment - time.monotonic()
    context.polls.heartbeat_sent(others, ahead)


class SentHeartbeat(NamedTuple):
    """What a consumer writes about itself."""

    listening: bool
    running: Sequence[Run]
    waiting: int
    """How many jobs it has claimed besides, which have not begun."""
    unclaimable: Sequence[UnclaimableJob]
    """The jobs that it cannot claim, rescue or settle."""
    failing: FailingClaims | None
    """How all of its claims fail; None if they work."""
    expires_in: float
    """The seconds after which it counts as dead without another heartbeat."""
    notify: bool


def send_heartbeat(session: Session, context: ConsumerContext, beat: SentHeartbeat) -> tuple[list[str], float]:
    """Write the heartbeat; return the ids of the listening consumers, and the database's time since the epoch.

    :raises DatabaseNotReadyError: if a migration has made side tables unusable for this version of sqlaqueue.
    """
    spec, settings = context.spec, context.settings
    table = spec.side_tables[CONSUMERS]
    refuse_newer(
        session.connection(bind_arguments=settings.bind_arguments), spec.side_tables.values(), spec.model.__name__
    )
    host, _, pid = worker_name().rpartition(":")
    running = [[str(part) for part in run.key] for run in beat.running[:_MOST_SHOWN]]
    unclaimable: list[dict[str, Any]] = [
        {"key": [str(part) for part in job.key], "error": ascii_text(job.error)[:_LONGEST_ERROR]}
        for job in beat.unclaimable[:_MOST_SHOWN]
    ]
    if beat.failing is not None:
        failures, lasted, error = beat.failing
        # An entry without a key: a program of an older version passes over it.
        of_all = {"failures": failures, "seconds": round(lasted, 1), "error": ascii_text(error)[:_LONGEST_ERROR]}
        unclaimable.insert(0, of_all)
    about = context.about()
    if any(about.values()):
        unclaimable.append(about)
    seen = {
        "listening": beat.listening,
        "running": as_json(sa.literal(json.dumps(running), sa.Text())),
        "claimed": beat.waiting,
        "unclaimable": as_json(sa.literal(json.dumps(unclaimable), sa.Text())),
        "heartbeat_at": clock(),
        "expires_at": later(clock(), sa.literal(timedelta(seconds=beat.expires_in), Span())),
    }
    own = {
        "id": context.id,
        "queue": spec.name,
        "name": settings.worker(),
        "host": host,
        "pid": int(pid),
        "version": __version__,
    }
    upsert: sa.Insert = insert_or_replace(table, {**own, **seen}, replaced=list(seen))
    if settings.notifies and beat.notify:
        upsert = upsert.returning(notification(spec, Heartbeat(context.id)))
    alive = sa.and_(table.c.queue == spec.name, table.c.listening, table.c.expires_at > clock())
    others = sa.func.coalesce(collected(table.c.id), converted([], sa.ARRAY(sa.Text())), type_=sa.ARRAY(sa.Text()))
    now = epoch(ticking_clock())
    asked = sa.select(others, now).select_from(table).where(alive)
    # Citus does not read a reference table and a local one by one statement that writes as well.
    apart = settings.distribution is not None
    requests = [is_requested(spec, each, sa.literal(context.id, sa.Text())) for each in REQUESTS]
    asked = asked if apart else asked.add_columns(*requests)
    if engine_of(session.connection(bind_arguments=settings.bind_arguments).dialect) is None:
        asked = asked.add_cte(upsert.cte("sqlaqueue_heartbeat"))
    else:
        session.execute(upsert, bind_arguments=settings.bind_arguments)
    names, moment, *asked_of_it = session.execute(asked, bind_arguments=settings.bind_arguments).one()
    session.commit()
    if apart:
        asked_of_it = [*session.execute(sa.select(*requests), bind_arguments=settings.bind_arguments).one()]
        session.commit()
    quiet, stop = asked_of_it
    context.obey(quiet=bool(quiet), stop=bool(stop))
    return list(names), float(moment)


def deregister(session: Session, context: ConsumerContext) -> None:
    table = context.spec.side_tables[CONSUMERS]
    gone: Any = sa.delete(table).where(table.c.id == context.id)
    if context.settings.notifies:
        gone = gone.returning(notification(context.spec, Deregistered(context.id)))
    session.execute(gone, bind_arguments=context.settings.bind_arguments)
    for request in REQUESTS if context.was_asked else ():
        withdrawn = withdraw_request(context.spec, request, context.id)
        session.execute(withdrawn, bind_arguments=context.settings.bind_arguments)
    session.commit()


# -- rescue ------------------------------------------------------------------------------------------------------------


_MOST_IN_PARTS, _LONGEST = 500, 1.0
"""How many jobs are rescued in parts, and for how many seconds; the rest is left to the next time."""

_MOST = 5_000


def rescue_expired(maintenance: Maintenance, now: float) -> Routine:
    """Rescue the jobs of workers that died, when it is this consumer's turn.

    It looks twice. A lock on a row keeps its lease from being extended and the job from being rescued alike; when it
    ends, the worker that is alive has to come first.
    """
    context, timers = maintenance.context, maintenance.timers
    rescues, peers = context.polls.rescues, context.polls.peers
    if maintenance.expired and timers.is_due("rescue", now):
        timers.cancel("rescue")
        keys, maintenance.expired = maintenance.expired, ()
        rescued = yield ExecuteInOwnSession(rescue_jobs, (context, keys), slow=True)
        report_rescued(context, rescued)
        if rescued:
            context.quarantine.may_wait = True
    if not rescues.is_due:
        return
    rescues.begin(peers.rank)
    if not peers.listening:
        context.quarantine.may_wait = True
    if not maintenance.expired:
        maintenance.expired = yield ExecuteInOwnSession(look_for_expired, (context,), slow=True)
        if maintenance.expired:
            timers.set("rescue", time.monotonic() + maintenance.second_look)


def look_for_expired(session: Session, context: ConsumerContext) -> list[Key]:
    """Return the keys of jobs whose lease has expired, and whose rows no transaction has locked."""
    spec, settings = context.spec, context.settings
    others = [notification(spec, Signal.RESCUED)] if settings.notifies else []
    limit_transaction(session, context, *others)
    found = list[Key]()
    for shard in _specs(context):
        looked = by_index(expired_keys(shard, _MOST // len(spec.keys)), spec.table, index_for(spec, "lease"))
        looked = looked.with_for_update(of=spec.table, skip_locked=True, key_share=True)
        try:
            found += [tuple(row) for row in session.execute(looked, bind_arguments=settings.bind_arguments)]
            # A statement locks rows of one shard only.
            session.commit()
        except DBAPIError:
            session.rollback()
            if not shard.shard:
                raise
    return found


def _specs(context: ConsumerContext) -> list[QueueSpec]:
    """Return the queue, or what of it is on each shard."""
    spec, distribution = context.spec, context.settings.distribution
    if distribution is None:
        return [spec]
    return [spec.for_shard(distribution.attribute, value) for value in distribution.current_values()]


def rescue_jobs(session: Session, context: ConsumerContext, keys: Sequence[Key] | None = None) -> list[RescuedJob]:
    """Rescue jobs whose lease has expired, of any worker, and notify the others.

    If the attempt history cannot be written, they are rescued without it. None for ``keys`` means all.
    """
    spec = context.spec
    if context.settings.distribution is not None:
        return _rescue_shards(session, context, keys)
    try:
        return _rescue_jobs(session, context, spec, keys)
    except DBAPIError as error:
        session.rollback()
        if is_transient(error) or not has_history(spec):
            raise
        failed = error
    rescued = _rescue_jobs(session, context, without_history(spec), keys)
    if rescued:
        # Otherwise the history has lost nothing, and the error may have had another cause.
        context.settler.history.warn(failed)
    return rescued


def _rescue_shards(session: Session, context: ConsumerContext, keys: Sequence[Key] | None) -> list[RescuedJob]:
    """Rescue jobs of one shard after the other; a shard whose server does not answer is left to the next time."""
    rescued, failed = list[RescuedJob](), None
    for shard in _specs(context):
        try:
            rescued += _rescue(session, context, _verb(shard, keys))
        except DBAPIError as error:
            session.rollback()
            failed = error
    if failed is not None and not rescued:
        raise failed
    return rescued


def _verb(spec: QueueSpec, keys: Sequence[Key] | None) -> Verb:
    return spec.strategy.rescue(spec) if keys is None else spec.strategy.rescue_some(spec, keys)


def _rescue_jobs(
    session: Session, context: ConsumerContext, spec: QueueSpec, keys: Sequence[Key] | None
) -> list[RescuedJob]:
    """Rescue jobs; in parts if the database refuses one of them, or a duplicate of one is being enqueued."""
    unique = unique_key(spec)
    may_meet_duplicates = unique is not None and unique.returns_from_runs
    # The thread that rescues also extends leases, so it must not wait while the table of the history is locked.
    limit = LOCK_TIMEOUT if has_history(spec) or may_meet_duplicates else None
    try:
        return _rescue(session, context, _verb(spec, keys), lock_timeout=limit)
    except DBAPIError as error:
        session.rollback()
        of_history = has_history(spec) and violated_table(error) == spec.side_tables[ATTEMPT].name
        is_refused = may_be_of_a_row(error) and not of_history
        if not (is_refused or (may_meet_duplicates and _meets_duplicate(error, spec))):
            raise
    if keys is None:
        rows = session.execute(expired_keys(spec), bind_arguments=context.settings.bind_arguments).all()
        keys = [tuple(row) for row in rows]
        session.rollback()
    # The thread that rescues also extends the leases of live runs.
    until = time.monotonic() + min(_LONGEST, context.settings.lease.total_seconds() / 8)
    return _rescue_parts(session, context, spec, keys[:_MOST_IN_PARTS], until)


def _rescue_parts(
    session: Session, context: ConsumerContext, spec: QueueSpec, keys: Sequence[Key], until: float
) -> list[RescuedJob]:
    """Rescue some jobs; by halves if that fails, down to the ones that cannot be rescued."""
    if not keys or context.workers_ended or time.monotonic() > until:
        return []
    try:
        return _rescue(session, context, spec.strategy.rescue_some(spec, keys), lock_timeout=LOCK_TIMEOUT_ONE_BY_ONE)
    except DBAPIError as error:
        session.rollback()
        meets_duplicate = _meets_duplicate(error, spec)
        if not (meets_duplicate or may_be_of_a_row(error)):
            raise
        if len(keys) == 1:
            if has_history(spec) and not meets_duplicate:
                # It may be the history that is refused.
                return _rescue_parts(session, context, without_history(spec), keys, until)
            if not meets_duplicate:
                found = context.claimer.unclaimable.add(keys[0], error_line(error))
                report_unclaimable(context, found, error, "rescued")
            return []
    half = len(keys) // 2
    first = _rescue_parts(session, context, spec, keys[:half], until)
    return first + _rescue_parts(session, context, spec, keys[half:], until)


def _meets_duplicate(error: DBAPIError, spec: QueueSpec) -> bool:
    return is_lock_or_timeout(error) or is_duplicate(error, spec)


def expired_keys(spec: QueueSpec, most: int = _MOST_IN_PARTS) -> AnySelect:
    """Return a SELECT of the keys of jobs whose lease has expired."""
    expires = spec.column("lease_expires_at", "rescue()")
    expired = sa.select(*spec.keys).where(spec.in_state("processing"), expires <= clock())
    # In any order, so that the same ones are not tried each time.
    return expired.where(*spec.on_shard(spec.table)).order_by(sa.func.random()).limit(most)


def _rescue(
    session: Session, context: ConsumerContext, verb: Verb, *, lock_timeout: str | None = None
) -> list[RescuedJob]:
    settings, spec = context.settings, context.spec
    others: list[sa.ColumnElement[Any]] = [notification(spec, Signal.RESCUED)] if settings.notifies else []
    if lock_timeout is not None:
        others.append(set_setting("lock_timeout", lock_timeout))
    limit_transaction(session, context, *others)
    rescued = execute_for_keys(session, settings, verb)
    # Some of them may have failed by that.
    notify_settled(session, spec, context.waiters, rescued)
    jobs = rescued_jobs(session, spec, rescued)
    session.commit()
    return jobs


def rescued_jobs(session: Session, spec: QueueSpec, keys: Sequence[Key]) -> list[RescuedJob]:
    """Return jobs that were rescued in this transaction, with whether each has failed by that."""
    failed: dict[Key, Any] = {}
    if keys:
        roles = [spec.columns.get(role, sa.null()) for role in ("attempts", "max_attempts")]
        mine = sa.select(*roles, *spec.keys).where(spec.key_in(spec.keys, keys), spec.in_state("failed"))
        found: Any = session.execute(mine, bind_arguments={"mapper": spec.mapper})
        for attempts, limit, *key in found:
            failed[tuple(key)] = (attempts or 0, limit or spec.config.max_attempts)
    return [RescuedJob(key, *failed.get(key, ())) for key in keys]
