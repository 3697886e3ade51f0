"""The base class of claim strategies, with the contract in its docstrings.

A strategy decides what a queue stores and indexes, what a claim locks and writes, and what remains when a worker dies.
It takes a :class:`~sqlaqueue.queue.spec.QueueSpec` and returns SQLAlchemy constructs, for sync and async code.

Subclass :class:`ClaimStrategy`, implement :meth:`~ClaimStrategy.claim`, override what differs, and register the class
under the entry point group ``sqlaqueue.strategies``.
:class:`~sqlaqueue.testing.conformance.StrategyConformance` tests a strategy against this contract.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import sqlalchemy as sa
from sqlalchemy.orm import InstrumentedAttribute

from sqlaqueue._typing import AnySelect
from sqlaqueue.flow_control.admission import admit
from sqlaqueue.postgresql.claim_scan import take_first
from sqlaqueue.postgresql.due_times import upcoming_times
from sqlaqueue.postgresql.side_tables import attempt, consumers, control, crash_journal, minute, request_cancellation
from sqlaqueue.postgresql.triggers import attach_wake_triggers
from sqlaqueue.postgresql.waits import changes_table, miscounted
from sqlaqueue.queue.names import TURN, WAITS
from sqlaqueue.queue.options import STATES, UNFINISHED
from sqlaqueue.queue.run import Key
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.queue.strategy_protocol import (
    CancelSteps,
    ChangeIfUnique,
    ClaimedJobs,
    ClaimRequest,
    FailSteps,
    JudgeSteps,
    KeyRange,
    LockSteps,
    LookSteps,
    RequiredPrivilege,
    ReturnSteps,
    ScanRange,
    Settlement,
    Verb,
)
from sqlaqueue.sql.engine import in_steps
from sqlaqueue.sql.portable import clock, earlier, is_among_rows
from sqlaqueue.strategies.attach import attach_retention, consumer_privileges, oldest_first
from sqlaqueue.strategies.columns import (
    AmongLocked,
    ListedKeys,
    add_index,
    column_of,
    holds_none_back,
    named,
    named_in,
    waits_for_none,
)
from sqlaqueue.strategies.listing import job_listing
from sqlaqueue.strategies.unique_key import (
    DUPLICATE,
    UniqueKey,
    attach_unique,
    columns_to_judge,
    judge,
    reason,
    unique_key,
    update_judged,
)

Change = TypeVar("Change", sa.Update, sa.Delete)

# -- statement parts ---------------------------------------------------------------------------------------------------
# The parts of which claim strategies make their statements: to pick, lock, compare and order rows.


def cancels_behind(spec: QueueSpec) -> bool:
    """Return whether the failure of a head cancels the jobs behind it."""
    return spec.config.order is not None and spec.config.order.on_failure == "cancel"


class StatementParts:
    """The methods that a :class:`~sqlaqueue.strategies.base.ClaimStrategy` inherits to make its statements."""

    @staticmethod
    def pick(spec: QueueSpec, candidates: AnySelect, *columns: sa.Column[Any]) -> AnySelect:
        """Return ``candidates`` reduced to ``columns`` of the model's table.

        Keys are selected as attributes of the entity, for which the ORM adds the discriminator of a single-table
        subclass.
        """
        entity = candidates.column_descriptions[0]["entity"]
        mapper = sa.inspect(entity)
        attributes: list[InstrumentedAttribute[Any] | sa.Column[Any]] = [
            getattr(entity, mapper.get_property_by_column(column).key) if column in spec.keys else column
            for column in columns
        ]
        return candidates.with_only_columns(*attributes, maintain_column_froms=True)

    @staticmethod
    def take(request: ClaimRequest, waiting: AnySelect, scanned: sa.FromClause, *others: sa.FromClause) -> sa.CTE:
        """Return the first due rows of ``waiting`` in claim order, locked together with those of ``others``.

        Under flow control they are the first that no limit, rate or order blocks.
        """
        if request.admits_all or not request.spec.flow_rules:
            return take_first(request, waiting, scanned, *others)
        return admit(request, waiting, *others)

    @staticmethod
    def first_due(
        spec: QueueSpec, waiting: AnySelect, scanned: sa.FromClause, limit: Any, scan_range: ScanRange | None
    ) -> AnySelect:
        """Return the first due rows of ``waiting`` in claim order, by the columns of ``scanned``."""
        run_at = spec.columns.get("run_at")
        order = [scanned.c[column.key] for column in spec.claim_order]
        due = spec.due(None if run_at is None else scanned.c[run_at.key])
        part = () if scan_range is None else (scan_range(order),)
        return waiting.where(*due, *part).order_by(*order).limit(limit)

    @staticmethod
    def lock(spec: QueueSpec, rows: AnySelect, *others: sa.FromClause, skip_locked: bool = True) -> AnySelect:
        """Return ``rows`` with the model's table locked, then ``others``, and no other table.

        ``FOR NO KEY UPDATE``: a plain ``FOR UPDATE`` conflicts with the key share lock that the foreign key of a child
        row takes, and SKIP LOCKED would silently skip such a job.
        """
        return rows.with_for_update(of=[spec.table, *others], skip_locked=skip_locked, key_share=True)

    @classmethod
    def among(
        cls, spec: QueueSpec, columns: Sequence[sa.ColumnElement[Any]], picked: AnySelect | sa.CTE
    ) -> sa.ColumnElement[bool]:
        """Return the condition that the key in ``columns`` is among ``picked``, which is executed exactly once.

        A nested loop can execute a locking subquery under IN several times, and each time it locks other rows. An
        uncorrelated ``ARRAY(SELECT ..)`` is executed once and uses the primary key's index even under a generic plan,
        and from PostgreSQL 17 on reads each page of it once for all keys. A comparison of composite keys with an array
        would scan the table, so these join a CTE; its locking clause keeps it from being inlined.
        """
        if len(spec.keys) == 1:
            keys = sa.select(column_of(picked, spec.keys[0])) if isinstance(picked, sa.CTE) else picked
            # Without correlate(None) a filter on a second table would be correlated with the UPDATE's own.
            return is_among_rows(columns[0], keys.correlate(None))
        return cls.same_key(spec, columns, picked if isinstance(picked, sa.CTE) else picked.cte("sqlaqueue_picked"))

    @staticmethod
    def same_key(
        spec: QueueSpec, columns: Sequence[sa.ColumnElement[Any]], rows: sa.FromClause
    ) -> sa.ColumnElement[bool]:
        """Return the condition that the key in ``columns`` is that of a row in ``rows``."""
        return sa.and_(*(column == column_of(rows, key) for column, key in zip(columns, spec.keys, strict=True)))

    @classmethod
    def _change_locked(
        cls, spec: QueueSpec, verb: Change, rows: AnySelect, *, waits: bool = False, of: AnySelect | None = None
    ) -> Change:
        """Return an UPDATE or DELETE of the rows that a SELECT of keys finds and locks.

        :param waits: whether it waits for rows that others have locked; otherwise it passes over them.
        :param of: the SELECT with its lock, for one with a limit.
        """
        locked, joins = cls.lock(spec, rows, skip_locked=not waits) if of is None else of, len(spec.keys) > 1
        if not joins:
            verb = verb.where(AmongLocked(spec.keys[0], locked.correlate(None).scalar_subquery()))
        elif isinstance(verb, sa.Update):
            verb = verb.where(cls.among(spec, spec.keys, locked))
        else:
            picked = locked.cte("sqlaqueue_picked")
            verb = verb.where(sa.tuple_(*spec.keys).in_(sa.select(*named_in(picked, spec.keys))))
        return in_steps(verb, LockSteps(spec.keys, rows, waits, joins=joins, limited=of is not None))

    @staticmethod
    def with_insert(spec: QueueSpec, verb: sa.Update | sa.Delete | sa.Insert, other: sa.Insert) -> AnySelect:
        """Return one statement that executes both, and selects the keys that ``verb`` changed.

        Both are CTEs of a SELECT: SQLAlchemy drops the RETURNING of an UPDATE with an INSERT among its CTEs.
        """
        changed = verb.returning(*named(spec.keys)).cte("sqlaqueue_changed")
        return sa.select(*changed.c).add_cte(other.cte("sqlaqueue_other"))

    @classmethod
    def in_claim_order(cls, spec: QueueSpec, claimed: sa.FromClause, picked: sa.CTE | None = None) -> AnySelect:
        """Return all rows of ``claimed`` in claim order, which neither RETURNING nor a locking scan guarantees.

        :param picked: the rows of which they were made. Where keys alternate, they have the order of the rounds.
        """
        turns = claimed if picked is None else picked
        order = [turns.c[TURN]] if TURN in turns.c else named_in(claimed, spec.claim_order)
        is_apart = TURN in turns.c and picked is not None
        rows = claimed.join(turns, cls.same_key(spec, named_in(claimed, spec.keys), turns)) if is_apart else claimed
        return sa.select(*claimed.c).select_from(rows).order_by(*order)

    @staticmethod
    def once_each(spec: QueueSpec, candidates: AnySelect, claimed: sa.CTE) -> sa.FromClause:
        """Return ``claimed`` without duplicates: a second table in the filter may match a job several times."""
        tables = candidates.get_final_froms()
        if len(tables) == 1 and not isinstance(tables[0], sa.Join):
            return claimed
        time = sa.func.row_number().over(partition_by=[column_of(claimed, key) for key in spec.keys])
        counted = sa.select(*claimed.c, time.label("sqlaqueue_time")).subquery("sqlaqueue_counted")
        once = sa.select(*(column_of(counted, column) for column in claimed.c)).where(counted.c.sqlaqueue_time == 1)
        return once.subquery("sqlaqueue_once_each")


TOKEN = "sqlaqueue_token"  # noqa: S105 - the name of a column
"""The column in which a claim that deletes the rows returns the token of its runs."""

PENDING_ROLES = ("priority", "run_at", "created_at")
"""The roles that :meth:`ClaimStrategy.pending_jobs` selects."""


class ClaimStrategy(StatementParts):
    """Base of all claim strategies; implements what most of them share."""

    name: ClassVar[str]
    """The name in ``QueueConfig(strategy=...)``."""
    holds_transaction: ClassVar[bool] = False
    """Whether a run belongs to the transaction that claimed the job (True), or to a lease (False)."""
    keeps_rows: ClassVar[bool] = True
    """Whether a claimed job's row still exists. If not, the claim returns detached instances."""

    supports_scan_range: ClassVar[bool] = False
    """Whether an index of the claim order supports claims, so that ``ClaimRequest.scan_range`` can bound a scan."""

    supports_claim_token: ClassVar[bool] = False
    """Whether a claim writes ``ClaimRequest.token`` into the rows, see ``sqlaqueue.strategies.update_status``."""

    supports_flow_control: ClassVar[bool] = False
    """Whether claims take rows by ``take()``."""

    tells_running_apart: ClassVar[bool] = False
    """Whether a running job reads as processing, and the strategy's settlements and rescues leave out a job whose
    place a duplicate has taken, see ``sqlaqueue.strategies.unique_key``. Only then can jobs be unique while they
    wait."""

    required_roles: ClassVar[Mapping[str, str]] = {"status": "every queue whose rows outlive the claim"}
    """The queue attributes that the strategy requires, each with the reason for the error message."""

    def for_roles(self, spec_roles: Mapping[str, Any]) -> ClaimStrategy:
        """Return the strategy for a model with these queue attributes; usually ``self``."""
        return self

    def attach(self, spec: QueueSpec) -> None:
        """Add indexes, side tables and triggers to the model's table and MetaData, once, when the class is mapped.

        ``create_all()`` must create all of it, and ``drop_all()`` must leave nothing behind.
        """
        control(spec)
        consumers(spec)
        if spec.config.notify:
            attach_wake_triggers(spec)
        if spec.config.retention:
            self.attach_retention(spec)
        if spec.config.attempt_history is not None:
            attempt(spec)
        if spec.config.statistics:
            minute(spec)
        if spec.config.waits:
            spec.side_tables[WAITS] = changes_table(spec)
            add_index(spec, "waiting", spec.keys, where=spec.in_state("waiting"))
        attach_unique(spec, self)

    def locked_tables(self, spec: QueueSpec) -> Sequence[sa.Table]:
        """Return the tables of which a claim locks rows: the model's, and then that of messages."""
        return [spec.table]

    def attach_retention(self, spec: QueueSpec) -> None:
        """Add the index for the deletion of finished jobs; called only with ``QueueConfig(retention=...)``."""
        attach_retention(spec)

    def required_privileges(self, spec: QueueSpec) -> Iterable[RequiredPrivilege]:
        """Return the privileges that a Consumer's role needs. A Consumer that lacks one does not start.

        By default: to read the jobs, to write what a settlement writes, what the library's own side tables need, and
        everything on any other side table.
        """
        return consumer_privileges(spec)

    # -- claiming ----------------------------------------------------------------------------------------

    def claim(self, request: ClaimRequest) -> AnySelect:
        """Return a SELECT of the claimed rows, with all columns of the model's table, in claim order.

        The statement must never return more than ``request.limit`` rows, nor a row that another transaction has
        locked, nor wait for a lock; regardless of the plan, and of what ``request.candidates`` joins.

        A strategy that deletes the rows may add a column named :data:`TOKEN`; its value is returned in
        :class:`~sqlaqueue.queue.strategy_protocol.ClaimedJobs`.
        """
        raise NotImplementedError

    def claim_in_steps(self, request: ClaimRequest) -> tuple[AnySelect, sa.Update | sa.Delete | None]:
        """Return a SELECT of the keys of the jobs that may be claimed, and what is written into the claimed rows.

        It is for engines that cannot execute a claim as one statement, which add order, limit, locks and keys. Nothing
        is written where a claim only holds the rows.
        """
        raise NotImplementedError

    def picked(self, request: ClaimRequest) -> sa.CTE:
        """Return the rows that the claim takes, locked, with their keys.

        A Consumer whose claim has failed looks among them for the row that is the cause. By default they are what
        :meth:`claim` returns, so a row that the database refuses to change is not found.
        """
        return self.claim(request).cte("sqlaqueue_picked")

    def quarantined(self, spec: QueueSpec) -> sa.ColumnElement[bool] | None:
        """Return the condition that a pending job's last worker died.

        Consumers claim such jobs separately. None if rows cannot show it; Consumers then use the crash journal.
        """
        return None

    def upcoming(self, spec: QueueSpec, limit: int, *, by_priority: bool) -> AnySelect:
        """Return a SELECT of when the next ``limit`` pending jobs will be due, the earliest first.

        :param by_priority: whether it reads as many entries of the claim's index for each priority, by a recursive
            query, and not the whole index.
        """
        waiting = [spec.in_state("pending")] if spec.has("status") else []
        return upcoming_times(spec, spec.table, waiting, limit, by_priority=by_priority)

    def pending_jobs(self, spec: QueueSpec, limit: int) -> AnySelect:
        """Return a SELECT of the pending jobs in claim order, from the table whose index claims scan.

        Its columns are those of ``priority``, ``run_at`` and ``created_at`` that the queue has; without any, the key.
        ``created_at`` is needed only where it says since when a job is due: if ``run_at`` is missing or null.

        :param limit: the number of jobs that the caller reads. Where no index has their times, no more are selected.
        """
        columns = [spec.columns[role].label(role) for role in PENDING_ROLES if spec.has(role)]
        waiting = [spec.in_state("pending")] if spec.has("status") else []
        return sa.select(*(columns or spec.keys)).where(*waiting).order_by(*spec.claim_order)

    def insert_new_messages(self, spec: QueueSpec, keys: Sequence[Key]) -> sa.Insert | None:
        """Return the INSERT of what scheduled jobs need in addition to their rows; None if triggers insert it."""
        return None

    # -- settling and extending runs -----------------------------------------------------------------------

    def fence(self, spec: QueueSpec, held: ClaimedJobs) -> sa.ColumnElement[bool]:
        """Return the condition that a row still belongs to one of the claims in ``held``."""
        return sa.or_(*(spec.key_in(spec.keys, keys) for _, keys in held.claims))

    def settle(self, spec: QueueSpec, held: ClaimedJobs, settlement: Settlement) -> Verb:
        """Return the statement that settles runs; it must not change a run whose lease is lost."""
        mine = self.fence(spec, held)
        if settlement.state == "completed" and spec.config.on_complete == "delete":
            return sa.delete(spec.model).where(mine)
        settled = sa.update(spec.model).where(mine).values(self.settled_values(spec, settlement))
        return self.failing(spec, settled, mine, waits=True) if settlement.state == "failed" else settled

    @staticmethod
    def failing(spec: QueueSpec, verb: Verb, failing: sa.ColumnElement[bool], *, waits: bool) -> Verb:
        """Return a statement that fails jobs, marked if those behind a failed head are to be cancelled.

        A trigger of PostgreSQL does that; other engines do it before they execute the statement.
        """
        return in_steps(verb, FailSteps(spec, failing, waits)) if cancels_behind(spec) else verb

    def settled_values(self, spec: QueueSpec, settlement: Settlement) -> dict[sa.Column[Any], Any]:
        """Return the values that a settlement writes into the row."""
        values: dict[str, Any] = {"status": spec.status_value(settlement.state)}
        values["finished_at"] = None if settlement.state == "pending" else clock()
        kept = {"lease_token": settlement.quarantine, "claimed_by": spec.keeps_claimed_by}
        values |= {role: None for role in ("lease_token", "lease_expires_at", "claimed_by") if not kept.get(role)}
        if settlement.started_at is not None:
            values |= {"started_at": settlement.started_at, "claimed_by": settlement.worker}
        if settlement.run_at is not None:
            values["run_at"] = settlement.run_at
        if settlement.error is not None:
            values["last_error"] = spec.truncated_error(settlement.error)
        if spec.has("attempts"):
            counted = self.counted(spec.columns["attempts"], settlement)
            if counted is not None:
                values["attempts"] = counted
        return {spec.columns[role]: value for role, value in values.items() if spec.has(role)}

    def counted(self, attempts: sa.ColumnElement[Any], settlement: Settlement) -> sa.ColumnElement[Any] | None:
        """Return the new value of ``attempts`` when a run is settled; None leaves it.

        This default is for a claim that writes nothing, so that the settlement counts. It writes an unchanged count as
        well: the instance has counted the start, and is refreshed with what is written.
        """
        counted: sa.ColumnElement[Any] = sa.func.coalesce(attempts, 0) + settlement.starts
        return counted

    def extend(self, spec: QueueSpec, held: ClaimedJobs, lease: Any) -> Verb:
        """Return the statement that extends leases; a strategy without leases changes nothing."""
        return sa.select(spec.model).where(self.fence(spec, held))

    def restore(self, spec: QueueSpec, held: ClaimedJobs) -> Verb | None:
        """Return the statement that makes jobs claimable again whose claim was committed before their runs ended.

        It returns their keys. None if a committed claim consumes nothing. A job that is pending, or that another
        transaction holds, is left alone: its claim was rolled back, or it has been restored already.
        """
        keys = [key for _, listed in held.claims if not isinstance(listed, sa.BindParameter) for key in listed]
        return self.reconcile_range(spec, ListedKeys(spec=spec, keys=keys))

    # -- maintenance and administration ----------------------------------------------------------------------

    def rescue(self, spec: QueueSpec) -> Verb:
        """Return the statement that rescues jobs whose lease has expired; without leases it changes nothing.

        With an attempt history it also inserts the attempts that the rescue ends, see
        ``sqlaqueue.strategies.listing``: afterwards the rows do not show them any more.
        """
        return sa.select(spec.model).where(sa.false())

    def rescue_some(self, spec: QueueSpec, keys: Sequence[Key]) -> Verb:
        """Return the rescue of some jobs, by which Consumers rescue; by default it rescues all other jobs as well.

        A strategy with leases overrides it, so that one job which the database refuses to change keeps no other from
        being rescued.
        """
        return self.rescue(spec)

    def reconcile(self, spec: QueueSpec) -> Verb:
        """Return the statement that repairs what bypassed the triggers; without triggers it changes nothing."""
        if spec.config.waits:
            return in_steps(sa.select(*self._look_again(spec, KeyRange()).c), LookSteps(spec, KeyRange()))
        return sa.select(spec.model).where(sa.false())

    def reconcile_range(self, spec: QueueSpec, part: KeyRange) -> Verb | None:
        """Return the statement that repairs jobs in a range of keys; None if it cannot read a table in parts."""
        if not spec.config.waits:
            return None
        return in_steps(sa.select(*self._look_again(spec, part).c), LookSteps(spec, part))

    @staticmethod
    def _look_again(spec: QueueSpec, part: KeyRange) -> sa.CTE:
        """Return the jobs whose count of awaited jobs is wrong; the trigger at the commit counts again.

        Nothing is locked before: the trigger takes its locks in an order of its own.
        """
        wrong = miscounted(spec).where(part.holds(spec.keys)).cte("sqlaqueue_miscounted")
        changes = spec.side_tables[WAITS]
        keys = sa.func.jsonb_agg(sa.func.jsonb_build_array(*wrong.c, 0, sa.false()), type_=changes.c["keys"].type)
        looks = sa.select(sa.literal("", sa.Text()), keys).having(sa.func.count() > 0)
        recorded = sa.insert(changes).from_select(["relation", "keys"], looks).cte("sqlaqueue_looks")
        return sa.select(*wrong.c).add_cte(recorded).cte("sqlaqueue_recounted")

    def cancel(self, spec: QueueSpec, chosen: AnySelect) -> Verb:
        """Return the statement that cancels pending jobs and requests the cancellation of running ones.

        A row that another transaction has locked counts as running: waiting for it could take as long as a handler.

        :param chosen: a SELECT of the model with the conditions on the jobs.
        """
        waiting = self.pick(spec, chosen, *spec.keys).where(self.not_running(spec)).order_by(*spec.keys)
        free = self.lock(spec, waiting).cte("sqlaqueue_free")
        if spec.config.waits:
            free = self._free_to_cancel(spec, chosen, free)
            is_free = sa.or_(self.not_running(spec), spec.in_state("waiting"))
            waiting = self.pick(spec, chosen, *spec.keys).where(is_free).order_by(*spec.keys)
        unfinished = self.pick(spec, chosen, *spec.keys).where(spec.in_state(*UNFINISHED))
        wanted = unfinished.cte("sqlaqueue_wanted")
        if not spec.config.notify:
            # Citus inlines a CTE that is read once into the INSERT, and then writes an INSERT that its shards refuse.
            wanted = wanted.prefix_with("MATERIALIZED")
        running = sa.select(*wanted.c).except_(sa.select(*free.c)).subquery("sqlaqueue_running")
        values: dict[str, Any] = {"status": spec.status_value("cancelled"), "finished_at": clock(), "lease_token": None}
        cancelled = sa.update(spec.table).values(
            {spec.columns[role]: value for role, value in values.items() if spec.has(role)}
        )
        mine = self.same_key(spec, spec.keys, free)
        verb = self.with_insert(spec, cancelled.where(mine), request_cancellation(spec, running))
        return in_steps(verb, CancelSteps(spec, waiting, unfinished, cancelled))

    def _free_to_cancel(self, spec: QueueSpec, chosen: AnySelect, free: sa.CTE) -> sa.CTE:
        """Return the free jobs with those that wait for others.

        Such a job is locked for the length of a commit only, and nobody runs it, so a request would be forgotten.
        """
        rows = self.pick(spec, chosen, *spec.keys).where(spec.in_state("waiting")).order_by(*spec.keys)
        others = self.lock(spec, rows, skip_locked=False).cte("sqlaqueue_waiting")
        return sa.union_all(sa.select(*free.c), sa.select(*others.c)).cte("sqlaqueue_all_free")

    def not_running(self, spec: QueueSpec) -> sa.ColumnElement[bool]:
        """Return the condition that an unfinished job has no run, so that it can be cancelled immediately."""
        return spec.in_state("pending")

    def requeue(self, spec: QueueSpec, chosen: AnySelect) -> Verb:
        """Return the statement that makes finished jobs pending again, with no attempt counted.

        :param chosen: a SELECT of the model with the conditions on the jobs.
        """
        finished = self.pick(spec, chosen, *spec.keys).where(spec.finished).order_by(*spec.keys)
        values: dict[str, Any] = {
            "status": spec.status_value("pending"),
            "attempts": 0,
            "finished_at": None,
            "run_at": clock(),
        }
        back = {spec.columns[role]: value for role, value in values.items() if spec.has(role)}
        unique = unique_key(spec)
        if unique is not None:
            pending = {**back, spec.columns["status"]: spec.literal("pending")}
            error, cancels = spec.columns.get("last_error"), unique.config.on_return == "cancel"

            def change(judged: Any) -> ChangeIfUnique:
                instead = self.values_for_duplicate(spec, judged, error) if cancels else {}
                # What is completed stays completed.
                where = [sa.or_(judged.c[DUPLICATE].is_(None), ~spec.in_state("completed"))]
                return ChangeIfUnique(pending, instead, where)

            rows = finished.add_columns(*columns_to_judge(spec, unique))
            verb: Verb = self._change_if_unique(unique, JudgeSteps(spec, rows, waits=True, more=(), change=change))
        else:
            verb = self._change_locked(spec, sa.update(spec.model), finished, waits=True).values(back)
        is_cause = any(wait.on_failure == "cancel" for wait in spec.awaited_by)
        return in_steps(verb, ReturnSteps(spec, finished)) if is_cause else verb

    def _change_if_unique(self, unique: UniqueKey, steps: JudgeSteps) -> AnySelect:
        """Return the statement that changes jobs unless they have a duplicate, and selects their keys."""
        spec = steps.spec
        judged = judge(spec, unique, self.lock(spec, steps.rows, skip_locked=not steps.waits), *steps.more)
        return in_steps(update_judged(spec, judged, steps.change(judged)), steps)

    def values_for_duplicate(
        self, spec: QueueSpec, judged: Any, error: sa.ColumnElement[Any] | None = None
    ) -> dict[sa.Column[Any], Any]:
        """Return the values that cancel jobs whose place a duplicate has taken; they count no attempt.

        :param error: the error of the last run, which is kept.
        """
        status = {spec.columns["status"]: spec.literal("cancelled")}
        values = self.settled_values(spec, Settlement("cancelled", error=reason(judged.c[DUPLICATE], error))) | status
        return {column: value for column, value in values.items() if column is not spec.columns.get("attempts")}

    def purge(self, spec: QueueSpec, chosen: AnySelect, states: Sequence[str], age: Any, limit: Any) -> Verb:
        """Return the statement that deletes up to ``limit`` jobs.

        :param chosen: a SELECT of the model with the conditions on the jobs.
        :param states: the names of the states to delete from.
        :param age: a bound interval: how long ago the jobs finished at least; None for any age.
        """
        kept = [*holds_none_back(spec), *waits_for_none(spec)]
        old = self.pick(spec, chosen, *spec.keys).where(spec.in_state(*states), *kept).limit(limit)
        if age is not None:
            finished_at = spec.column("finished_at", "purge(older_than=...)")
            old = old.where(finished_at <= earlier(clock(), age)).order_by(*oldest_first(spec, states, finished_at))
        # A DELETE needs the full row lock. With a weaker one here it would wait for the locks of foreign keys.
        locked = old.with_for_update(of=spec.table, skip_locked=True)
        return self._change_locked(spec, sa.delete(spec.model), old, of=locked)

    def list_jobs(self, spec: QueueSpec, chosen: AnySelect, states: Sequence[str] | None = None) -> AnySelect:
        """Return a SELECT of jobs for operators, from the table that stores them.

        Its columns: ``key_0`` and so on, the parts of the key; ``state``, the name of the state, or ``other``; and
        those of ``sqlaqueue.strategies.listing.SHOWN`` that the queue has.

        :param chosen: a SELECT of the model with the conditions on the jobs.
        :param states: the names of the states to select; None for all.
        """
        return job_listing(spec, chosen, states)

    def job_states(self, spec: QueueSpec, keys: Sequence[Key]) -> AnySelect:
        """Return a SELECT of the key, the state's name and the last error of jobs: no row for one that does not exist.

        The name is null for a job whose status is not one of the queue's values.
        """
        known = [state for state in STATES if getattr(spec.config.states, state) is not None]
        name = sa.case(*((spec.in_state(state), sa.literal(state, sa.Text())) for state in known), else_=None)
        error = spec.columns.get("last_error", sa.null())
        return sa.select(*spec.keys, name, error).where(spec.key_in(spec.keys, keys))


# -- held --------------------------------------------------------------------------------------------------------------
# The base of strategies whose claim is a transaction: it holds the jobs until it commits or is rolled back.


class HeldStrategy(ClaimStrategy):
    """A strategy whose runs belong to the transaction that claimed the jobs.

    The database rolls back the claim of a worker that dies, so the crash journal stores which jobs it was running.
    """

    holds_transaction: ClassVar[bool] = True

    def attach(self, spec: QueueSpec) -> None:
        """Add the crash journal."""
        super().attach(spec)
        crash_journal(spec)

    def fence(self, spec: QueueSpec, held: ClaimedJobs) -> sa.ColumnElement[bool]:
        """Return the condition that a row is not settled yet; the transaction's lock excludes all others.

        Rows without a status are deleted by the claim.
        """
        held_rows = super().fence(spec, held)
        return sa.and_(held_rows, spec.in_state("pending")) if spec.has("status") else held_rows
