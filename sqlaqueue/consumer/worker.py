"""The loops of a Consumer: that of each worker, which claims and runs jobs, and that of its maintenance."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, NotSupportedError
from sqlalchemy.orm import Session

from sqlaqueue.consumer import held, leased
from sqlaqueue.consumer.claim import ClaimFailed
from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.effects import Effect, Execute, ExecuteInOwnSession, Routine, Wait, WithSession
from sqlaqueue.consumer.core.errors import (
    error_line,
    is_connection_lost,
    is_database_error,
    is_lock_or_timeout,
    is_out_of_range,
    is_program_error,
    may_be_of_a_row,
    may_recover,
)
from sqlaqueue.consumer.core.events import JobEvent
from sqlaqueue.consumer.executor import Executor
from sqlaqueue.consumer.held import discard_entries, run_held_batch
from sqlaqueue.consumer.in_flight import LeftBehind
from sqlaqueue.consumer.leased import (
    Report,
    WorkerTurn,
    apply,
    claim_leased_batch,
    report_unclaimable,
    run_leased,
    settle_finished,
)
from sqlaqueue.consumer.maintenance import cleanup, handlers_running, leases, minutes
from sqlaqueue.consumer.maintenance.cleanup import reconcile_all
from sqlaqueue.consumer.maintenance.state import Maintenance
from sqlaqueue.consumer.notifications.polls import notify_settled
from sqlaqueue.consumer.sessions import check_transactions, driver_connection, shared_connection_error
from sqlaqueue.exc import ConfigurationError, DatabaseNotReadyError
from sqlaqueue.log import database_text, logger
from sqlaqueue.postgresql.checks_of import checks_of, checks_of_error, refuse_newer, refuse_older
from sqlaqueue.queue.names import WAITS
from sqlaqueue.queue.run import Key
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.engine import engine_of
from sqlaqueue.sql.portable import clock

_PAUSE, _LONGEST_PAUSE, _PAUSE_DRAINING = 0.5, 5.0, 0.1
"""Seconds after which a waiting worker looks again without being woken: while there is work, without any, and if it may
be the last."""

MOST_FAILURES = 8
"""How many tries in a row may fail before a run that drains its queue ends, if none has succeeded: about ten seconds.
A run without end waits for its database; the end of this one is waited for."""


def work(context: ConsumerContext) -> Routine:
    if context.settings.holds_transaction:
        yield from _take_turns(context, _held_turn)
        return
    while not context.stopping:
        try:
            yield WithSession(_take_turns(context, _leased_turn))
        except Exception as error:  # noqa: BLE001 - whatever the error, the worker goes on
            yield from _try_again_later(context, error)


def _take_turns(context: ConsumerContext, take_turn: Callable[[ConsumerContext, WorkerTurn], Routine]) -> Routine:
    """Take one turn after the other, until a turn has used the routine's session."""
    clean = True
    while clean and not context.stopping:
        turn = WorkerTurn(context)
        try:
            busy = yield from take_turn(context, turn)
            clean = turn.clean
        except Exception as error:  # noqa: BLE001 - whatever the error, the worker goes on
            turn.end()
            yield from _try_again_later(context, error)
            continue
        if busy:
            turn.end()
        elif context.draining:
            turn.end()
            is_over = turn.takes_the_last() and not (yield from _has_missed_jobs(context))
            turn.end()
            # Read after turn.end(): the change that end() reports must not wake this worker at once.
            seen = context.version
            if is_over:
                # Unless it has been stopped before.
                context.drained |= not context.stopping
                context.stop()
            else:
                yield Wait("change", _PAUSE_DRAINING, seen)
        elif context.quiet:
            # Not in polls.waiting(): nobody must count on this consumer for the next jobs.
            turn.end()
            yield Wait("change", _LONGEST_PAUSE, context.version)
        else:
            # The turn to claim is kept meanwhile: one poll of an empty queue is enough for all workers.
            with context.polls.waiting():
                yield Wait("poll", max(0.0, context.polls.next_poll() - time.monotonic()))
            turn.end()


def _try_again_later(context: ConsumerContext, error: Exception) -> Routine:
    """Wait before the next try, or end when the error is the program's."""
    is_vain = context.draining and context.intervals.failures >= MOST_FAILURES
    if not context.has_claimed and (is_vain or is_program_error(error)):
        context.fail(error)
    if context.error is not None:
        return
    # The jobs that this poll should have claimed are still pending.
    context.polls.poll_at_once()
    context.polls.let_neighbours_poll()
    wait = context.intervals.failed()
    advice = checks_of_error(error).undefined_object_advice(error, context.spec, worked=context.has_claimed)
    text = advice or f"{type(error).__name__}: {error}"
    context.claim_failed(text, wait, type(error).__name__, summary=advice or error_line(error))
    context.report_start()
    yield Wait("stop", wait)


def _wait_for_change(context: ConsumerContext, turn: WorkerTurn) -> Wait:
    return Wait("change", _LONGEST_PAUSE if context.is_idle else _PAUSE, turn.version)


def _held_turn(context: ConsumerContext, turn: WorkerTurn) -> Routine:
    if not turn.may_claim():
        yield _wait_for_change(context, turn)
        return True
    if not context.wants_poll():
        return False
    yield from check(context)
    yield from _settle_left_behind(context, held.settle_left_behind)
    yield from discard_entries(context)
    quarantined, unclaimable = context.quarantine.take(), context.claimer.unclaimable
    suspects = unclaimable.take() if unclaimable and quarantined is None else None
    try:
        done: Report = yield WithSession(run_held_batch(context, turn, quarantined, suspects))
    except ClaimFailed as failed:
        return (yield from search_unclaimable(context, failed))
    finally:
        unclaimable.end(suspects)
        if quarantined is not None:
            context.quarantine.end([quarantined.key])
    context.claim_succeeded()
    apply(context, done)
    if context.quarantine.waiting():
        context.polls.poll_at_once()
    return bool(done.claimed)


def _settle_left_behind(context: ConsumerContext, settle: Callable[[ConsumerContext, LeftBehind], Routine]) -> Routine:
    """Settle the runs of a process that has died; if the database does not answer, they are tried again."""
    deaths = context.deaths
    while deaths.left_behind:
        yield from settle(context, deaths.left_behind[0])
        deaths.left_behind = deaths.left_behind[1:]


def _leased_turn(context: ConsumerContext, turn: WorkerTurn) -> Routine:
    if context.runs_low and context.wants_poll() and turn.may_claim():
        return bool((yield from _claim(context, turn))) or bool(context.buffer)
    executor = turn.take_jobs()
    if executor is not None:
        turn.clean = yield from _run(context, executor)
    elif turn.may_claim():
        if context.wants_poll():
            return bool((yield from _claim(context, turn))) or bool(context.buffer)
        if not context.wants_settling(time.monotonic()):
            return False
    elif not context.wants_settling(time.monotonic()):
        yield _wait_for_change(context, turn)
    if context.wants_settling(time.monotonic()):
        if context.settles_with_poll:
            context.polls.poll_at_once()
            yield _wait_for_change(context, turn)
        else:
            yield from settle_finished(context)
    return True


def _claim(context: ConsumerContext, turn: WorkerTurn) -> Routine:
    """Claim, and settle with the same commit the runs that have ended."""
    yield from check(context)
    yield from _settle_left_behind(context, leased.settle_left_behind)
    if context.polls.quarantined:
        context.quarantine.may_wait, context.polls.quarantined = True, False
    unclaimable = context.claimer.unclaimable
    if unclaimable.settles_apart:
        yield from settle_finished(context)
    finished = [] if unclaimable.settles_apart else context.completions.take()
    alone = turn.claims_alone and not context.quarantine.is_running
    suspects = unclaimable.take(quarantined=alone) if unclaimable else None
    try:
        return (yield WithSession(claim_leased_batch(context, turn, finished, suspects)))
    except Exception as error:
        if context.completions.put_back(finished):
            # It is unknown which of the two failed, and they must not block each other.
            is_locked = is_lock_or_timeout(error)
            yield from settle_finished(context, apart=is_locked)
            if is_locked or context.settler.has_met_duplicate(error):
                return True
        if isinstance(error, ClaimFailed):
            return (yield from search_unclaimable(context, error))
        raise
    finally:
        unclaimable.end(suspects)


def _run(context: ConsumerContext, executor: Executor) -> Generator[Effect, object, bool]:
    """Run one job after the other, or one batch, until the runs end; return whether the session can be used again."""
    try:
        return bool((yield from run_leased(context, executor)))
    except Exception as error:  # noqa: BLE001 - such as a database that does not answer
        context.log_error("run_error", "queue %s: %s: %s", error)
        return False


def _has_missed_jobs(context: ConsumerContext) -> Generator[Effect, object, bool]:
    """Return whether a drain has found jobs that its claims have missed, so that another one may find more."""
    try:
        return bool((yield from reconcile_all(context)))
    except Exception as error:  # noqa: BLE001 - the queue has been drained all the same
        context.log_error("maintenance_error", "queue %s: maintenance: %s: %s", error)
        return False


_SLOW = 0.5
"""Seconds between two claims of suspects if very many jobs were unclaimable in a row."""


# -- unclaimable jobs --------------------------------------------------------------------------------------------------
# A claim fails as a whole if one row cannot be loaded, or if the database refuses to change one. Which jobs are
# suspects, and which of them are claimed next, is decided by :class:`~sqlaqueue.consumer.claim.Unclaimable`.


def search_unclaimable(context: ConsumerContext, failed: ClaimFailed) -> Routine:
    """Take the next step of the search after a claim has failed; raise its error if no job is the cause."""
    error, unclaimable = failed.__cause__ or failed, context.claimer.unclaimable
    if is_lock_or_timeout(error) or is_connection_lost(error):
        context.sizer.record_failed_claim(failed.limit)
    # On a distributed table a claim goes from shard to shard, and leaves out one that fails.
    if not may_be_of_a_row(error) or context.settings.distribution is not None:
        raise error
    unclaimable.settles_apart = True
    if failed.suspects is None:
        try:
            look = partial(context.claimer.candidates, quarantined=failed.quarantined)
            keys = yield ExecuteInOwnSession(look, (failed.limit,))
        except Exception:  # noqa: BLE001 - then the error is none of a row, and it says more than this one
            raise error from None
        if not (unclaimable.suspect(keys, quarantined=failed.quarantined) or unclaimable.is_searching):
            raise error
    else:
        found = unclaimable.failed(failed.suspects, error_line(error))
        if found is not None and not (is_out_of_range(error) and (yield from _fail(context, found.key, error))):
            report_unclaimable(context, found, error, "claimed")
    context.report_start()
    context.polls.poll_at_once()
    if unclaimable.slows_down:
        yield Wait("stop", _SLOW)
    return True


def _fail(context: ConsumerContext, key: Key, error: BaseException) -> Routine:
    """Fail a job whose count of attempts cannot become larger; return whether there was such a job."""
    try:
        failed = yield ExecuteInOwnSession(_fail_pending, (context, key, error_line(error)))
    except DBAPIError:
        return False
    if failed:
        context.claimer.unclaimable.remove(key)
        context.events.emit(JobEvent("failed", context.spec.name, key, error=error))
    return failed


def _fail_pending(session: Session, context: ConsumerContext, key: Key, error: str) -> bool:
    spec, bind = context.spec, context.settings.bind_arguments
    most = spec.most_attempts
    if most is None or not spec.has("status"):
        return False
    text = spec.truncated_error(sa.literal(error, sa.Text()))
    values: dict[str, Any] = {
        "status": spec.status_value("failed"),
        "finished_at": clock(),
        "last_error": text,
        "lease_token": None,
    }
    failed = (
        sa.update(spec.table)
        .where(spec.key_in(spec.keys, [key]), spec.in_state("pending"), spec.columns["attempts"] >= most)
        .values({spec.columns[role]: value for role, value in values.items() if spec.has(role)})
    )
    changed = session.execute(failed.returning(*spec.keys), bind_arguments=bind).first()
    if changed is not None:
        notify_settled(session, spec, context.waiters, [key])
    session.commit()
    return changed is not None


# -- checks of the start -----------------------------------------------------------------------------------------------


def check(context: ConsumerContext) -> Routine:
    """Check sessions and database, unless a claim has worked before."""
    if context.has_claimed:
        return
    try:
        if engine_of(context.engine.dialect) is not None:
            # First, as a listener of the program may lock the database whenever a transaction begins.
            yield ExecuteInOwnSession(_check_listeners, (context,))
        yield WithSession(_check_connections(context))
        yield ExecuteInOwnSession(check_transactions, (context.spec, context.isolation))
    except Exception as error:
        if not is_database_error(error):
            # No session has worked yet, and the error is not the database's.
            context.fail(error)
        raise
    notified = yield ExecuteInOwnSession(check_database, (context,))
    log_started(context, notified=notified)
    if notified and not context.draining and not context.polls.peers.subscribed:
        context.runner.listen()


def _check_listeners(session: Session, context: ConsumerContext) -> None:
    """Refuse what a listener of the program does to connections, or log it."""
    connection = session.connection(bind_arguments=context.settings.bind_arguments)
    other = engine_of(connection.dialect)
    text = None if other is None else other.check_connection(connection, context.spec.model.__name__)
    session.rollback()
    if text is not None:
        logger.warning("%s", text, extra=context.log_fields("connection_changed"))


def _check_connections(context: ConsumerContext) -> Routine:
    """Refuse sessions that share a connection, whatever the engine's pool is called."""
    bind = context.settings.bind_arguments
    own = yield Execute(driver_connection, (bind,))
    other = yield ExecuteInOwnSession(driver_connection, (bind,))
    if own is other:
        raise shared_connection_error(context.name, "the engine")


def check_database(session: Session, context: ConsumerContext) -> bool:
    """Refuse a database that lacks what the queue needs; log what is outdated; return whether it notifies."""
    # By the connection, as some statements name no mapped class, and a session may have several engines.
    connection = session.connection(bind_arguments=context.settings.bind_arguments)
    distribution = context.settings.distribution
    try:
        if distribution is not None:
            distribution.check(context.spec.mapper.columns[distribution.attribute])
        hidden = check_ready(connection, context.settings.spec_of_shard)
        _check_name(connection, context)
        checks = checks_of(connection)
        spec = context.spec
        tables = [spec.table, *(spec.side_tables[WAITS] for _ in spec.config.waits[:1])]
        outdated = [checks.outdated_triggers_of(connection, table, spec.model.__name__) for table in tables]
        warnings = [
            (context.log_fields("rows_hidden"), hidden),
            *((context.log_fields("triggers_outdated"), each) for each in outdated),
            (context.log_fields("functions_outdated"), checks.outdated_functions(connection, context.spec)),
            (context.log_fields("indexes_missing"), checks.missing_index_advice(connection, context.spec)),
        ]
    finally:
        session.rollback()
    for extra, text in warnings:
        if text is not None:
            logger.warning("%s", text, extra=extra)
    return context.settings.notifies and outdated[0] is None and engine_of(connection.dialect) is None


def _check_name(connection: sa.Connection, context: ConsumerContext) -> None:
    """Refuse a name that the database cannot store in its encoding, as each claim would fail."""
    name = context.settings.worker()
    if name.isascii():
        return
    try:
        connection.execute(sa.select(sa.literal(name, sa.Text())))
    except Exception as error:
        if not may_be_of_a_row(error):
            raise
        msg = (
            f"{context.name}: the database cannot store the name {name!r}, by its encoding; give worker_name= in ASCII"
        )
        raise ConfigurationError(msg) from error


def check_ready(connection: sa.Connection, spec: QueueSpec) -> str | None:
    """Refuse a database that lacks what the queue needs; return a warning if row-level security hides every row."""
    other = engine_of(connection.dialect)
    if other is not None:
        other.check_supported(spec)
    checks, name = checks_of(connection), spec.model.__name__
    _refuse(name, checks.missing_schema_grants(connection, spec))
    side_tables = spec.side_tables.values()
    # First: a newer version may also have dropped a column.
    refuse_newer(connection, side_tables, name)
    checks.check_complete(connection, spec)
    refuse_older(connection, side_tables, name)
    apart = checks.split_schemas(connection, spec)
    if apart is not None:
        raise DatabaseNotReadyError(apart)
    _refuse(name, checks.missing_grants(connection, spec))
    policies, hidden = checks.row_security(connection, spec)
    if policies:
        msg = (
            f"row-level security hides every row from the role of this Consumer of {name}; let the owner of the table "
            f"execute: {'; '.join(policies)}; or let a superuser give the role BYPASSRLS"
        )
        raise DatabaseNotReadyError(msg)
    return hidden


def _refuse(name: str, grants: Sequence[str]) -> None:
    if grants:
        msg = (
            f"the role of this Consumer of {name} lacks privileges that its queue needs; let the owner of the tables "
            f"execute: {'; '.join(grants)}"
        )
        raise DatabaseNotReadyError(msg)


def log_started(context: ConsumerContext, *, notified: bool) -> None:
    if context.start_logged:
        return
    context.start_logged = True
    settings, where = context.settings, database_text(context.engine)
    worker_kind = "task" if context.runner.can_interrupt else "thread"
    poll = f"polling every {settings.poll_interval:g} s"
    mode = "draining" if context.draining else "listening" if notified else "polling"
    how = {"draining": "until no job is due", "listening": f"listening for notifications, {poll}", "polling": poll}
    strategy = context.spec.strategy.name
    number = settings.concurrency
    extra = context.log_fields("consumer_started", strategy=strategy, database=where, concurrency=number, mode=mode)
    values = (context.spec.name, strategy, where, number, worker_kind, "" if number == 1 else "s", how[mode])
    logger.info("queue %s: started, %s, works on %s with %d worker %s%s, %s", *values, extra=extra)


# -- maintenance -------------------------------------------------------------------------------------------------------
# A task is a routine, ``task(maintenance, now)``. It returns at once when its timer is not due, and sets the timer
# before it does its work: after an error the next try must not be now. They are listed in the order of execution.

_AFTER_ERROR = 0.25
"""Seconds."""

Task = Callable[[Maintenance, float], Routine]

TASKS: tuple[Task, ...] = (
    handlers_running.end_overdue,
    handlers_running.pass_on_blocked,
    handlers_running.release_waiting,
    leases.extend,
    handlers_running.settle_overdue,
    leases.heartbeat,
    leases.find_upcoming,
    leases.find_unchanged,
    handlers_running.cancel_requested,
    leases.rescue_expired,
    cleanup.reconcile_messages,
    cleanup.delete_old,
    cleanup.delete_old_attempts,
    minutes.write_counts,
    cleanup.close_unused,
)


def maintain(context: ConsumerContext) -> Routine:
    """Execute the tasks that are due, again and again, until the run is over."""
    maintenance = Maintenance(context)
    while not context.workers_ended:
        now, pause = time.monotonic(), 0.0
        context.maintained_at = now
        for task in TASKS:
            try:
                yield from _watched(context, task(maintenance, now))
            except Exception as error:  # noqa: BLE001 - the database may be gone; the other tasks are due all the same
                # Before the first claim the worker logs program errors; logging them here would repeat them. Before the
                # start check, unsupported-feature errors are the check's to report.
                is_explained = not context.start_logged and isinstance(error, NotSupportedError)
                is_logged = may_recover(error) and not is_explained
                if error is not context.error and (context.has_claimed or is_logged):
                    context.log_error("maintenance_error", "queue %s: maintenance: %s: %s", error)
                pause = _AFTER_ERROR
        yield Wait("maintenance", max(maintenance.until_next(), pause))


def _watched(context: ConsumerContext, routine: Routine) -> Routine:
    """Pass the effects of a task on, and record since when one of them waits for the database, for the health."""
    result: Any = None
    raised: Exception | None = None
    while True:
        try:
            effect = routine.send(result) if raised is None else routine.throw(raised)
        except StopIteration as end:
            return end.value
        result = raised = None
        context.waits_for_database_since = time.monotonic()
        try:
            result = yield effect
        except Exception as error:  # noqa: BLE001 - the task decides what an error means
            raised = error
        finally:
            # In this order, as another thread may read in between.
            context.maintained_at = time.monotonic()
            context.waits_for_database_since = None
