"""Claim by DELETE .. RETURNING from a message table that an application has already, and fills itself.

* **Stores** nothing of its own: the application inserts a message when a job is to run. There are no triggers; a
  pending job without a message stays pending.
* **Claims** by deleting messages, in their own order. One SELECT locks message and job, as in
  :mod:`~sqlaqueue.strategies.delete_returning`. A job with several messages is claimed once.
* **While a job runs** its transaction stays open. The handler's writes, the settlement and the claim commit together.
* **A job that runs again** gets another message, behind those that exist.
* **A message whose job is missing or not pending** is passed over by the claim. ``reconcile()``, which Consumers
  execute regularly, deletes it.
* **When a worker dies** its transaction ends, and the message is back at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.orm import Mapper
from sqlalchemy.sql.elements import conv

from sqlaqueue._typing import AnySelect
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.queue.roles import literal_text
from sqlaqueue.queue.run import Key
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.queue.strategy_protocol import ClaimRequest, RequiredPrivilege, Settlement, Verb
from sqlaqueue.sql.types import object_name
from sqlaqueue.strategies.attach import everything
from sqlaqueue.strategies.columns import column_of, named, numbered, same
from sqlaqueue.strategies.delete_returning import MessageStrategy, MessageTable
from sqlaqueue.strategies.unique_key import DUPLICATE


class ExistingMessages(MessageStrategy):
    """The strategy ``delete_returning`` on a message table of the application's own.

    ::

        __queue__ = QueueConfig(
            strategy=ExistingMessages(Message, job="target_id", order_by="created", waiting={"status": "new"}),
            ...
        )

    :param table: the mapped class of the messages, or their table. It needs a primary key, and no foreign key.
    :param job: the attribute, or attributes, that hold the key of a message's job.
    :param order_by: the attribute, or attributes, by which messages are consumed, smallest first; then by their key.
    :param waiting: the values of attributes of a message that is to be consumed. Messages with other values are left
        alone, and new messages get these values. None to consume all messages.
    :raises ConfigurationError: when it does not fit its table, as soon as a class is mapped with it.
    """

    name: ClassVar[str] = "delete_returning"
    required_roles: ClassVar[Mapping[str, str]] = {"status": "a queue with a message table"}

    def __init__(
        self,
        table: type[Any] | sa.Table,
        *,
        job: str | Sequence[str],
        order_by: str | Sequence[str] = (),
        waiting: Mapping[str, Any] | None = None,
    ) -> None:
        self._mapped = table
        self._job, self._order_by, self._waiting = _names(job), _names(order_by), dict(waiting or {})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self._mapped, '__name__', self._mapped)})"

    def attach(self, spec: QueueSpec) -> None:
        """Add the claim's index to the message table."""
        super().attach(spec)
        messages = self.messages(spec)
        if spec.config.waits:
            msg = (
                f"{spec.model.__name__}: QueueConfig(waits_for=...): the application inserts the messages, and nobody "
                'would insert that of a job which has waited; use strategy="delete_returning"'
            )
            raise ConfigurationError(msg)
        if spec.has("priority"):
            without = "columns={'priority': None}" if spec.config.adopt is None else "adopt={... without 'priority'}"
            msg = (
                f"{spec.model.__name__}.{spec.attributes['priority']}: jobs are taken in the order of their messages, "
                f"which has nothing to do with it; leave it out with QueueConfig({without}), or name columns of the "
                "messages in ExistingMessages(order_by=...)"
            )
            raise ConfigurationError(msg)
        if self._order_by:
            name = conv(object_name("ix", messages.table.name, "queue", "claim"))
            index = next((each for each in messages.table.indexes if each.name == name), None)
            if index is None:
                where = sa.and_(*messages.waits) if messages.waits else None
                index = sa.Index(name, *messages.order, postgresql_where=where)
            spec.claim_indexes.append(index)

    def required_privileges(self, spec: QueueSpec) -> Iterator[RequiredPrivilege]:
        """Return those of all strategies, and those to delete and insert messages."""
        yield from super().required_privileges(spec)
        messages = self.messages(spec)
        for each in everything(messages.table):
            generated = [key for key in messages.ids if key.identity is None] if each.privilege == "INSERT" else []
            yield replace(each, generated=generated)

    def claim(self, request: ClaimRequest) -> AnySelect:
        """Lock the first messages with their jobs, delete the messages, return the jobs."""
        spec, picked = request.spec, self.picked(request)
        messages = self.messages(spec)
        ids, order = (
            [picked.c[label.name] for label in labels]
            for labels in (numbered("sqlaqueue_id", messages.ids), numbered("sqlaqueue_order", messages.order))
        )
        consumed = (
            sa.delete(messages.table)
            .where(same(messages.ids, ids))
            .returning(*numbered("consumed", messages.ids))
            .cte("sqlaqueue_consumed")
        )
        # Several messages may name one job, and so may several rows of another table in the filter; return it once.
        keys = [column_of(picked, key) for key in spec.keys]
        time = sa.func.row_number().over(partition_by=keys, order_by=order).label("sqlaqueue_time")
        times = sa.select(*picked.c, time).where(same(ids, list(consumed.c))).subquery("sqlaqueue_times")
        return (
            sa.select(*(column_of(times, column) for column in spec.table.c))
            .where(times.c.sqlaqueue_time == 1)
            .order_by(*(times.c[column.name] for column in order))
        )

    def picked(self, request: ClaimRequest) -> sa.CTE:
        """Return the jobs of the first messages, locked together with these."""
        spec, scan_range = request.spec, request.scan_range
        messages = self.messages(spec)
        part = () if scan_range is None else (scan_range(spec.claim_order),)
        due = spec.due(spec.columns.get("run_at"))
        waiting = (
            self.pick(spec, request.candidates, *spec.table.c)
            .add_columns(*numbered("sqlaqueue_id", messages.ids), *numbered("sqlaqueue_order", messages.order))
            .where(*messages.of_pending_jobs(spec), *due, *part)
            .order_by(*messages.order)
            .limit(request.limit)
        )
        # The job comes first in OF: a job that is locked is passed over before its message is locked.
        return self.lock(spec, waiting, messages.table).cte("sqlaqueue_picked")

    def pending_jobs(self, spec: QueueSpec, limit: int) -> AnySelect:
        """Return a SELECT of the first messages that are to be consumed, joined with their jobs if these have times."""
        messages = self.messages(spec)
        times = [spec.columns[role].label(role) for role in ("run_at", "created_at") if spec.has(role)]
        waiting = sa.select(*messages.ids, *messages.jobs).where(*messages.waits).order_by(*messages.order)
        if not times:
            return waiting
        first = waiting.limit(limit).subquery("sqlaqueue_first_messages")
        job = same([first.c[column.key] for column in messages.jobs], spec.keys)
        jobs = first.join(spec.table, sa.and_(job, sa.case((spec.in_state("pending"), sa.true()))))
        return sa.select(*times).select_from(jobs)

    def insert_messages(self, spec: QueueSpec, jobs: sa.ColumnElement[bool], settlement: Settlement) -> sa.Insert:
        return self._insert(spec, sa.select(*spec.keys).where(jobs))

    def insert_new_messages(self, spec: QueueSpec, keys: Sequence[Key]) -> sa.Insert:
        """Return the INSERT of a message for each of these jobs for which the application has inserted none."""
        messages = self.messages(spec)
        there = sa.exists().where(same(messages.jobs, spec.keys), *messages.waits)
        return self._insert(spec, sa.select(*spec.keys).where(spec.key_in(spec.keys, keys), ~there))

    def requeue(self, spec: QueueSpec, chosen: AnySelect) -> Verb:
        """Make finished jobs pending again, each with another message."""
        verb = super().requeue(spec, chosen)
        if not isinstance(verb, sa.Update):
            judged = verb.cte("sqlaqueue_requeued")
            back = sa.select(*(judged.c[key.key] for key in spec.keys)).where(judged.c[DUPLICATE].is_(None))
            return sa.select(*judged.c).add_cte(self._insert(spec, back).cte("sqlaqueue_inserted"))
        changed = verb.returning(*named(spec.keys)).cte("sqlaqueue_changed")
        return sa.select(*changed.c).add_cte(self._insert(spec, sa.select(*changed.c)).cte("sqlaqueue_inserted"))

    def reconcile(self, spec: QueueSpec) -> Verb:
        """Delete messages whose job is missing or not pending, and return the keys that they name.

        The messages of a job that another transaction has locked are left alone: it may be about to become pending.
        """
        messages = self.messages(spec)
        named_keys = (column.label(key.key) for column, key in zip(messages.jobs, spec.keys, strict=True))
        consumed = messages.consume_orphans(spec).returning(*named_keys).cte("sqlaqueue_consumed")
        return sa.select(*consumed.c)

    def _insert(self, spec: QueueSpec, keys: AnySelect) -> sa.Insert:
        messages = self.messages(spec)
        names = [*(column.key for column in messages.jobs), *messages.waiting]
        return sa.insert(messages.table).from_select(names, keys.add_columns(*messages.waiting.values()))

    def messages(self, spec: QueueSpec) -> MessageTable:
        """Return the message table.

        :raises ConfigurationError: when a column is missing, or does not fit.
        """
        model = spec.model.__name__
        mapped: Any = sa.inspect(self._mapped, raiseerr=False)
        table = mapped.local_table if isinstance(mapped, Mapper) else self._mapped
        if not isinstance(table, sa.Table):
            msg = f"{model}: ExistingMessages({self._mapped!r}): give a mapped class or a Table"
            raise ConfigurationError(msg)
        columns = mapped.columns if isinstance(mapped, Mapper) else table.c

        def column(name: str) -> sa.Column[Any]:
            found = columns.get(name)
            if not isinstance(found, sa.Column):
                there = ", ".join(columns.keys())
                msg = f"{model}: {self!r} names {name!r}, which the messages do not have; there are {there}"
                raise ConfigurationError(msg)
            return found

        ids: Sequence[Any] = list(mapped.primary_key if isinstance(mapped, Mapper) else table.primary_key)
        if not ids:
            msg = f"{model}: {self!r}: the table {table.name} needs a primary key, which identifies a message"
            raise ConfigurationError(msg)
        jobs = [column(name) for name in self._job]
        if len(jobs) != len(spec.keys):
            keys = ", ".join(key.key for key in spec.keys)
            msg = f"{model}: {self!r}: give ExistingMessages(job=...) a column for each of the job's key: {keys}"
            raise ConfigurationError(msg)
        values = [(column(name), value) for name, value in self._waiting.items()]
        return MessageTable(
            table,
            ids,
            jobs,
            [column(name) for name in self._order_by] + [key for key in ids if key.key not in self._order_by],
            {one.key: sa.literal_column(literal_text(value, one.type), one.type) for one, value in values},
        )


def _names(given: str | Sequence[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)
