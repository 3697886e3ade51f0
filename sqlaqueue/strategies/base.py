"""The contract of a claim strategy.

A strategy decides what a queue stores, what it indexes, what a claim locks and writes, and what is left behind when a
worker dies. It takes a :class:`~sqlaqueue.queue.spec.QueueSpec` and returns SQLAlchemy constructs, for sync and
async code.

Subclass :class:`ClaimStrategy`, implement the methods without a default, and register the class under the entry point
group ``sqlaqueue.strategies``. :class:`sqlaqueue.testing.StrategyConformance` tells whether it keeps the contract.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.orm import InstrumentedAttribute, Mapper
from sqlalchemy.sql.elements import KeyedColumnElement

from sqlaqueue._typing import AnySelect
from sqlaqueue.keys import Key
from sqlaqueue.queue.backend import backend
from sqlaqueue.queue.config import STATES
from sqlaqueue.queue.spec import QueueSpec, clock
from sqlaqueue.queue.strategy import (
    ClaimedJobs,
    ClaimRequest,
    KeyRange,
    RequiredPrivilege,
    ScanRange,
    Settlement,
    Verb,
)
from sqlaqueue.strategies.job_listing import job_listing
from sqlaqueue.strategies.required_privileges import consumer_privileges
from sqlaqueue.strategies.retention_index import attach_retention, oldest_first

TOKEN = "sqlaqueue_token"  # noqa: S105 - the name of a column
"""The name of the column in which a claim that hands out no rows returns the token of its runs."""


@dataclass(frozen=True)
class _Listed(KeyRange):
    """Some jobs by their keys."""

    spec: QueueSpec | None = None
    keys: Sequence[Key] = ()

    def holds(self, columns: Sequence[sa.ColumnElement[Any]]) -> sa.ColumnElement[bool]:
        """Return the condition that the key in ``columns`` is one of these."""
        return sa.true() if self.spec is None else self.spec.key_in(columns, self.keys)


class ClaimStrategy:
    """Base of all claim strategies; what every strategy does alike is implemented here."""

    name: ClassVar[str]
    """The name in ``QueueConfig(strategy=...)``."""

    holds_transaction: ClassVar[bool] = False
    """Whether a job belongs to the transaction that claimed it (True) or to a lease (False)."""

    keeps_rows: ClassVar[bool] = True
    """Whether a claimed job's row still exists; where not, instances are handed out detached."""

    supports_scan_range: ClassVar[bool] = False
    """Whether a claim is served by an index of the claim order, so that it may begin at a position."""

    supports_claim_token: ClassVar[bool] = False
    """Whether a claim writes ``ClaimRequest.token`` into the rows, see ``sqlaqueue.strategies.claim_tokens``."""

    required_roles: ClassVar[Mapping[str, str]] = {"status": "every queue whose rows outlive the claim"}
    """The roles this strategy cannot do without, each with the reason for the error message."""

    def for_roles(self, spec_roles: Mapping[str, Any]) -> ClaimStrategy:
        """Return the strategy that serves a model with these roles; usually ``self``."""
        return self

    def attach(self, spec: QueueSpec) -> None:
        """Add indexes, side tables and triggers to the model's table and MetaData, once, when the class is mapped.

        ``create_all()`` must create all of it and ``drop_all()`` leave nothing behind.
        """
        backend().side_tables.control(spec)
        backend().side_tables.consumers(spec)
        if spec.config.notify:
            backend().triggers.attach_wake_triggers(spec)
        if spec.config.retention:
            self.attach_retention(spec)

    def attach_retention(self, spec: QueueSpec) -> None:
        """Add what the deletion of finished jobs needs; called only where the config asks for that."""
        attach_retention(spec)

    def required_privileges(self, spec: QueueSpec) -> Iterable[RequiredPrivilege]:
        """Return what the role of a Consumer has to be granted; it is told when it starts without.

        By default: to read the jobs, to write what the end of a run writes into them, and what the side tables of
        this library need; of any other side table everything.
        """
        return consumer_privileges(spec)

    # -- claiming ----------------------------------------------------------------------------------------

    def claim(self, request: ClaimRequest) -> AnySelect:
        """Return a SELECT of the claimed rows, all columns of the model's table, in claim order.

        A strategy that hands out no rows may add a column called :data:`TOKEN`, which then comes back in
        :class:`ClaimedJobs`.

        The statement must never hand out more than ``request.limit`` rows, nor one that another transaction has
        locked, nor wait for a lock; whatever the plan, and whatever ``request.candidates`` joins.
        """
        raise NotImplementedError

    def quarantined(self, spec: QueueSpec) -> sa.ColumnElement[bool] | None:
        """Return the condition that a waiting job was in the hands of a worker that died.

        Consumers claim such jobs one at a time. None where rows cannot tell; the Consumer then keeps the ledger.
        """
        return None

    def upcoming(self, spec: QueueSpec, limit: int) -> AnySelect:
        """Return a SELECT of when the next ``limit`` waiting jobs will be due, that are not yet; the first one first.

        It reads as much of the claim's index for each priority that occurs, not the whole of it.
        """
        waiting = [spec.in_state("pending")] if spec.has("status") else []
        return backend().claims.upcoming_times(spec, spec.table, waiting, limit)

    # -- ending and extending a run ------------------------------------------------------------------------

    def fence(self, spec: QueueSpec, held: ClaimedJobs) -> sa.ColumnElement[bool]:
        """Return the condition that a row is still in the hands of the claims in ``held``."""
        return sa.or_(*(spec.key_in(spec.keys, keys) for _, keys in held.claims))

    def settle(self, spec: QueueSpec, held: ClaimedJobs, settlement: Settlement) -> Verb:
        """Return the statement that ends runs; a run that is no longer held is left alone."""
        whose = self.fence(spec, held)
        if settlement.state == "completed" and spec.config.on_complete == "delete":
            return sa.delete(spec.model).where(whose)
        return sa.update(spec.model).where(whose).values(self.settled_values(spec, settlement))

    def settled_values(self, spec: QueueSpec, settlement: Settlement) -> dict[sa.Column[Any], Any]:
        """Return what an ended run writes into its row."""
        values: dict[str, Any] = {"status": spec.status_value(settlement.state)}
        values["finished_at"] = None if settlement.state == "pending" else clock()
        kept = {"lease_token": settlement.suspect, "claimed_by": spec.keeps_claimed_by}
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
        """Return the new value of ``attempts`` when a run ends, None to leave it.

        A claim that writes nothing into the row leaves the counting to the settlement: this default. It writes a
        count that stays the same as well, since the instance shows the start, and is refreshed by what is written.
        """
        counted: sa.ColumnElement[Any] = sa.func.coalesce(attempts, 0) + settlement.starts
        return counted

    def extend(self, spec: QueueSpec, held: ClaimedJobs, lease: Any) -> Verb:
        """Return the statement that moves the end of leases; a strategy without leases changes nothing."""
        return sa.select(spec.model).where(self.fence(spec, held))

    def restore(self, spec: QueueSpec, held: ClaimedJobs) -> Verb | None:
        """Return the statement that makes jobs claimable again whose claim was committed before their runs ended.

        It returns their keys. None where a committed claim consumes nothing. A job that is pending or that another
        transaction holds is left alone: its claim was rolled back, or it has been restored already.
        """
        keys = [key for _, listed in held.claims if not isinstance(listed, sa.BindParameter) for key in listed]
        return self.reconcile_range(spec, _Listed(spec=spec, keys=keys))

    # -- tending the queue -----------------------------------------------------------------------------------

    def rescue(self, spec: QueueSpec) -> Verb:
        """Return the statement that takes jobs back whose lease is over; nothing where there are none."""
        return sa.select(spec.model).where(sa.false())

    def reconcile(self, spec: QueueSpec) -> Verb:
        """Return the statement that mends what bypassed the triggers; nothing where there are none."""
        return sa.select(spec.model).where(sa.false())

    def reconcile_range(self, spec: QueueSpec, part: KeyRange) -> Verb | None:
        """Return the same for some of the jobs only, so that a large table is not read at one go; None if it cannot."""
        return None

    def cancel(self, spec: QueueSpec, chosen: AnySelect) -> Verb:
        """Return the statement that cancels waiting jobs and asks running ones to stop.

        Rows that another transaction has locked count as running: to wait for them could take as long as a handler.

        :param chosen: a SELECT of the model with the conditions on the jobs.
        """
        waiting = self.pick(spec, chosen, *spec.keys).where(spec.in_state("pending"))
        free = self.lock(spec, waiting.order_by(*spec.keys)).cte("free")
        wanted = self.pick(spec, chosen, *spec.keys).where(spec.in_state("pending", "processing")).cte("wanted")
        running = sa.select(*wanted.c).except_(sa.select(*free.c)).subquery("running")
        values: dict[str, Any] = {"status": spec.status_value("cancelled"), "finished_at": clock(), "lease_token": None}
        cancelled = (
            sa.update(spec.table)
            .where(self.same_key(spec, spec.keys, free))
            .values({spec.columns[role]: value for role, value in values.items() if spec.has(role)})
        )
        return self.beside(spec, cancelled, backend().side_tables.request_cancellation(spec, running))

    def requeue(self, spec: QueueSpec, chosen: AnySelect) -> Verb:
        """Return the statement that makes finished ones of the chosen jobs wait again, their attempts from zero."""
        over = self.pick(spec, chosen, *spec.keys).where(spec.finished).order_by(*spec.keys)
        values: dict[str, Any] = {
            "status": spec.status_value("pending"),
            "attempts": 0,
            "finished_at": None,
            "run_at": clock(),
        }
        return (
            sa.update(spec.model)
            .where(self.among(spec, spec.keys, self.lock(spec, over, skip_locked=False)))
            .values({spec.columns[role]: value for role, value in values.items() if spec.has(role)})
        )

    def purge(self, spec: QueueSpec, chosen: AnySelect, states: Sequence[str], age: Any, limit: Any) -> Verb:
        """Return the statement that deletes up to ``limit`` of the chosen jobs.

        :param chosen: a SELECT of the model with the conditions on the jobs.
        :param states: the names of the states to delete from.
        :param age: a bound interval: how long the jobs have been finished; None for any.
        """
        old = self.pick(spec, chosen, *spec.keys).where(spec.in_state(*states)).limit(limit)
        if age is not None:
            finished_at = spec.column("finished_at", "purge(older_than=...)")
            old = old.where(finished_at <= clock() - age).order_by(*oldest_first(spec, states, finished_at))
        # A DELETE needs the full row lock; asking for less here would make it wait for foreign keys' locks.
        return sa.delete(spec.model).where(
            self.among(spec, spec.keys, old.with_for_update(of=spec.table, skip_locked=True))
        )

    def list_jobs(self, spec: QueueSpec, chosen: AnySelect, states: Sequence[str] | None = None) -> AnySelect:
        """Return a SELECT of jobs as an operator sees them, whatever table they are kept in.

        Its columns: ``key_0`` and so on, the parts of the key; ``state``, the name of the state, or ``other``; and
        those of ``sqlaqueue.strategies.job_listing.SHOWN`` that the queue has.

        :param chosen: a SELECT of the model with the conditions on the jobs.
        :param states: the names of states to select; None for all.
        """
        return job_listing(spec, chosen, states)

    def job_state(self, spec: QueueSpec, key: Key) -> AnySelect:
        """Return a SELECT of the state's name and the last error of one job: no row where there is no such job.

        The name is null for a job whose status is none of the queue's.
        """
        known = [state for state in STATES if getattr(spec.config.states, state) is not None]
        name = sa.case(*((spec.in_state(state), sa.literal(state, sa.Text())) for state in known), else_=None)
        return sa.select(name, spec.columns.get("last_error", sa.null())).where(spec.key_in(spec.keys, [key]))

    # -- the parts that strategies share ------------------------------------------------------------------

    @staticmethod
    def pick(spec: QueueSpec, candidates: AnySelect, *columns: sa.Column[Any]) -> AnySelect:
        """Return ``candidates`` reduced to ``columns`` of the model's table.

        Keys are selected as attributes of the candidates' entity: it is these that make the ORM add the
        discriminator of a single-table subclass.
        """
        entity = candidates.column_descriptions[0]["entity"]
        mapper = sa.inspect(entity)
        attributes: list[InstrumentedAttribute[Any] | sa.Column[Any]] = [
            getattr(entity, mapper.get_property_by_column(column).key) if column in spec.keys else column
            for column in columns
        ]
        return candidates.with_only_columns(*attributes, maintain_column_froms=True)

    @staticmethod
    def best(
        spec: QueueSpec, waiting: AnySelect, scanned: sa.FromClause, limit: Any, scan_range: ScanRange | None
    ) -> AnySelect:
        """Return the best due rows of ``waiting``, judged by the order and the time that ``scanned`` knows of them."""
        run_at = spec.columns.get("run_at")
        order = [scanned.c[column.key] for column in spec.claim_order]
        due = spec.due(None if run_at is None else scanned.c[run_at.key])
        part = () if scan_range is None else (scan_range(order),)
        return waiting.where(*due, *part).order_by(*order).limit(limit)

    @staticmethod
    def lock(spec: QueueSpec, rows: AnySelect, *others: sa.FromClause, skip_locked: bool = True) -> AnySelect:
        """Return ``rows`` with the model's table locked, then ``others``, and nothing else.

        ``FOR NO KEY UPDATE``: a plain ``FOR UPDATE`` conflicts with the key share lock that the foreign key
        of a child row takes, and SKIP LOCKED would then pass such a job over without a word.
        """
        return rows.with_for_update(of=[spec.table, *others], skip_locked=skip_locked, key_share=True)

    @classmethod
    def among(
        cls, spec: QueueSpec, columns: Sequence[sa.ColumnElement[Any]], picked: AnySelect | sa.CTE
    ) -> sa.ColumnElement[bool]:
        """Return the condition that the key in ``columns`` is among ``picked``, which runs exactly once.

        A locking subquery under IN can be run again by a nested loop, and each run takes other rows. An
        uncorrelated ``ARRAY(SELECT ..)`` runs once, and stays on the primary key's index under a generic plan, which
        from PostgreSQL 17 on reads each page of it once for all keys; a comparison of composite keys with an array
        would scan the table, so these join a CTE, which a locking clause keeps from being folded into the query.
        """
        if len(spec.keys) == 1:
            keys = sa.select(column_of(picked, spec.keys[0])) if isinstance(picked, sa.CTE) else picked
            # Without correlate(None) a filter on a second table would be correlated with the UPDATE's own.
            return columns[0] == sa.any_(sa.func.array(keys.correlate(None).scalar_subquery()))
        return cls.same_key(spec, columns, picked if isinstance(picked, sa.CTE) else picked.cte("picked"))

    @staticmethod
    def same_key(
        spec: QueueSpec, columns: Sequence[sa.ColumnElement[Any]], rows: sa.FromClause
    ) -> sa.ColumnElement[bool]:
        """Return the condition that the key in ``columns`` is that of a row in ``rows``."""
        return sa.and_(*(column == column_of(rows, key) for column, key in zip(columns, spec.keys, strict=True)))

    @staticmethod
    def beside(spec: QueueSpec, verb: sa.Update | sa.Delete | sa.Insert, other: sa.Insert) -> AnySelect:
        """Return one statement that does both and selects the keys that ``verb`` changed.

        Both are CTEs of a SELECT, since an INSERT among the CTEs of an UPDATE makes SQLAlchemy lose its RETURNING.
        """
        changed = verb.returning(*named(spec.keys)).cte("changed")
        return sa.select(*changed.c).add_cte(other.cte("other"))

    @staticmethod
    def in_claim_order(spec: QueueSpec, claimed: sa.FromClause) -> AnySelect:
        """Return all rows of ``claimed`` sorted as the queue is: neither RETURNING nor a locking scan promises it."""
        return sa.select(*claimed.c).order_by(*(column_of(claimed, column) for column in spec.claim_order))

    @staticmethod
    def once_each(spec: QueueSpec, candidates: AnySelect, claimed: sa.CTE) -> sa.FromClause:
        """Return ``claimed`` without repetitions: a second table in the filter may match a job several times."""
        tables = candidates.get_final_froms()
        if len(tables) == 1 and not isinstance(tables[0], sa.Join):
            return claimed
        time = sa.func.row_number().over(partition_by=[column_of(claimed, key) for key in spec.keys])
        counted = sa.select(*claimed.c, time.label("sqlaqueue_time")).subquery("counted")
        once = sa.select(*(column_of(counted, column) for column in claimed.c)).where(counted.c.sqlaqueue_time == 1)
        return once.subquery("once_each")


def attribute_names(mapper: Mapper[Any]) -> dict[sa.ColumnElement[Any], str]:
    """Return the columns of a class with the names of their attributes."""
    return {column: attribute.key for attribute in mapper.column_attrs for column in attribute.columns}


def named(columns: Iterable[sa.Column[Any]]) -> list[sa.Label[Any]]:
    """Return what a statement in a CTE is to return, under names that the rest of the query finds.

    SQLAlchemy 2.1 refers to a column with a name of more than 57 characters by a shorter one, under which an UPDATE or
    DELETE does not return it.
    """
    return [column.label(column.key) for column in columns]


def column_of(rows: sa.FromClause, column: KeyedColumnElement[Any]) -> sa.ColumnElement[Any]:
    """Return the column of ``rows`` that stems from ``column`` of the model's table."""
    found = rows.corresponding_column(column)
    if found is None:
        msg = f"{column} is not among the columns of {rows}"
        raise LookupError(msg)
    return found
