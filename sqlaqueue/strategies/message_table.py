"""A message table, whose rows a claim deletes, and the strategies that have one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from sqlaqueue.postgresql.catalog import sees_all
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.queue.strategy_protocol import ClaimedJobs, Settlement, Verb
from sqlaqueue.strategies.held import HeldStrategy
from sqlaqueue.strategies.parts.columns import same


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
        """Return the message table."""
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
