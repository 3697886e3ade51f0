"""Messages and jobs at odds with each other, and unknown status values. All jobs are read, so only if asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from sqlaqueue.admin.diagnosis.checks.shared import at_most, counted, number_text
from sqlaqueue.admin.diagnosis.examination import Examination, target_of
from sqlaqueue.admin.diagnosis.finding import Finding
from sqlaqueue.admin.explanation.read_facts import messages_of
from sqlaqueue.postgresql.catalog import sees_all
from sqlaqueue.postgresql.catalog_text import sql_text
from sqlaqueue.queue.options import STATES
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.strategies.columns import same
from sqlaqueue.strategies.delete_returning import MessageTable


def check_messages(examination: Examination) -> Iterator[Finding]:
    """Find pending jobs without a message, and messages without a pending job."""
    for spec in examination.specs if examination.deep else []:
        table = messages_of(spec)
        if table is not None:
            yield from _jobs_without(examination, spec, table)
            yield from _messages_without(examination, spec, table)


def _jobs_without(examination: Examination, spec: QueueSpec, messages: MessageTable) -> Iterator[Finding]:
    its = sa.exists().where(same(messages.jobs, spec.keys), *messages.waits).correlate(spec.table)
    rows = sa.select(*spec.keys).where(spec.in_state("pending"), ~its)
    number = counted(examination.connection, rows)
    if not number:
        return
    fix = f"sqlaqueue reconcile {target_of(spec)}"
    if spec.strategy.insert_new_messages(spec, []) is not None:
        # The application inserts its own messages, and reconcile() only deletes some.
        names = [*(column.key for column in messages.jobs), *messages.waiting]
        insert = sa.insert(messages.table).from_select(names, rows.add_columns(*messages.waiting.values()))
        fix = sql_text(examination.connection, insert)
    yield Finding(
        severity="critical",
        code="jobs_without_message",
        queue=spec.name,
        summary=f"{number_text(number, 'pending job')} of {spec.table.fullname} without a message.",
        consequence="They are not claimed. Writes have bypassed the triggers, or the program inserted no message.",
        fixes=(fix,),
        facts={"jobs": number},
    )


def _messages_without(examination: Examination, spec: QueueSpec, messages: MessageTable) -> Iterator[Finding]:
    # In a CASE as in MessageTable: the planner should not search for pending jobs first.
    its = sa.exists().where(same(messages.jobs, spec.keys), sa.case((spec.in_state("pending"), sa.true())))
    rows = sa.select(*messages.ids).where(*messages.waits, ~its.correlate(messages.table), sees_all(spec.table))
    number = counted(examination.connection, rows)
    if number:
        yield Finding(
            severity="warning",
            code="messages_without_job",
            queue=spec.name,
            summary=f"{number_text(number, 'message')} of {messages.table.fullname} without a pending job.",
            consequence="Each claim reads them, and takes longer.",
            fixes=(f"sqlaqueue reconcile {target_of(spec)}",),
            facts={"messages": number},
        )


def check_status_values(examination: Examination) -> Iterator[Finding]:
    """Find jobs whose status is none of the queue's values."""
    for spec in examination.specs if examination.deep else []:
        if not spec.has("status"):
            continue
        status = spec.columns["status"]
        known = [state for state in STATES if getattr(spec.config.states, state) is not None]
        unknown: sa.ColumnElement[bool] = sa.or_(~spec.in_state(*known), status.is_(None))
        first = at_most(sa.select(sa.cast(status, sa.Text()).label("status")).where(unknown)).subquery(
            "sqlaqueue_first"
        )
        row: Any = examination.connection.execute(
            sa.select(sa.func.count(), sa.func.array_agg(first.c.status.distinct())).select_from(first)
        ).one()
        number, values = row
        if not number:
            continue
        end = next((state for state in ("failed", "cancelled", "completed") if state in known), "pending")
        update = sa.update(spec.table).where(unknown).values({status: spec.literal(end)})
        listed = ", ".join("NULL" if value is None else repr(value) for value in values)
        yield Finding(
            severity="warning",
            code="unknown_status",
            queue=spec.name,
            summary=f"{number_text(number, 'job')} of {spec.table.fullname} with an unknown status: {listed}.",
            consequence=(
                "They never run and are never deleted. Correct them, or name the value in QueueConfig(states=...). The "
                f"fix makes them {end}."
            ),
            fixes=(sql_text(examination.connection, update),),
            facts={"jobs": number, "values": values},
        )
