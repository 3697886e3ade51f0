"""Claim by DELETE .. RETURNING from a narrow message table, joined to the job's row.

* **Stores** a message for every pending job: its key and the columns of the claim order. Triggers on the job table
  maintain the messages for every writer: the ORM, bulk inserts, COPY or plain SQL.
* **Claims** by deleting messages. One SELECT locks message and job, both with SKIP LOCKED: locking the message first
  could deadlock with a transaction that cancels the job, and locking the job alone would lose its message.
* **While a job runs** its transaction stays open. The handler's writes, the settlement and the claim commit together.
* **When a worker dies** its transaction ends, and the message is back at once.

With ``rows_are_messages=True`` a row is its own message; :mod:`sqlaqueue.strategies.delete_row` serves such a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.sql.elements import conv

from sqlaqueue._typing import AnySelect
from sqlaqueue.flow_control.keys import flow_control
from sqlaqueue.postgresql.catalog import sees_all
from sqlaqueue.postgresql.due_times import upcoming_times
from sqlaqueue.postgresql.triggers import attach_message_triggers
from sqlaqueue.queue.names import MESSAGES
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.queue.strategy_protocol import ClaimedJobs, ClaimRequest, KeyRange, Settlement, Verb
from sqlaqueue.queue.versions import table_comment
from sqlaqueue.sql.types import insert_or_ignore, object_name
from sqlaqueue.strategies.base import ClaimStrategy, HeldStrategy
from sqlaqueue.strategies.columns import add_index, column_of, named, same
from sqlaqueue.strategies.delete_row import DeleteRow

# -- message table -----------------------------------------------------------------------------------------------------
# A message table, whose rows a claim deletes, and the strategies that have one.


@dataclass(frozen=True, eq=False)
class MessageTable:
    """The table of the messages, with its columns by their purpose."""

    table: sa.Table
    ids: Sequence[sa.Column[Any]]
    """The primary key of a message."""
    jobs: Sequence[sa.Column[Any]]
    """The key of a message's job."""
    order: Sequence[sa.Column[Any]] = ()
    """The order in which messages are consumed."""
    waiting: dict[str, sa.ColumnElement[Any]] = field(default_factory=dict)
    """The values of a message that is to be consumed, by the keys of their columns."""

    @property
    def waits(self) -> list[sa.ColumnElement[bool]]:
        """The conditions that a message is to be consumed."""
        return [self.table.c[key] == value for key, value in self.waiting.items()]

    def of_pending_jobs(self, spec: QueueSpec) -> list[sa.ColumnElement[bool]]:
        """Return the conditions that a message is to be consumed and that its job is pending."""
        # In a CASE the planner cannot estimate how many jobs are pending. Without statistics it would assume a few,
        # and search for those first in a table that may have millions of finished jobs.
        pending = sa.case((spec.in_state("pending"), sa.true()))
        return [same(self.jobs, spec.keys), *self.waits, pending]

    def consume_orphans(self, spec: QueueSpec, *conditions: sa.ColumnElement[bool]) -> sa.Delete:
        """Return the DELETE of messages whose job is missing or not pending; jobs that are locked are left alone.

        :param conditions: limit the messages.
        """
        # Row-level security may hide a job from the role, and its message would look like an orphan.
        job = same(self.jobs, spec.keys)
        columns = [column.label(column.key) for column in self.ids]
        without_job = (
            sa.select(*columns)
            .where(
                *self.waits,
                ~sa.exists().where(job).correlate(self.table),
                sees_all(spec.table),
                *conditions,
            )
            .with_for_update(of=self.table, skip_locked=True)
            .cte("sqlaqueue_without_job")
        )
        settled = sa.or_(~spec.in_state("pending"), spec.columns["status"].is_(None))
        not_pending = (
            sa.select(*columns)
            .where(*self.waits, job, settled, *conditions)
            .with_for_update(of=[spec.table, self.table], skip_locked=True)
            .cte("sqlaqueue_not_waiting")
        )
        orphans = sa.union_all(sa.select(*without_job.c), sa.select(*not_pending.c)).cte("sqlaqueue_orphans")
        return sa.delete(self.table).where(same(self.ids, [orphans.c[column.key] for column in self.ids]))


class MessageStrategy(HeldStrategy):
    """Base of the strategies with a message table."""

    def messages(self, spec: QueueSpec) -> MessageTable:
        raise NotImplementedError

    def locked_tables(self, spec: QueueSpec) -> Sequence[sa.Table]:
        """Return the model's table and that of the messages."""
        return [spec.table, self.messages(spec).table]

    def settle(self, spec: QueueSpec, held: ClaimedJobs, settlement: Settlement) -> Verb:
        """Settle the runs, and insert a message for each job that becomes pending again.

        The row stays pending, so the triggers insert a message only if a column of the claim order changes.
        """
        verb = super().settle(spec, held, settlement)
        if settlement.state != "pending" or not isinstance(verb, sa.Update):
            return verb
        return self.with_insert(spec, verb, self.insert_messages(spec, self.fence(spec, held), settlement))

    def insert_messages(self, spec: QueueSpec, jobs: sa.ColumnElement[bool], settlement: Settlement) -> sa.Insert:
        """Return the INSERT of a message for each of ``jobs``, a condition on rows of the model's table."""
        raise NotImplementedError


class DeleteReturning(MessageStrategy):
    """The strategy with the smallest hot table, for job tables that are large, wide or shared."""

    name: ClassVar[str] = "delete_returning"
    supports_scan_range: ClassVar[bool] = True
    supports_flow_control: ClassVar[bool] = True
    required_roles: ClassVar[Mapping[str, str]] = {"status": 'strategy "delete_returning" with a message table'}

    def for_roles(self, spec_roles: Mapping[str, Any]) -> ClaimStrategy:
        """Return the strategy without a message table for a model without a status."""
        return self if "status" in spec_roles else DeleteRow()

    def attach(self, spec: QueueSpec) -> None:
        """Add the message table with its index, and the triggers that maintain it."""
        super().attach(spec)
        messages = sa.Table(
            object_name("sqlaqueue_message", spec.table.name),
            spec.table.metadata,
            *(sa.Column(key.name, key.type, primary_key=True, autoincrement=False, key=key.key) for key in spec.keys),
            *(
                sa.Column(column.name, column.type, nullable=column.nullable, key=column.key)
                for column in (spec.columns[role] for role in spec.order_roles)
            ),
            schema=spec.table.schema or sa.BLANK_SCHEMA,
            comment=table_comment(MESSAGES),
        )
        spec.side_tables[MESSAGES] = messages
        if flow_control(spec) is not None:
            # Claims then read the jobs, since messages have no keys of limits.
            add_index(spec, "claim", spec.claim_order, where=spec.in_state("pending"))
        elif spec.order_roles:
            order = [messages.c[column.key] for column in spec.claim_order]
            spec.claim_indexes.append(sa.Index(conv(object_name("ix", messages.name, "claim")), *order))
        attach_message_triggers(spec, messages)

    def messages(self, spec: QueueSpec) -> MessageTable:
        """Return the message table, whose triggers copy the claim order of the jobs into it."""
        table = spec.side_tables[MESSAGES]
        keys = [table.c[key.key] for key in spec.keys]
        return MessageTable(table, keys, keys, [table.c[column.key] for column in spec.claim_order])

    def claim(self, request: ClaimRequest) -> AnySelect:
        """Lock the first messages with their jobs, delete the messages, return the jobs."""
        spec, picked = request.spec, self.picked(request)
        messages = self.messages(spec)
        consumed = (
            sa.delete(messages.table)
            .where(self.among(spec, messages.ids, picked))
            .returning(*named(messages.ids))
            .cte("sqlaqueue_consumed")
        )
        jobs = self.once_each(spec, request.candidates, picked)
        keys = sa.select(*(consumed.c[key.key] for key in spec.keys))
        mine = sa.tuple_(*(column_of(jobs, key) for key in spec.keys)).in_(keys)
        # A CASE is evaluated by a hash lookup. As a join, for which the planner expects few rows, each row would be
        # compared with each.
        return self.in_claim_order(spec, jobs).where(sa.case((mine, sa.true())))

    def picked(self, request: ClaimRequest) -> sa.CTE:
        """Return the jobs of the first messages, locked together with these."""
        spec, messages = request.spec, self.messages(request.spec)
        table = messages.table
        waiting = self.pick(spec, request.candidates, *spec.table.c).where(*messages.of_pending_jobs(spec))
        if flow_control(spec) is not None:
            waiting = waiting.where(spec.in_state("pending"))
        # take() locks the job first: a job that is locked must be passed over before its message is locked for the
        # length of this transaction.
        return self.take(request, waiting, table, table)

    def upcoming(self, spec: QueueSpec, limit: int, *, by_priority: bool) -> AnySelect:
        """Return when the next jobs will be due, from their messages."""
        return upcoming_times(spec, spec.side_tables[MESSAGES], [], limit, by_priority=by_priority)

    def pending_jobs(self, spec: QueueSpec, limit: int) -> AnySelect:
        """Return a SELECT of the messages. They are joined with the jobs only if these alone have a time."""
        if flow_control(spec) is not None:
            return super().pending_jobs(spec, limit)
        messages = self.messages(spec)
        columns: list[Any] = [messages.table.c[spec.columns[role].key].label(role) for role in spec.order_roles]
        rows: sa.FromClause = messages.table
        if not spec.has("run_at") and spec.has("created_at"):
            columns.append(spec.columns["created_at"].label("created_at"))
            rows = rows.join(spec.table, sa.and_(*messages.of_pending_jobs(spec)))
        return sa.select(*(columns or messages.ids)).select_from(rows).order_by(*messages.order)

    def insert_messages(self, spec: QueueSpec, jobs: sa.ColumnElement[bool], settlement: Settlement) -> sa.Insert:
        """Return the INSERT of the messages, with the new ``run_at`` of the jobs."""
        values = {} if settlement.run_at is None else {"run_at": settlement.run_at}
        names = [*(key.key for key in spec.keys), *(spec.columns[role].key for role in spec.order_roles)]
        order = [values.get(role, spec.columns[role]) for role in spec.order_roles]
        rows = sa.select(*spec.keys, *order).where(jobs)
        return insert_or_ignore(spec.side_tables[MESSAGES], (names, rows))

    def reconcile(self, spec: QueueSpec) -> Verb:
        """Insert the missing messages of pending jobs, and delete messages whose job is missing or not pending.

        A running claim is no inconsistency: other transactions still see its message. The jobs are locked, so that
        none is settled while its message is inserted.
        """
        return self.reconcile_range(spec, KeyRange())

    def reconcile_range(self, spec: QueueSpec, part: KeyRange) -> Verb:
        """Do the same for the jobs and the messages whose keys are in ``part``."""
        messages = self.messages(spec)
        without_message = ~sa.exists().where(self.same_key(spec, messages.ids, spec.table)).correlate(spec.table)
        waiting = (
            sa.select(*spec.keys, *(spec.columns[role] for role in spec.order_roles))
            .where(spec.in_state("pending"), without_message, part.holds(spec.keys))
            .order_by(*spec.keys)
        )
        lost = self.lock(spec, waiting).cte("sqlaqueue_lost")
        rows = ([column.key for column in lost.c], sa.select(*lost.c))
        found = insert_or_ignore(messages.table, rows).returning(*named(messages.ids)).cte("sqlaqueue_found")
        orphans = messages.consume_orphans(spec, part.holds(messages.ids))
        consumed = orphans.returning(*named(messages.ids)).cte("sqlaqueue_consumed")
        parts = [found, consumed, *([self._look_again(spec, part)] if spec.config.waits else [])]
        # The count of a job may be wrong beside its message.
        combine = sa.union if spec.config.waits else sa.union_all
        repaired = combine(
            *(sa.select(*(cte.c[key.key].label(key.key) for key in spec.keys)) for cte in parts)
        ).subquery("sqlaqueue_repaired")
        return sa.select(repaired)
