"""Claim by DELETE .. RETURNING from a thin message table, joined to the job's row.

* **Stores** a message for every waiting job: its key and what the claim is ordered by. Triggers on the job
  table keep the messages right, whoever writes: the ORM, bulk inserts, COPY or plain SQL.
* **Claims** by deleting messages. Message and job are locked by one SELECT, both with SKIP LOCKED: a message
  locked first would deadlock with somebody who cancels the job, a job locked alone would lose its message.
* **While a job runs** its transaction stays open. The handler's writes, the settling and the claim commit together.
* **When a worker dies** its transaction ends, and the message is back at once.

With ``rows_are_messages=True`` a row is its own message; :mod:`sqlaqueue.strategies.delete_row` serves such a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.sql.elements import conv

from sqlaqueue._typing import AnySelect
from sqlaqueue.queue.backend import backend
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.queue.strategy import ClaimedJobs, ClaimRequest, KeyRange, Settlement, Verb
from sqlaqueue.strategies.base import ClaimStrategy, column_of, named
from sqlaqueue.strategies.delete_row import OwnMessage

MESSAGES = "messages"


class DeleteReturning(ClaimStrategy):
    """The strategy with the smallest hot table, for job tables that are large, wide or shared."""

    name: ClassVar[str] = "delete_returning"
    holds_transaction: ClassVar[bool] = True
    supports_scan_range: ClassVar[bool] = True
    required_roles: ClassVar[Mapping[str, str]] = {"status": 'strategy "delete_returning" with a message table'}

    def for_roles(self, spec_roles: Mapping[str, Any]) -> ClaimStrategy:
        """Let a model without a state be its own message."""
        return self if "status" in spec_roles else OwnMessage()

    def attach(self, spec: QueueSpec) -> None:
        """Add the message table with its index, the triggers that fill it, and the ledger."""
        super().attach(spec)
        backend().side_tables.crash_journal(spec)
        messages = sa.Table(
            backend().object_name("sqlaqueue_message", spec.table.name),
            spec.table.metadata,
            *(sa.Column(key.name, key.type, primary_key=True, autoincrement=False, key=key.key) for key in spec.keys),
            *(
                sa.Column(column.name, column.type, nullable=column.nullable, key=column.key)
                for column in (spec.columns[role] for role in spec.order_roles)
            ),
            schema=spec.table.schema or sa.BLANK_SCHEMA,
        )
        spec.side_tables[MESSAGES] = messages
        if spec.order_roles:
            order = [messages.c[column.key] for column in spec.claim_order]
            spec.claim_indexes.append(sa.Index(conv(backend().object_name("ix", messages.name, "claim")), *order))
        backend().triggers.attach_message_triggers(spec, messages)

    def claim(self, request: ClaimRequest) -> AnySelect:
        """Lock the best messages with their jobs, delete the messages, return the jobs."""
        spec, candidates = request.spec, request.candidates
        messages = spec.side_tables[MESSAGES]
        # The job comes first in OF: rows are locked in that order, and a job that somebody holds must be
        # passed over before its message is locked for the length of this transaction.
        waiting = self.pick(spec, candidates, *spec.table.c).where(
            self.same_key(spec, [messages.c[key.key] for key in spec.keys], spec.table),
            # As a CASE the planner cannot guess how many jobs wait: without statistics it would guess a few of
            # them, and look for those first, in a table that may hold millions of finished jobs.
            sa.case((spec.in_state("pending"), sa.true())),
        )
        picked = backend().claims.take(request, waiting, messages, messages, lock_rows=self.lock, first_due=self.best)
        consumed = (
            sa.delete(messages)
            .where(self.among(spec, [messages.c[key.key] for key in spec.keys], picked))
            .returning(*named(messages.c[key.key] for key in spec.keys))
            .cte("consumed")
        )
        jobs = self.once_each(spec, candidates, picked)
        keys = sa.select(*(consumed.c[key.key] for key in spec.keys))
        mine = sa.tuple_(*(column_of(jobs, key) for key in spec.keys)).in_(keys)
        # As a CASE it is looked up in a hash; as a join of the few rows that the planner expects, each row would be
        # compared with each.
        return self.in_claim_order(spec, jobs).where(sa.case((mine, sa.true())))

    def upcoming(self, spec: QueueSpec, limit: int) -> AnySelect:
        """The messages know when their jobs will be due."""
        return backend().claims.upcoming_times(spec, spec.side_tables[MESSAGES], [], limit)

    def fence(self, spec: QueueSpec, held: ClaimedJobs) -> sa.ColumnElement[bool]:
        """The rows are locked by this transaction; one that it has settled already is left as it is."""
        return sa.and_(super().fence(spec, held), spec.in_state("pending"))

    def settle(self, spec: QueueSpec, held: ClaimedJobs, settlement: Settlement) -> Verb:
        """End the runs, and put the message back of a job that goes on waiting.

        The row has read as pending all the time, so an update that changes neither state nor order says nothing
        to the trigger.
        """
        verb = super().settle(spec, held, settlement)
        if settlement.state != "pending" or not isinstance(verb, sa.Update):
            return verb
        values = {} if settlement.run_at is None else {"run_at": settlement.run_at}
        return self.beside(spec, verb, self._put_back(spec, self.fence(spec, held), values))

    @staticmethod
    def _put_back(
        spec: QueueSpec, whose: sa.ColumnElement[bool], values: Mapping[str, sa.ColumnElement[Any]]
    ) -> sa.Insert:
        messages = spec.side_tables[MESSAGES]
        names = [*(key.key for key in spec.keys), *(spec.columns[role].key for role in spec.order_roles)]
        order = [values.get(role, spec.columns[role]) for role in spec.order_roles]
        rows = sa.select(*spec.keys, *order).where(whose)
        return backend().insert_or_ignore(messages, (names, rows))

    def reconcile(self, spec: QueueSpec) -> Verb:
        """Give waiting jobs without a message one, and consume messages whose job is gone or not waiting.

        A running claim is not mistaken for a fault: as long as its transaction is open, everybody else still
        sees the message. The jobs are locked, so that none stops waiting while its message is written.
        """
        return self.reconcile_range(spec, KeyRange())

    def reconcile_range(self, spec: QueueSpec, part: KeyRange) -> Verb:
        """Do the same for the jobs, and for the messages, whose key is one of those."""
        messages = spec.side_tables[MESSAGES]
        message_keys = [messages.c[key.key] for key in spec.keys]
        unheard = ~sa.exists().where(self.same_key(spec, message_keys, spec.table)).correlate(spec.table)
        waiting = (
            sa.select(*spec.keys, *(spec.columns[role] for role in spec.order_roles))
            .where(spec.in_state("pending"), unheard, part.holds(spec.keys))
            .order_by(*spec.keys)
        )
        lost = self.lock(spec, waiting).cte("lost")
        found = (
            backend()
            .insert_or_ignore(messages, ([column.key for column in lost.c], sa.select(*lost.c)))
            .returning(*named(message_keys))
            .cte("found")
        )
        consumed = self._consume_orphans(spec, messages, part).returning(*named(message_keys)).cte("consumed")
        mended = sa.union_all(
            *(sa.select(*(cte.c[key.key].label(key.key) for key in spec.keys)) for cte in (found, consumed))
        ).subquery("mended")
        return sa.select(mended)

    def _consume_orphans(self, spec: QueueSpec, messages: sa.Table, part: KeyRange) -> sa.Delete:
        # To a role with row-level security a job that it may not see looks like one that is gone.
        message_keys = [messages.c[key.key] for key in spec.keys]
        job = self.same_key(spec, message_keys, spec.table)
        gone = (
            sa.select(*message_keys)
            .where(
                ~sa.exists().where(job).correlate(messages),
                backend().checks.sees_all(spec.table),
                part.holds(message_keys),
            )
            .with_for_update(of=messages, skip_locked=True)
            .cte("without_job")
        )
        settled = (
            sa.select(*message_keys)
            .where(job, sa.or_(~spec.in_state("pending"), spec.columns["status"].is_(None)), part.holds(message_keys))
            .with_for_update(of=[spec.table, messages], skip_locked=True)
            .cte("not_waiting")
        )
        orphans = sa.union_all(sa.select(*gone.c), sa.select(*settled.c)).cte("orphans")
        same = sa.and_(*(messages.c[key.key] == orphans.c[key.key] for key in spec.keys))
        return sa.delete(messages).where(same)
