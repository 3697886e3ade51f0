"""What one Consumer does, resolved once: its queue, its statements and its rules. No I/O of its own."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue.consumer.claiming.batch_size import Pace
from sqlaqueue.consumer.claiming.quarantine import Suspects
from sqlaqueue.consumer.claiming.scan_cursor import Bearings
from sqlaqueue.consumer.core.transient_errors import is_conflict
from sqlaqueue.consumer.executing.dispatch import Dispatch
from sqlaqueue.consumer.notifications.waiter_registry import WaiterRegistry
from sqlaqueue.consumer.settling.conflicts import MOST_AT_ONCE, Conflicts
from sqlaqueue.consumer.settling.crash_journal import Entries
from sqlaqueue.consumer.settling.outcomes import HeldUp, Outcome, judge
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.keys import Key
from sqlaqueue.queue.backend import backend
from sqlaqueue.queue.config import check_lease
from sqlaqueue.queue.retry_policies import Delay, RetryPolicy, seconds
from sqlaqueue.queue.run import Run
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.statements.claim import claim_statement, worker_name
from sqlaqueue.statements.selection import JobSelection, select_jobs
from sqlaqueue.strategies import ClaimedJobs, ScanRange, Settlement
from sqlaqueue.strategies.parts.claim_tokens import alone_token, lost_twice, several_quarantined_token, shared_token
from sqlaqueue.strategies.parts.columns import named

BATCH = 500
"""How many jobs one statement claims at most, unless somebody says otherwise or more handlers run at once."""

LIMIT = "sqlaqueue_limit"
KEYS = "sqlaqueue_keys"
EXCEPT = "sqlaqueue_except"
ASKED = "sqlaqueue_asked"
TICKETS = "sqlaqueue_tickets"
_ONE_AT_A_TIME = 3
"""With so many handlers or fewer, suspects run one at a time: half of the handlers are left to the other jobs."""

TOKEN = "sqlaqueue_held_token"  # noqa: S105 - the name of a parameter


@dataclass(eq=False)
class Plan:
    """The statements and rules of one Consumer."""

    spec: QueueSpec
    claim: Any
    """Claims up to ``LIMIT`` jobs that are not marked as suspects, nor among the keys bound as ``EXCEPT``."""
    claim_aloud: Any
    """The same; when it commits, the others hear that jobs of the calls bound as ``TICKETS`` are taken."""
    claim_from: Any
    """As ``claim``, from the mark on whose parameters :meth:`mark_of` returns; None where a claim has no such order."""
    claim_from_aloud: Any
    """As ``claim_aloud``, from a mark on."""
    claim_suspect: Any
    """Claims one job that is marked as a suspect; None where rows cannot be marked."""
    claim_suspects: Any
    """Claims up to ``LIMIT`` suspects that may run together, under a token of their own kind; None where none
    may."""
    waiting_suspects: Any
    """Selects the keys of two of them, for a single one is claimed by ``claim_suspect``."""
    claim_key: Any
    """Claims the job with the key bound as ``KEYS``."""
    load_rest: Any
    """Loads what the mapping says that comes with the jobs bound as ``KEYS``, and a claim does not bring: columns of
    other tables, relationships that are joined, expressions. None where a claim brings everything."""
    complete: Any
    """Ends runs of the claim bound as ``TOKEN`` with success, of the jobs bound as ``KEYS``; None where it takes
    their instances to do so. Its rows begin with how many it ended; their keys follow only if it is not ``ASKED``."""
    takes_all: bool
    """The Consumer serves every job of its queue: what it does not find is not there."""
    options: tuple[Any, ...]
    """The loader options of the select that the Consumer was given."""
    worker: Callable[[], str]
    policy: RetryPolicy
    lease: timedelta
    timeout: float | None
    batch: bool
    batch_size: int
    concurrency: int
    dispatch: Dispatch | None = None
    """Calls the handler of a job's class, where each has one of its own."""
    look_for_suspects: bool = True
    """There may be marked suspects: at the start, and whenever jobs may have been rescued."""
    had_suspect: bool = False
    """The last claim took a suspect, so that the next one is for the others."""
    suspects: Suspects = field(default_factory=Suspects)
    entries: Entries = field(default_factory=Entries)
    """This Consumer's rows in the ledger."""
    bearings: Bearings = field(default_factory=Bearings)
    """From where it claims."""
    awaited: WaiterRegistry = field(default_factory=WaiterRegistry)
    """The jobs for whose end somebody waits."""
    conflicts: Conflicts = field(default_factory=Conflicts)
    """The jobs that the database has told to try again."""
    disconnected: set[Key] = field(default_factory=set)
    """Jobs that have lost a connection, where rows cannot tell."""
    asked: set[Key] = field(default_factory=set)
    """Jobs that somebody asked to stop before their handler was called."""
    level: str | None = None
    """The isolation level that the sessions' transactions have by default, as the server has said; None before that."""
    stopping: bool = False
    """The Consumer takes on no more work; what a batch has not started yet goes back."""

    def for_a_shift(self) -> Plan:
        """Return the plan of one run of the Consumer: a handler left over from another one never sees its stop."""
        return replace(
            self,
            suspects=Suspects(self.concurrency // 2),
            bearings=Bearings(),
            awaited=WaiterRegistry(),
            asked=set(),
            level=None,
            stopping=False,
        )

    def pace(self, poll: float, *, exactly: bool) -> Pace:
        """Return the timing of its Consumer.

        :param poll: seconds between looks at an empty queue.
        :param exactly: whether somebody has said how large a batch is.
        """
        if self.holds_transaction:
            # Each thread or task claims for itself. How many jobs commit together is the program's decision.
            return Pace(self.batch_size, 1, poll, whole=self.batch or exactly, cautious=True)
        # A handler that takes them together leaves none waiting.
        return Pace(self.batch_size, self.concurrency, poll, whole=self.batch)

    def units(self, jobs: Sequence[Any]) -> list[list[Any]]:
        """Return claimed jobs in lists for one call of a handler each."""
        if not self.batch:
            return [[job] for job in jobs]
        if self.dispatch is not None:
            return self.dispatch.groups(jobs)
        return [list(jobs)] if jobs else []

    def judge(self, error: BaseException | None, run: Run) -> Outcome:
        """Return how a run ends whose handler returned (``error`` is None) or raised."""
        if error is not None and (is_conflict(error) or isinstance(error, HeldUp)):
            times, delay = self.conflicts.meet(run.key)
            if self.spec.has("run_at") or times <= MOST_AT_ONCE:
                return Outcome("released", delay if self.spec.has("run_at") else None, cause=error)
        outcome = judge(error, run, self.policy, has_run_at=self.spec.has("run_at"))
        if outcome.ending == "cancelled" and self.spec.config.states.cancelled is None:
            # The table cannot say it, and the run has to end somehow: else it would be claimed again for ever.
            return replace(outcome, ending="failed")
        return outcome

    def judge_lost(self, error: BaseException, run: Run, *, alone: bool) -> Outcome:
        """Return how a run ends whose connection was lost.

        The server may have been restarted, or it may be the job that ends connections. So it costs no attempt, and from
        now on the job runs by itself; if it did so already, the attempt counts.
        """
        outcome = self.judge(error, run) if alone else Outcome("released", cause=error)
        return replace(outcome, suspect=outcome.state == "pending")

    def ran_alone(self, run: Run) -> bool:
        """Return whether a run under a lease that lost its connection is to blame for that, as far as one can know."""
        if self.claim_suspect is not None:
            return run.isolated
        # Rows cannot tell who is a suspect: this Consumer remembers it, as long as it runs.
        known = run.key in self.disconnected
        self.disconnected.add(run.key)
        return known

    def mark_of(self, jobs: Sequence[Any]) -> Mapping[str, Any] | None:
        """Return the parameters of a ``claim_from`` that goes on where that of ``jobs`` ended; None if none can."""
        if self.claim_from is None or not jobs:
            return None
        return backend().claims.cursor_at(self.spec, jobs[-1])

    @property
    def bind(self) -> dict[str, Any]:
        """Which engine statements go to, in a session that has several: some of them name no mapped class."""
        return {"mapper": self.spec.mapper}

    @property
    def holds_transaction(self) -> bool:
        """Whether claimed jobs belong to an open transaction."""
        return self.spec.strategy.holds_transaction

    @property
    def is_told(self) -> bool:
        """Whether the queue's table tells idle consumers of new jobs."""
        return backend().triggers.wakes(self.spec)

    @property
    def has_leases(self) -> bool:
        """Whether there are leases to extend and to rescue."""
        return not self.holds_transaction and self.spec.has("lease_expires_at")


def _check_words(spec: QueueSpec) -> None:
    """Refuse a queue whose runs could end in a way that its table has no word for."""
    needed = {"failed": "a job ends that has spent its attempts"}
    if spec.config.on_complete == "keep":
        needed["completed"] = 'a job ends that succeeded; or delete such jobs with on_complete="delete"'
    for state, why in needed.items():
        if spec.has("status") and getattr(spec.config.states, state) is None:
            msg = (
                f"Consumer: {spec.model.__name__} has no word for the state {state!r}; give one in "
                f"QueueConfig(states=States({state}=...)), for how {why}"
            )
            raise ConfigurationError(msg)


def _rest(chosen: JobSelection, are_these: sa.ColumnElement[bool]) -> Any:
    if not chosen.spec.strategy.keeps_rows:
        return None
    mapper = sa.inspect(chosen.entity)
    mappers = {mapper, *mapper.with_polymorphic_mappers}
    joined = any(each.lazy in {"joined", False, "subquery"} for one in mappers for each in one.relationships)
    computed = any(
        not (each.deferred or isinstance(each.columns[0], sa.Column)) for one in mappers for each in one.column_attrs
    )
    # Of instances that are there already, an ordinary SELECT loads what is not loaded yet, and leaves the rest alone.
    usual = sa.select(chosen.entity).where(are_these).options(*chosen.options)
    return usual if len(mappers) > 1 or joined or computed else None


def _may_run_together(spec: QueueSpec, candidates: AnySelect, concurrency: int) -> AnySelect | None:
    """Return those of ``candidates`` that are suspects and may run together, None where none may."""
    suspect = spec.strategy.quarantined(spec)
    if suspect is None or concurrency <= _ONE_AT_A_TIME or not spec.strategy.supports_claim_token:
        return None
    return candidates.where(suspect, ~lost_twice(spec)) if spec.has("lease_token") else None


def _two_waiting(spec: QueueSpec, suspects: AnySelect) -> AnySelect:
    waiting = spec.strategy.pick(spec, suspects, *spec.keys).where(spec.in_state("pending"))
    return waiting.where(*spec.due(spec.columns.get("run_at"))).limit(2)


def _completion(spec: QueueSpec) -> Any:
    tells_run = spec.strategy.holds_transaction and (spec.has("started_at") or spec.has("claimed_by"))
    # What is different for each batch is no part of a statement that is made once.
    if tells_run or not spec.strategy.keeps_rows:
        return None
    keys: sa.BindParameter[Any] = sa.bindparam(KEYS, (), expanding=len(spec.keys) > 1)
    verb = spec.strategy.settle(spec, ClaimedJobs([(sa.bindparam(TOKEN), keys)]), Settlement("completed"))
    if not isinstance(verb, sa.Update | sa.Delete):
        return None
    ended = verb.where(backend().claims.planned_anew()).returning(*named(spec.keys)).cte("ended")
    number = sa.select(sa.func.count()).select_from(ended).scalar_subquery()
    some_are_missing = number != sa.bindparam(ASKED, 0, sa.BigInteger())
    # Nearly always one row: to fetch a key for each job takes longer than to end its run.
    with_keys = sa.select(sa.literal(1)).subquery("one").outerjoin(ended, some_are_missing)
    return backend().guarded(sa.select(number, *ended.c).select_from(with_keys))


def make_plan(
    model: Any,
    *,
    batch_size: int | None,
    concurrency: int,
    lease: Delay | None,
    timeout: Delay | None,
    retry: RetryPolicy | None,
    name: str | None,
    batch: bool,
    handlers: Mapping[Any, Callable[..., Any]] | None = None,
) -> Plan:
    """Resolve what a Consumer was given.

    :raises ConfigurationError: for numbers that cannot be meant.
    :raises NotAQueueError: when ``model`` is no queue.
    :raises StatementError: when ``model`` is a select that cannot be claimed from.
    """
    for what, number in (("concurrency", concurrency), ("batch_size", BATCH if batch_size is None else batch_size)):
        given: object = number  # what a caller without a type checker passes may be anything
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            msg = f"Consumer({what}={number!r}): give an integer from 1 on"
            raise ConfigurationError(msg)
    if retry is not None and not callable(retry):
        msg = f"Consumer(retry={retry!r}): give a policy such as sqlaqueue.Exponential(), or a callable"
        raise ConfigurationError(msg)
    chosen = select_jobs(model, "Consumer")
    spec = chosen.spec
    dispatch = None if handlers is None else Dispatch("Consumer", chosen, handlers)
    if dispatch is not None:
        chosen = chosen._replace(select=dispatch.narrowed(chosen.select))
    _check_words(spec)
    if lease is not None:
        check_lease(lease, "Consumer(lease=...)")
    span = spec.lease if lease is None else timedelta(seconds=seconds(lease))
    if timeout is not None and seconds(timeout, "Consumer(timeout=...)") == 0:
        msg = f"Consumer(timeout={timeout!r}): no handler is done in zero seconds; give None for no limit"
        raise ConfigurationError(msg)

    def worker() -> str:
        return worker_name() if name is None else f"{worker_name()}:{name}"

    def claims(
        narrowed: AnySelect,
        limit: Any,
        token: Callable[[], uuid.UUID] = alone_token,
        *,
        tickets: Any = None,
        scan_range: ScanRange | None = None,
    ) -> Any:
        # The name is asked for at each claim: this process may be a copy of the one that made the Consumer.
        who = sa.bindparam(None, callable_=worker, type_=sa.Text())
        asked = chosen._replace(select=narrowed)
        # From a mark is claimed behind a claim that was full.
        of_many = scan_range is not None and scan_range is behind
        return claim_statement(
            asked,
            limit,
            lease=span,
            worker=who,
            token=token,
            announcements=tickets,
            scan_range=scan_range,
            many_due=of_many,
        )

    def is_among(name: str) -> sa.ColumnElement[bool]:
        return spec.key_in(spec.keys, sa.bindparam(name, (), expanding=len(spec.keys) > 1))

    head, behind = (
        (backend().claims.by_priority, backend().claims.from_cursor(spec))
        if spec.strategy.supports_scan_range
        else (None, None)
    )
    # Each execution brings its own values. Those given here are what a hook prints that writes them into the text:
    # of a parameter without any SQLAlchemy warns there.
    limit, one = sa.bindparam(LIMIT, 1, sa.Integer()), sa.literal(1)
    suspect = spec.strategy.quarantined(spec)
    together = _may_run_together(spec, chosen.select, concurrency)
    token = alone_token if concurrency == 1 else shared_token
    usual = chosen.select.where(~(is_among(EXCEPT) if suspect is None else suspect))
    tickets = sa.bindparam(TICKETS, "", sa.Text())
    return Plan(
        spec=spec,
        claim=claims(usual, limit, token, scan_range=head),
        claim_aloud=claims(usual, limit, token, tickets=tickets, scan_range=head),
        claim_from=behind and claims(usual, limit, token, scan_range=behind),
        claim_from_aloud=behind and claims(usual, limit, token, tickets=tickets, scan_range=behind),
        claim_suspect=None if suspect is None else claims(chosen.select.where(suspect), one),
        claim_suspects=None if together is None else claims(together, limit, several_quarantined_token),
        waiting_suspects=None if together is None else _two_waiting(spec, together),
        claim_key=claims(chosen.select.where(is_among(KEYS)), one),
        load_rest=_rest(chosen, is_among(KEYS)),
        complete=_completion(spec),
        takes_all=chosen.entity is spec.model and chosen.select.whereclause is None,
        options=chosen.options,
        worker=worker,
        policy=retry or spec.config.retry,
        lease=span,
        timeout=None if timeout is None else seconds(timeout),
        batch=batch,
        batch_size=batch_size or max(BATCH, concurrency),
        concurrency=concurrency,
        dispatch=dispatch,
    )
