"""What the routines of one ``run()`` or ``drain()`` share: its settings, its statements and its state. No I/O."""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any, Protocol

import sqlalchemy as sa

from sqlaqueue.consumer.claim import Claimer
from sqlaqueue.consumer.core.events import EventEmitter
from sqlaqueue.consumer.core.signals import ForkGuard
from sqlaqueue.consumer.core.waker import Deadlines
from sqlaqueue.consumer.in_flight import CallGroup, CompletionBuffer, Deaths, InFlight, runs_in
from sqlaqueue.consumer.notifications.polls import PollSchedule, WaiterRegistry
from sqlaqueue.consumer.outcomes import ConflictDelays, MinuteCounts, OutcomeRules
from sqlaqueue.consumer.pace import (
    CLAIM_BYTES,
    EXTENSIONS_PER_LEASE,
    FLUSH_AFTER,
    BatchSizer,
    FailingClaims,
    FailuresInARow,
    Intervals,
    RowScale,
)
from sqlaqueue.consumer.quarantine import CrashJournal, Quarantine
from sqlaqueue.consumer.sessions import IsolationLevel
from sqlaqueue.consumer.settings import ConsumerSettings, function_of
from sqlaqueue.consumer.settle import Settler
from sqlaqueue.consumer.statements import ConsumerStatements
from sqlaqueue.log import fields, logger, seconds_text
from sqlaqueue.queue.run import Key, Run, key_value
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sessions import open_session

_MOST_HANDLERS = 20
"""How many handlers a heartbeat names."""


class Runner(Protocol):
    """The threads or tasks of one run, as the routines see them."""

    can_interrupt: bool

    def wake_workers(self, number: int) -> None: ...
    def wake_poller(self) -> None: ...
    def wake_maintenance(self) -> None: ...
    def stop(self) -> None: ...
    def listen(self) -> None: ...
    def reconnect(self) -> None: ...


class ConsumerParts:
    """What a Consumer keeps between two runs: settings, statements, event listeners, and measured durations."""

    def __init__(self, settings: ConsumerSettings, statements: ConsumerStatements) -> None:
        self.settings, self.statements = settings, statements
        statements.claim  # noqa: B018 - a selection that cannot be claimed is refused when the Consumer is made
        self.events = EventEmitter(settings.worker)
        self.intervals = Intervals(settings.poll_interval)
        self.journal, self.deaths = CrashJournal(), Deaths()
        mappers = sa.inspect(settings.selection.entity).self_and_descendants
        self.stops: list[tuple[str, int, int]] | None = None
        """Where the end of a run is recorded, of several Consumers of a process, which log it together."""
        self.scale = RowScale(mappers, settings.spec.attributes.values())
        fixed = settings.batch or (settings.holds_transaction and settings.fixed_batch_size)
        # How many jobs run or commit together is the application's decision.
        most_bytes = math.inf if (fixed and settings.fixed_batch_size) else CLAIM_BYTES
        if settings.holds_transaction:
            # Under flow control none may wait for another: it would hold the slots of its keys.
            size = settings.batch_size if fixed or not settings.has_flow_control else 1
            # Each worker claims for itself.
            most_bytes /= settings.concurrency
            self.sizer = BatchSizer(size, 1, fixed=fixed, cautious=True, most_bytes=most_bytes)
        else:
            # A handler that takes jobs together leaves none waiting.
            self.sizer = BatchSizer(
                settings.batch_size,
                settings.concurrency,
                fixed=fixed,
                prompt=settings.has_flow_control,
                most_bytes=most_bytes,
            )

    def counts(self) -> MinuteCounts | None:
        """Return what a run counts its jobs with; None without ``QueueConfig(statistics=True)``."""
        return MinuteCounts() if self.settings.spec.config.statistics else None


class ConsumerContext:
    """One ``run()`` or ``drain()``.

    Each has a state of its own: a handler that outlives the grace period goes on in its thread, and must not meet the
    next run.
    """

    variables: Context
    """The context variables of the program, of which each call of a handler gets a copy."""
    engine: sa.Engine
    deadlines: Deadlines | None = None
    quiet = was_asked = False
    """Whether somebody has asked it to claim no more jobs, and whether anything was ever asked of it."""
    counts: MinuteCounts | None = None
    """What has ended since the last write of ``QueueConfig(statistics=True)``; None without it."""
    clock_ahead: float | None = None
    """By how many seconds the database's clock is ahead of the monotonic one; None before the first heartbeat."""
    waits_for_database_since: float | None = None
    """When the maintenance loop began to wait for the database; None while it does not."""

    def __init__(self, name: str, parts: ConsumerParts, factory: Any, runner: Runner, *, draining: bool) -> None:
        self.name, self.runner, self.draining = name, runner, draining
        self.id = uuid.uuid4().hex
        self.settings, self.statements, self.events = parts.settings, parts.statements, parts.events
        self.intervals, self.sizer, self.journal, self.stops = parts.intervals, parts.sizer, parts.journal, parts.stops
        self._scale, self._factory, self.deaths = parts.scale, factory, parts.deaths
        settings, self.lock, self.variables = self.settings, threading.RLock(), copy_context()
        self.buffer = deque[CallGroup]()
        """The claimed jobs that no worker has taken yet, detached from any session. It is changed under the lock."""
        self.completions = CompletionBuffer(self.lock)
        self.quarantine = Quarantine(settings.concurrency // 2)
        self.in_flight = InFlight(self.lock)
        self.conflicts, self.waiters, self.counts = ConflictDelays(draining=draining), WaiterRegistry(), parts.counts()
        self.isolation, self._failures = IsolationLevel(settings.spec), FailuresInARow()
        self.outcome_rules = OutcomeRules(settings, self.conflicts, marks_rows=self.statements.marks_rows)
        self.claimer = Claimer(settings, self.statements, self.quarantine, self.isolation, draining=draining)
        self.settler = Settler(settings, self.statements, self.outcome_rules, self.waiters, self.isolation)
        self.polls = PollSchedule(
            self.id,
            self.intervals.poll,
            runner.wake_poller,
            self._noticed,
            share=self.sizer.claim_size,
            waiters=self.waiters,
            rescue=self.intervals.rescue if settings.has_leases else None,
        )
        self.extend_after = settings.lease.total_seconds() / EXTENSIONS_PER_LEASE if settings.has_leases else math.inf
        """The seconds after which a lease is extended."""
        self.flow_control = settings.has_flow_control
        """Claimed jobs count as running for limits, so none may wait here for a handler."""
        self.fork_guard = ForkGuard(settings.spec.name, self.in_flight.sessions)
        self.cancelled: set[Key] = set()
        """Jobs whose cancellation was requested before their handler was called."""

        self.version = 0
        """The number of changes of the shared state. Workers compare it before they wait, so that they miss none."""
        self.claiming = 0
        """How many workers claim, or wait for the next poll after a claim found nothing."""
        self.plenty = False
        """Whether there may be more jobs than the last claim found."""
        self.finished_turns = 0
        """How many times workers have finished claimed jobs, which may be due again."""
        self.busy_since: float | None = None
        """When the first job was claimed since the consumer was idle; None while it is."""
        self.maintained_at = time.monotonic()
        """When the maintenance loop has last begun a round, or had a reply of the database."""
        self.maintenance_sleeps = False
        """Whether the maintenance loop would notice too late that work has begun."""
        self.runs_ended = self.runs_released = 0

        self.stopping = False
        """The consumer takes on no more work; jobs of a batch that have not begun are released."""
        self.workers_ended = False
        """The workers have ended; the maintenance loop may end."""
        self.drained = False
        """A run that drains its queue has come to its end."""
        self.registered = False
        self.error: BaseException | None = None
        self.handles_signals, self.start_logged = True, False
        self.on_start_known: Callable[[], object] | None = None
        """Called when a first claim has worked or will be tried again; None when no caller waits for it."""

    @property
    def spec(self) -> QueueSpec:
        return self.settings.spec

    @property
    def watched(self) -> QueueSpec | None:
        """The queue, if jobs that other processes enqueue are to be noticed while this consumer is idle."""
        return self.spec if self.spec.config.notify and not self.draining else None

    @property
    def serves(self) -> str:
        """What part of the queue it serves: empty for all of it, else a text of its own."""
        return "" if self.settings.serves_whole_queue else self.id

    def handler_name(self, job: Any) -> str:
        dispatch, handlers = self.settings.dispatch, self.fork_guard.handlers
        function = function_of(handlers[0] if dispatch is None else dispatch.handler_of(job))
        return f"{function.__module__}.{getattr(function, '__qualname__', repr(function))}"

    def log_fields(self, event: str, **values: Any) -> dict[str, Any]:
        return fields(event, queue=self.spec.name, worker=self.settings.worker(), **values)

    def claim_failed(self, text: str, wait: float, kind: str, *, summary: str) -> None:
        """Log that a claim has failed and is tried again: as a warning once, and then now and then how often.

        :param summary: the error in one line, which others read in the heartbeat.
        """
        with self.lock:
            said = self._failures.failed(text, summary)
        level = logging.DEBUG if said is None else logging.WARNING
        extra = self.log_fields("consumer_error", delay=wait, error_kind=kind)
        logger.log(level, "queue %s: %s; next try in %.1f s", self.spec.name, said or text, wait, extra=extra)

    def claim_succeeded(self) -> None:
        self.intervals.succeeded()
        with self.lock:
            ended = self._failures.succeeded()
        if ended is not None:
            number, seconds = ended
            failures = "1 failure" if number == 1 else f"{number} failures"
            extra = self.log_fields("consumer_recovered", count=number, duration=seconds)
            text = "queue %s: claims work again, after %s in %s"
            logger.info(text, self.spec.name, failures, seconds_text(seconds), extra=extra)

    def failing_claims(self) -> FailingClaims | None:
        """Return how the claims fail, if several in a row have failed; None if they work."""
        return self._failures.streak()

    def job_fields(self, runs: Sequence[Run]) -> dict[str, Any]:
        """Return the attributes of records that the handler of these jobs logs."""
        shared = {"queue": self.spec.name, "worker": self.settings.worker()}
        if self.settings.batch:
            return shared | {"job_key": [key_value(run.key) for run in runs], "count": len(runs)}
        return shared | {
            name: value
            for run in runs
            for name, value in (
                ("job_key", key_value(run.key)),
                ("attempt", run.attempt),
                ("max_attempts", run.max_attempts),
            )
        }

    def log_error(self, event: str, text: str, error: Exception) -> None:
        """Log an error that the run survives; the text has places for the queue, the error's class and its text."""
        kind = type(error).__name__
        logger.warning(text, self.spec.name, kind, error, extra=self.log_fields(event, error_kind=kind))

    def _noticed(self) -> None:
        self.runner.wake_maintenance()
        if self.has_claimed:
            self.report_start()

    def report_start(self) -> None:
        if self.on_start_known is not None:
            self.on_start_known()
            self.on_start_known = None

    @property
    def has_claimed(self) -> bool:
        """Whether a claim has worked: errors from then on are the database's state, and no mistake of the program."""
        return self.polls.has_polled

    def open_session(self) -> Any:
        """Return a new session.

        Creating a session sends nothing to the database, so an error before the first claim is a mistake of the
        program, such as a factory that works in the main thread only.
        """
        try:
            return open_session(self._factory)
        except Exception as error:
            if not self.has_claimed:
                self.fail(error)
            raise

    def stop(self) -> None:
        self.stopping = True
        self.runner.stop()

    def obey(self, *, quiet: bool, stop: bool) -> None:
        """Do what somebody has asked of this consumer, as it has read with its heartbeat."""
        self.was_asked = self.was_asked or quiet or stop
        if self.stopping:
            return
        if stop or (quiet and self.draining):
            extra = self.log_fields("consumer_requested", request="stop")
            logger.info("queue %s: was asked to stop", self.spec.name, extra=extra)
            self.stop()
        elif quiet != self.quiet:
            self.quiet = quiet
            does = "is quiet, and claims no more jobs" if quiet else "is not quiet any more, and claims jobs again"
            extra = self.log_fields("consumer_requested", request="quiet" if quiet else "resume")
            logger.info("queue %s: %s", self.spec.name, does, extra=extra)
            # The workers that wait for a poll must not wait for one while it is quiet.
            self.polls.poll_at_once()
            self.changed(self.settings.concurrency)

    def about(self) -> dict[str, Any]:
        """Return what the heartbeat says of this consumer beside the columns of its table."""
        dispatch = self.settings.dispatch
        handlers = self.fork_guard.handlers if dispatch is None else dispatch.by_class.values()
        functions = [function_of(each) for each in handlers]
        names = [f"{each.__module__}:{getattr(each, '__qualname__', type(each).__name__)}" for each in functions]
        return {"handlers": [*dict.fromkeys(names)][:_MOST_HANDLERS], **({"quiet": True} if self.quiet else {})}

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self.stop()

    def wants_poll(self) -> bool:
        if self.quiet:
            return False
        if self.draining or self.polls.is_due() or self.quarantine.waiting():
            return True
        # A run that has ended may let a job begin: one transaction settles it and claims.
        return self.claimer.held_back.due and self.completions.waiting_since() is not None

    @property
    def claims_all(self) -> bool:
        """Whether a claim that has found fewer jobs than it may take has left none that another one would take."""
        quarantine = self.quarantine
        if quarantine.may_wait or quarantine.is_running or quarantine.waiting():
            return False
        if self.claimer.held_back.retry_in is not None:
            return False
        return not (self.flow_control or self.claimer.unclaimable or self.settings.distribution)

    def poll_when_admitted(self, ended_before: int) -> None:
        """Make a poll due when flow control may admit a job that it has held back from a claim.

        :param ended_before: :attr:`runs_ended` before the claim. A run that has ended meanwhile may have made room
            after the claim looked, and its worker did not know yet that a job was held back.
        """
        held_back = self.claimer.held_back
        if held_back.due and self.runs_ended != ended_before:
            self.polls.poll_at_once()
        elif held_back.retry_in is not None:
            self.polls.poll_within(held_back.retry_in)

    @property
    def runs_low(self) -> bool:
        """Whether there are more jobs to claim, and the buffered ones will be done before a claim could bring them."""
        if self.flow_control:
            return self.plenty and not self.claiming and not self.buffer
        return self.plenty and not self.claiming and len(self.buffer) <= self.sizer.jobs_during_claim()

    def claim_size(self) -> int:
        """Return how many jobs to claim: a few, unless the last claim has shown that there may be more."""
        if self.settings.holds_transaction:
            return self.sizer.claim_size(plenty=self.plenty)
        now, busy = time.monotonic(), self.in_flight.busy()
        slow_handlers = sum(self.sizer.is_slower_than_usual(now - one.started) for one in busy)
        return self.sizer.claim_size(
            plenty=self.plenty,
            idle=self.settings.concurrency - len(busy),
            slow_handlers=slow_handlers,
            scarce=self.claimer.is_scarce,
        )

    def record_weight(self, jobs: Sequence[Any], took: float) -> None:
        """Let the next claims take fewer jobs if the rows of this one, which took so many seconds, are heavy."""
        if jobs:
            self.sizer.record_weight(len(jobs), self._scale.weigh(jobs, took))

    def changed(self, workers: int = 1) -> None:
        """Wake as many waiting workers as can do something; waking hundreds of them for one job is expensive."""
        with self.lock:
            self.version += 1
        self.runner.wake_workers(workers)

    def add_jobs(self, groups: Sequence[CallGroup]) -> None:
        """Put claimed jobs, detached from their session, into the buffer."""
        if groups:
            with self.lock:
                self.buffer.extend(groups)
                self._work_begins()
            self.changed(len(groups))

    def next_group(self) -> CallGroup:
        """Return one more call group for a worker that has just run one; empty when something else comes first."""
        with self.lock:
            if self.quarantine.is_running or self.runs_low or self.wants_settling(time.monotonic()):
                return []
            return self.buffer.popleft() if self.buffer else []

    def assign(self, owner: object, runs: Callable[[], list[Run]]) -> None:
        """Record that ``owner`` works on claimed jobs; ``runs`` returns those that it still has."""
        with self.lock:
            self.in_flight.assign(owner, runs)
            self._work_begins()

    def _work_begins(self) -> None:
        if self.busy_since is None:
            self.busy_since = time.monotonic()
            if self.maintenance_sleeps:
                self.runner.wake_maintenance()

    @property
    def is_idle(self) -> bool:
        """Whether no claimed job is left here: none waits, runs, or has ended without being settled."""
        with self.lock:
            return not (self.buffer or self.in_flight or self.completions)

    def check_idle(self) -> bool:
        with self.lock:
            if self.is_idle:
                self.busy_since = None
                return True
            return False

    def claimed_runs(self) -> list[Run]:
        with self.lock:
            return runs_in(self.buffer) + self.in_flight.runs()

    def live_runs(self) -> list[Run]:
        """Return the runs whose leases are to be extended: all that are here and not given up.

        A task that goes on after its timeout is not given up: without its lease, the job would run beside it.
        """
        with self.lock:
            ends = not self.runner.can_interrupt
            executors = [one for one in self.in_flight.executors() if (one.timed_out and ends) or one.abandoned]
            given_up = {id(run) for run in runs_in(one.group for one in executors)}
            return [run for run in self.claimed_runs() + self.completions.runs() if id(run) not in given_up]

    def left_running(self) -> set[Key]:
        """Return the jobs whose threads go on although their runs were ended at their timeout."""
        with self.lock:
            late = [one for one in self.in_flight.busy() if one.timed_out]
            return {run.key for run in runs_in(one.group for one in late)}

    def forget_waiting(self) -> list[Run]:
        """Forget the claimed jobs that have not begun, and return their runs."""
        with self.lock:
            runs = runs_in(self.buffer)
            self.buffer.clear()
            for executor in self.in_flight.executors():
                runs += runs_in(executor.take_waiting())
                executor.waiting_taken()
            return runs

    def forget_claimed(self) -> list[Run]:
        """Forget all claimed jobs, and return the runs that have not ended."""
        with self.lock:
            runs = self.claimed_runs()
            self.buffer.clear()
            self.in_flight.clear()
            ended = {id(run) for run in self.completions.runs()}
            return [run for run in runs if id(run) not in ended]

    def wants_settling(self, now: float) -> bool:
        """Return whether finished runs should be settled now, without waiting for others to be settled with them.

        They wait for a moment if others will end soon, because jobs are buffered or more may be pending, and while
        other runs are being settled.
        """
        since = self.completions.waiting_since()
        if since is None:
            return False
        if self.sizer.is_slow or now - since >= FLUSH_AFTER:
            return True
        return not (self.buffer or self.plenty or self.completions.is_settling)

    @property
    def settles_with_poll(self) -> bool:
        """Whether the worker whose turn it is to claim settles ended runs, together with a claim of what they free."""
        return self.claimer.held_back.due and self.claiming > 0 and not self.quiet

    def request_cancellation(self, requested: Iterable[tuple[Key, float]], now: float) -> None:
        """Cancel runs, by their keys; a request that is older than the run was meant for an earlier one."""
        ages = dict(requested)
        with self.lock:
            meant = [
                run for run in self.claimed_runs() if run.key in ages and ages[run.key] <= now - run.claimed_at + 1
            ]
            for run in meant:
                running = [
                    one for one in self.in_flight.busy() if any(run.key == other.key for other in runs_in([one.group]))
                ]
                if not running:
                    self.cancelled.add(run.key)
                for one in running:
                    one.cancelled.add(run.key)
                    one.interrupt()


# -- health ------------------------------------------------------------------------------------------------------------
# Whether a Consumer is alive, and whether it is ready: two questions with different consequences.
#
# A service manager restarts a worker that is not alive. A worker that is not ready is left alone: a restart would not
# bring its database back.


STUCK_AFTER = 180.0
"""Seconds without a round of the maintenance loop after which a Consumer is stuck. An idle loop sleeps for up to 60."""

UNANSWERED_AFTER = 15.0
"""Seconds for which the maintenance loop waits for the database, after which a Consumer is not ready. It is alive."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """The health of a Consumer, see :meth:`Consumer.health() <sqlaqueue.Consumer.health>`."""

    alive: bool
    """Whether it runs, and its maintenance loop runs or waits for the database: that is no reason to restart it.

    It is false if something waits for the database far longer than it may, although a new connection is answered.
    """
    ready: bool
    """Whether it claims jobs: its first claim has succeeded, the database answers, and it is not stopping."""
    problems: tuple[str, ...] = ()
    """Why it is not alive or not ready, in words."""


def health_of(context: ConsumerContext | None) -> Health:
    """Return the health of the Consumer of a run; None is one that is not running."""
    if context is None:
        return Health(alive=False, ready=False, problems=("it is not running",))
    # Read first: the loop sets it to None after it has set the other one.
    waiting_since, now = context.waits_for_database_since, time.monotonic()
    silent = now - context.maintained_at
    if waiting_since is None and silent > STUCK_AFTER:
        problem = f"its maintenance loop has not run for {silent:.0f} seconds"
        return Health(alive=False, ready=False, problems=(problem,))
    deadlines = context.deadlines
    if deadlines is not None and deadlines.is_stuck:
        problem = (
            f"it waits for the database for more than {deadlines.longest:.0f} seconds, which answers other requests"
        )
        return Health(alive=False, ready=False, problems=(problem,))
    problems = []
    if context.stopping:
        problems.append("it is stopping")
    elif context.intervals.failures:
        number, streak = context.intervals.failures, context.failing_claims()
        failed = "the last claim has failed" if number == 1 else f"the last {number} claims have failed"
        problems.append(failed if streak is None else f"{failed}: {streak.error}")
    elif context.quiet:
        problems.append("it is quiet: it was asked to claim no more jobs, until `sqlaqueue workers --resume`")
    elif not context.has_claimed:
        problems.append("it has not claimed yet")
    if waiting_since is not None and now - waiting_since > UNANSWERED_AFTER:
        problems.append(f"its maintenance has waited for the database for {now - waiting_since:.0f} seconds")
    return Health(alive=True, ready=not problems, problems=tuple(problems))
