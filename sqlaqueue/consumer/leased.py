"""Routines that claim and run jobs under leases."""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy.orm import Session

from sqlaqueue.consumer.claim import TRY_AGAIN_AFTER, ClaimFailed, Suspects, UnclaimableJob
from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.effects import CallHandler, Effect, Execute, ExecuteInOwnSession, Routine
from sqlaqueue.consumer.core.errors import (
    is_connection_lost,
    is_lock_or_timeout,
    is_transient,
    kind_of,
    may_be_of_a_run,
)
from sqlaqueue.consumer.core.events import EventName, JobEvent, PollEvent, make_event
from sqlaqueue.consumer.executor import Executor, expunge, load_again, reload
from sqlaqueue.consumer.in_flight import LeftBehind, run_of_claimed, runs_in
from sqlaqueue.consumer.notifications.polls import Poll, notify_all_claimed
from sqlaqueue.consumer.outcomes import (
    COMPLETED,
    RELEASED,
    CancellationRequested,
    FinishedRun,
    Outcome,
    applies_to_batch,
    is_disconnected,
)
from sqlaqueue.consumer.sessions import has_lost_connection
from sqlaqueue.consumer.settle import SettledEach, extend_claims, without_expiring
from sqlaqueue.exc import LeaseLost, WorkerDied
from sqlaqueue.log import logger
from sqlaqueue.mapping.runs import run_of, runs_of
from sqlaqueue.queue.run import Key, Run, key_text, key_value, keys_by_token
from sqlaqueue.sql.engine import own_work
from sqlaqueue.strategies.update_status import LEASE_EXPIRED


class RescuedJob(NamedTuple):
    """A job whose lease had expired, and that is pending or failed by now."""

    key: Key
    failed: int | None = None
    """Its last attempt, if it has failed since none was left."""
    max_attempts: int = 0


class Report(NamedTuple):
    """What a routine has done with some jobs."""

    settled: Sequence[FinishedRun] = ()
    unsettled: Sequence[FinishedRun] = ()
    """Runs that ended without a commit of their own, to be settled together with others."""
    lease_lost: Sequence[FinishedRun] = ()
    retry_alone: Sequence[Any] = ()
    """Jobs of a batch that failed as a whole, detached, each to be tried by itself."""
    claimed: int = 0


def apply(context: ConsumerContext, result: Report) -> None:
    """Count and emit settled runs, buffer unsettled ones, end their quarantine, queue retries."""
    _count_and_emit(context, result.settled)
    _emit_lease_lost(context, result.lease_lost)
    with context.lock:
        context.completions.add(result.unsettled)
    # Whatever the outcome: a job that seems to run for ever would keep all other quarantined jobs from running.
    if context.quarantine.end([one.run.key for one in (*result.settled, *result.lease_lost, *result.unsettled)]):
        context.polls.poll_at_once()
    context.add_jobs([[job] for job in result.retry_alone])


def release(context: ConsumerContext, runs: Sequence[Run]) -> None:
    """End runs without counting an attempt; they are settled together with others."""
    apply(context, Report(unsettled=[FinishedRun(run, RELEASED) for run in runs]))


def report_settled(
    context: ConsumerContext,
    finished: Sequence[FinishedRun],
    lost: Sequence[FinishedRun],
    refused: Sequence[FinishedRun] = (),
) -> None:
    """Process runs that were settled together, except those whose lease was lost or that could not be settled."""
    with context.lock:
        context.completions.settled(finished)
        context.finished_turns += 1
    silent = [one for one in finished if not one.claim_committed]
    if [one for one in finished if one.outcome.quarantine]:
        # Only now: a claim that looked for quarantined jobs before the commit has not seen these.
        context.quarantine.may_wait = True
    without = {*lost, *refused, *silent}
    _count_and_emit(context, [one for one in finished if one not in without] if without else finished)
    _emit_lease_lost(context, [one for one in lost if one.claim_committed])
    if silent:
        # No trigger announces a row that is released.
        context.polls.poll_at_once()
    if context.draining or context.completions:
        # Another worker can settle runs that have ended meanwhile, or find out that the queue is drained.
        context.changed()


def _count_and_emit(context: ConsumerContext, finished: Sequence[FinishedRun]) -> None:
    events = context.events
    # Nearly all are completed, and there are many.
    others = [one for one in finished if one.outcome is not COMPLETED]
    with context.lock:
        released = sum(one.ended_as.event == "released" for one in others) if others else 0
        context.runs_ended += len(finished) - released
        context.runs_released += released
        if context.counts is not None:
            context.counts.add(finished)
        context.conflicts.clear(one.run.key for one in finished if one.outcome.event != "released")
        if context.cancelled:
            context.cancelled.difference_update([one.run.key for one in finished])
    context.claimer.ended(finished)
    if finished and context.claimer.held_back.due:
        # The end of a run may let another job begin.
        context.polls.poll_at_once()
    for one in finished if events.wants("completed") else others:
        outcome = one.ended_as
        if outcome.state == "pending" and not outcome.delay:
            # No trigger announces a row that has read as pending all the time.
            context.polls.poll_at_once()
        if events.wants(outcome.event):
            _emit(context, outcome.event, one.run, outcome.delay, outcome.cause)


def emit_claimed(context: ConsumerContext, jobs: Sequence[Any]) -> None:
    if context.counts is not None:
        _note_due(context, jobs)
    for run in runs_of(jobs) if context.events.wants("claimed") else ():
        _emit(context, "claimed", run)


def _note_due(context: ConsumerContext, jobs: Sequence[Any]) -> None:
    """Note when claimed jobs were due, or were enqueued if that was later, by the clock of this process."""
    ahead = context.clock_ahead
    if ahead is None:
        ahead = time.time() - time.monotonic()
    spec = context.spec
    names = [spec.attributes[role] for role in ("run_at", "created_at") if spec.has(role)]
    for job, run in zip(jobs, runs_of(jobs), strict=True):
        # Not by getattr(), which would load an attribute. Of a time without a zone it is unknown when it is.
        known = [job.__dict__.get(name) for name in names]
        moments = [each for each in known if isinstance(each, datetime) and each.tzinfo is not None]
        if moments:
            run.due_at = max(moments).timestamp() - ahead


def emit_polled(context: ConsumerContext, jobs: Sequence[Any], duration: float, *, settled: int = 0) -> None:
    """Emit an event for a poll: its statements took ``duration`` seconds, and have settled some runs as well."""
    if context.events.wants_polls:
        traces = tuple(run.traceparent for run in runs_of(jobs) if run.traceparent is not None)
        context.events.emit_poll(PollEvent(context.spec.name, len(jobs), duration, settled, traces))


def report_rescued(context: ConsumerContext, rescued: Sequence[RescuedJob]) -> None:
    """Emit an event for each rescued job; a job that has failed by that is reported as any that has failed."""
    queue = context.spec.name
    if context.counts is not None and rescued:
        failed = sum(job.failed is not None for job in rescued)
        with context.lock:
            context.counts.add_rescued(retried=len(rescued) - failed, failed=failed)
    for job in rescued:
        if job.failed is None:
            context.events.emit(JobEvent("rescued", queue, job.key))
        else:
            died = WorkerDied(LEASE_EXPIRED)
            event = JobEvent("failed", queue, job.key, job.failed, error=died, max_attempts=job.max_attempts)
            context.events.emit(event)


def report_unclaimable(context: ConsumerContext, job: UnclaimableJob | None, error: BaseException, what: str) -> None:
    """Log a job that cannot be ``what``: claimed, rescued or settled. None is a job that was known."""
    if job is not None:
        text = "queue %s: job %s cannot be %s here: %s; other jobs run, and this one is tried again after %.0f s"
        extra = context.log_fields("job_unclaimable", job_key=key_value(job.key), error_kind=kind_of(error))
        cause = error if error.__traceback__ is not None else None
        values = (context.spec.name, key_text(job.key), what, job.error, TRY_AGAIN_AFTER)
        logger.error(text, *values, exc_info=cause, extra=extra)


def _emit_lease_lost(context: ConsumerContext, lost: Sequence[FinishedRun]) -> None:
    for one in lost:
        error = LeaseLost(f"the result of job {key_text(one.run.key)} came after its lease had passed to another run")
        _emit(context, "lease_lost", one.run, error=error)


def _emit(
    context: ConsumerContext, name: EventName, run: Run, delay: float | None = None, error: BaseException | None = None
) -> None:
    context.events.emit(make_event(name, context.spec.name, run, delay, error))


# -- settle and claim --------------------------------------------------------------------------------------------------


class ReplyLost(Exception):
    """The connection dropped before the reply to the commit of a claim."""

    def __init__(self, runs: list[Run]) -> None:
        super().__init__(f"the reply to the commit of a claim of {len(runs)} jobs was lost")
        self.runs = runs


@own_work()
def settle_and_claim(  # noqa: PLR0917 - an effect passes arguments by position
    session: Session,
    context: ConsumerContext,
    finished: Sequence[FinishedRun],
    limit: int,
    poll: Poll,
    alone: bool,  # noqa: FBT001 - an effect passes arguments by position
    suspects: Suspects | None,
) -> tuple[list[Any], list[FinishedRun], bool]:
    """Settle runs, claim up to ``limit`` jobs, or quarantined ones, and commit: all in one transaction.

    The jobs stay in the session as they were loaded: ``expire_on_commit`` would have each read again.

    :param alone: whether no other worker of this process claims meanwhile, which might take a quarantined job as well.
    :return: the jobs, the runs whose lease was lost, and whether there may be more to claim.
    """
    claimer, settler = context.claimer, context.settler
    context.isolation.begin(session)
    lost = settler.settle_again(session, finished) if finished else []
    claimer.ended(finished)
    began = time.monotonic()
    jobs, more, quarantined = _claim(session, context, limit, poll, alone, suspects)
    if jobs:
        if time.monotonic() - began > context.extend_after:
            # Heavy rows took long to arrive. Their leases began with the statement, and must not end at the commit.
            extend_claims(session, context.settings, list(keys_by_token(runs_of(jobs)).items()))
        settler.look_at_table(session)
    if not jobs and claimer.held_back.retry_in is None and not claimer.unclaimable:
        notify_all_claimed(session, context.settings, poll)
    try:
        with without_expiring(session):
            settler.commit(session, finished)
    except Exception as error:
        runs = [run for run in map(run_of, jobs) if run is not None]
        if runs and is_connection_lost(error):
            raise ReplyLost(runs) from error
        if jobs and not finished:
            # Such as a deferred constraint, which the commit checks.
            raise ClaimFailed(len(jobs), suspects, quarantined=quarantined) from error
        claimer.unclaimable.settles_apart = True
        raise
    claimer.unclaimable.succeeded(suspects, found=bool(jobs))
    if alone:
        context.quarantine.claimed_last = quarantined
    if quarantined:
        claimer.began(jobs)
    return jobs, lost, more


def _claim(  # noqa: PLR0917 - as its caller
    session: Session,
    context: ConsumerContext,
    limit: int,
    poll: Poll,
    alone: bool,  # noqa: FBT001 - as its caller
    suspects: Suspects | None,
) -> tuple[list[Any], bool, bool]:
    """Claim jobs; return them, whether there may be more, and whether they are quarantined.

    Quarantined jobs are claimed in turn with the others, as long as there are some.
    """
    claimer = context.claimer
    if suspects is not None:
        jobs = claimer.claim_suspects(session, suspects)
        return jobs, True, suspects.quarantined and bool(jobs)
    if alone and not context.quarantine.claimed_last and (jobs := claimer.claim_quarantined(session)):
        return jobs, True, True
    # A single Consumer would only notify itself.
    jobs, more = claimer.claim(session, limit, poll.announcements if poll.peers > 1 else ())
    if alone and not jobs and (jobs := claimer.claim_quarantined(session)):
        # Other jobs may wait: quarantined ones are claimed apart from them.
        return jobs, True, True
    return jobs, more, False


# -- settle finished ---------------------------------------------------------------------------------------------------


def settle_finished(context: ConsumerContext, *, apart: bool = False) -> Routine:
    """Settle finished runs together; if that fails, or if they are to be settled ``apart``, one by one.

    Those whose rows others have locked are settled later.
    """
    finished = context.completions.take()
    if not finished:
        return
    settler, result = context.settler, SettledEach([], [], [])
    try:
        if not apart:
            try:
                lost = yield ExecuteInOwnSession(settler.settle_and_commit, (finished,))
                result = result._replace(lease_lost=lost)
            except Exception as error:
                if not (may_be_of_a_run(error) or is_lock_or_timeout(error)):
                    raise
                apart = True
        if apart:
            result = yield ExecuteInOwnSession(settler.settle_each, (finished,))
    except Exception:
        context.completions.put_back(finished)
        raise
    _report(context, finished, result)


def settle_postponed(context: ConsumerContext, *, last: bool = False) -> Routine:
    """Settle some of the runs whose rows were locked, each by itself; at the ``last`` try, all of them."""
    postponed = context.completions.postponed
    while finished := postponed.take():
        try:
            result: SettledEach = yield ExecuteInOwnSession(context.settler.settle_each, (finished,))
        except Exception:
            postponed.add(finished)
            raise
        if last:
            result = SettledEach(result.lease_lost, [*result.refused, *result.later], [])
        _report(context, finished, result)
        if not last:
            return


def _report(context: ConsumerContext, finished: Sequence[FinishedRun], result: SettledEach) -> None:
    for one in result.refused:
        extra = context.log_fields("not_settled", job_key=key_value(one.run.key), attempt=one.run.attempt)
        text = "queue %s: the end of job %s could not be stored; it stays as it is until its lease expires"
        logger.error(text, context.spec.name, key_text(one.run.key), extra=extra)
    if result.later:
        context.completions.postponed.add(result.later)
        finished = [one for one in finished if one not in result.later]
    report_settled(context, finished, result.lease_lost, result.refused)


def settle_left_behind(context: ConsumerContext, left: LeftBehind) -> Routine:
    """Settle the run of a process that has died, unless the job has ended or belongs to another run by now."""
    one = FinishedRun(left.run, RELEASED if left.error is None else context.outcome_rules.outcome(left.error, left.run))
    result: SettledEach = yield ExecuteInOwnSession(context.settler.settle_each, ([one],))
    if result.later:
        context.completions.postponed.add([one])
    elif not (result.lease_lost or result.refused):
        apply(context, Report(settled=[one]))


# -- worker turn -------------------------------------------------------------------------------------------------------


_MOST_CLAIMERS, _MANY_PEERS = 2, 3
"""How many workers of a process may claim at once, and from how many Consumers on only one may. While Python processes
one claim, the server executes the other. Many Consumers keep the server busy anyway, and a second claim would have to
skip the rows that they have locked."""


class WorkerTurn:
    """One turn of a worker: it claims jobs, while the other workers wait, or runs claimed ones."""

    def __init__(self, context: ConsumerContext) -> None:
        self._context = context
        self.version = context.version
        """The version of the state on which the decisions of this turn are based."""
        self.claims_alone = False
        self.clean = True
        """Whether the session of its worker is unused and can be used again."""
        self._claims = False
        self._finished_turns = 0

    def take_jobs(self) -> Executor | None:
        context = self._context
        with context.lock:
            if not context.buffer:
                return None
            executor = Executor(
                context, [context.buffer.popleft()], context.completions.add, next_group=context.next_group
            )
            context.assign(self, executor.runs)
            return executor

    def may_claim(self) -> bool:
        """Return whether it is this worker's turn to claim.

        One worker claims at a time, and none while buffered jobs suffice. Two may claim if more jobs may be pending,
        handlers are quick and Consumers are few: then the server executes one claim while Python processes the other.
        """
        context = self._context
        with context.lock:
            several = (
                context.plenty
                and not context.flow_control
                and context.sizer.is_quick
                and context.polls.peers.count < _MANY_PEERS
            )
            busy = context.buffer and not context.runs_low
            if busy or context.claiming >= (_MOST_CLAIMERS if several else 1):
                return False
            self.claims_alone = context.claiming == 0
            context.claiming += 1
            self._claims = True
            self._finished_turns = context.finished_turns
            return True

    def claimed(self, *, found: bool, more: bool) -> None:
        """Record the result of a claim: if it found jobs, another worker may claim; if there are ``more``, several."""
        context = self._context
        with context.lock:
            context.plenty = more
            if not found:
                return
            self._claims = False
            context.claiming -= 1
        context.changed()

    def end(self) -> None:
        """Let other workers claim."""
        context = self._context
        with context.lock:
            claimed, self._claims = self._claims, False
            if claimed:
                context.claiming -= 1
            context.finished_turns += context.in_flight.release(self)
        # A worker that has only run jobs takes the next turn itself.
        if claimed:
            context.changed()

    def takes_the_last(self) -> bool:
        """Return whether a claim that found nothing means that no job is due; until :meth:`end` no other one claims.

        It does if this process has no claimed and no quarantined jobs, no run has ended since the claim began (its job
        may be due again at once), and no other worker is claiming (its claim may have locked jobs).
        """
        context = self._context
        with context.lock:
            quiet = context.is_idle and not context.claiming and context.finished_turns == self._finished_turns
            claimer = context.claimer
            if context.plenty or claimer.unclaimable.is_searching or claimer.held_back.retry_in is not None:
                return False
            self._claims = quiet and not context.quarantine.waiting()
            context.claiming += self._claims
            return self._claims


_LATE_AGAIN = 5.0
"""Seconds after which a job is claimed again whose thread has exceeded its timeout and goes on here."""


def claim_leased_batch(
    context: ConsumerContext, turn: WorkerTurn, finished: Sequence[FinishedRun], suspects: Suspects | None = None
) -> Routine:
    """Settle finished runs and claim, in one transaction; run quick jobs at once. Return how many were claimed."""
    limit, poll, ended_before = context.claim_size(), context.polls.begin_poll(), context.runs_ended
    began = time.monotonic()
    try:
        arguments = (context, finished, limit, poll, turn.claims_alone, suspects)
        jobs, lease_lost, more = yield Execute(settle_and_claim, arguments)
    except ReplyLost as lost:
        # If the server has committed them, they are this consumer's: they have not run, and no attempt is counted.
        with context.lock:
            context.completions.add([FinishedRun(run, RELEASED, claim_committed=False) for run in lost.runs])
        raise (lost.__cause__ or lost) from None
    if context.settings.timeout is not None and (late := context.left_running()):
        jobs = _release_late(context, jobs, late)
    context.claim_succeeded()
    took = time.monotonic() - began
    context.sizer.record_claim(took, limit, found=len(jobs))
    context.record_weight(jobs, took)
    context.polls.polled(poll, found=bool(jobs), more=more, drained=not more and context.claims_all)
    context.poll_when_admitted(ended_before)
    if finished:
        report_settled(context, finished, lease_lost)
    emit_polled(context, jobs, took, settled=len(finished))
    emit_claimed(context, jobs)
    groups = context.settings.call_groups(jobs)
    time_limit = context.sizer.time_in_row(len(groups)) if jobs else None
    if time_limit is None:
        yield Execute(expunge)
        context.add_jobs(groups)
        turn.claimed(found=bool(jobs), more=more)
        return len(jobs)
    executor = Executor(context, groups, context.completions.add, time_limit=time_limit)
    context.assign(turn, executor.runs)
    turn.claimed(found=bool(jobs), more=more)
    yield from run_leased(context, executor)
    return len(jobs)


def _release_late(context: ConsumerContext, jobs: Sequence[Any], late: Collection[Key]) -> list[Any]:
    """Release the jobs whose earlier run has not ended in this process, and return the others.

    A thread that has exceeded its timeout goes on, and another one must not run its job beside it.
    """
    again = [run for run in runs_of(jobs) if run.key in late]
    delay = _LATE_AGAIN if context.spec.has("run_at") else None
    if delay is None:
        # Otherwise it would be claimed and released in a loop.
        for run in again:
            context.claimer.unclaimable.add(run.key, "its handler still runs here after its timeout")
    apply(context, Report(unsettled=[FinishedRun(run, Outcome("released", delay)) for run in again]))
    return [job for job in jobs if run_of_claimed(job).key not in late]


def run_leased(context: ConsumerContext, executor: Executor) -> Routine:
    """Run an executor's jobs, whose claim is committed; return whether the session can be reused for other jobs."""
    try:
        return (yield from _run(context, executor))
    except Exception:
        # Else they would stay claimed until their leases expire.
        release(context, executor.runs())
        raise


def _run(context: ConsumerContext, executor: Executor) -> Routine:
    quarantine, clean = context.quarantine, True
    begun = {run.key for run in executor.runs()} if quarantine.is_running else set()
    while clean:
        yield CallHandler(executor)
        if not executor.group:
            break
        done, clean = yield from _end_runs(context, executor)
        apply(context, done)
        executor.end_group()
    # Jobs that are left still count as running, whichever worker runs them.
    if begun and quarantine.end(begun.difference(run.key for run in context.claimed_runs())):
        context.polls.poll_at_once()
    if not executor.is_done:
        if clean:
            # Before another worker takes them: an instance belongs to one session at most.
            yield Execute(expunge)
            context.add_jobs(executor.take_waiting())
            executor.waiting_taken()
        else:
            yield from pass_on(context, executor)
    return clean


def pass_on(context: ConsumerContext, executor: Executor) -> Routine:
    """Give other workers the jobs that wait in an executor, whose instances are in a session that is in use."""
    left = runs_in(executor.take_waiting())
    if left:
        try:
            jobs = yield ExecuteInOwnSession(load_again, (context, left))
        except Exception:
            release(context, left)
            executor.waiting_taken()
            raise
        there = {run.key for run in runs_of(jobs)}
        context.add_jobs(context.settings.call_groups(jobs))
        # The leases of these are lost, or their rows deleted: settling them finds out.
        release(context, [run for run in left if run.key not in there])
        executor.waiting_taken()


def _end_runs(context: ConsumerContext, executor: Executor) -> Generator[Effect, Any, tuple[Report, bool]]:
    """End runs whose handler has raised or used its session; return whether the session can be used again, too."""
    rules, jobs, error = context.outcome_rules, executor.group, executor.error
    if error is None:
        done = yield from _commit(context, executor)
        if isinstance(done, Report):
            return done, False
        error = done
    used, disconnected = yield Execute(_undo)
    if is_disconnected(error, disconnected):
        return _disconnected(context, [FinishedRun(run, RELEASED) for run in runs_of(jobs)], error), False
    if len(jobs) == 1 or applies_to_batch(error):
        finished = [FinishedRun(run, rules.outcome(error, run)) for run in runs_of(jobs)]
        return Report(unsettled=finished), not used
    if isinstance(error, CancellationRequested):
        context.cancelled.update(error.keys)
    yield Execute(reload, (context, jobs))
    yield Execute(expunge)
    return Report(retry_alone=jobs), False


def _disconnected(context: ConsumerContext, finished: Sequence[FinishedRun], error: BaseException) -> Report:
    for one in finished:
        one.outcome = context.outcome_rules.disconnected(error, one.run, alone=context.outcome_rules.ran_alone(one.run))
    return Report(unsettled=finished)


def _undo(session: Session) -> tuple[bool, bool]:
    """Undo a handler's writes; return whether it used the session, and whether its connection is gone."""
    used, disconnected = session.in_transaction(), has_lost_connection(session)
    session.rollback()
    return used, disconnected


def _commit(context: ConsumerContext, executor: Executor) -> Generator[Effect, Any, Report | BaseException]:
    """Commit a handler's writes with the completion of its jobs; return an error about these writes."""
    finished = [FinishedRun(run_of_claimed(job), COMPLETED, job) for job in executor.group]
    try:
        lost = yield Execute(context.settler.complete_and_commit, (finished,), executor.variables)
    except Exception as failed:  # noqa: BLE001 - an error of the flush or the commit is the job's error
        if not is_transient(failed):
            return failed
        yield Execute(rollback)
        if not is_connection_lost(failed):
            return Report(
                unsettled=[FinishedRun(one.run, context.outcome_rules.outcome(failed, one.run)) for one in finished]
            )
        # If the connection dropped before the reply to the commit, the outcome is unknown: settling checks it.
        uncertain = [FinishedRun(one.run, RELEASED, uncertain=one.uncertain) for one in finished]
        return _disconnected(context, uncertain, failed)
    if not lost:
        return Report(settled=finished)
    # A batch is one transaction: the other jobs of it are rolled back as well, and run again without an attempt.
    return Report(unsettled=[FinishedRun(one.run, RELEASED) for one in finished if one not in lost], lease_lost=lost)


def rollback(session: Session) -> None:
    session.rollback()
