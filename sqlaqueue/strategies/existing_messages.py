"""Claim by DELETE .. RETURNING from a message table that an application has already, and fills itself.

* **Stores** nothing of its own: the application inserts a message when a job is to run. There are no triggers, and a
  job that waits without a message goes on waiting.
* **Claims** by deleting messages, in their own order. Message and job are locked by one SELECT, as by
  :mod:`~sqlaqueue.strategies.delete_returning`. Several messages for one job hand it out once.
* **While a job runs** its transaction stays open. The handler's writes, the settling and the claim commit together.
* **A job that runs again** gets another message, behind those that are there.
* **A message in vain**, whose job is missing or not waiting, is passed over by the claim. ``reconcile()`` consumes it,
  which Consumers execute now and then.
* **When a worker dies** its transaction ends, and the message is back at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import Mapper
from sqlalchemy.sql.elements import conv

from sqlaqueue._typing import AnySelect
from sqlaqueue.exc import ConfigurationError
from sqlaqueue.queue.backend import backend
from sqlaqueue.queue.roles import literal_text
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.queue.strategy import ClaimedJobs, ClaimRequest, RequiredPrivilege, Settlement, Verb
from sqlaqueue.strategies.base import ClaimStrategy, column_of, named
from sqlaqueue.strategies.required_privileges import everything


class _Messages(NamedTuple):
    """A message table by what its columns are for."""

    table: sa.Table
    ids: Sequence[sa.Column[Any]]
    jobs: Sequence[sa.Column[Any]]
    """Where the keys of the jobs stand."""
    order: Sequence[sa.Column[Any]]
    words: dict[str, sa.ColumnElement[Any]]
    """What columns hold while a message waits, by the keys of the columns."""

    @property
    def waits(self) -> sa.ColumnElement[bool]:
        """The condition that a message waits."""
        return sa.and_(sa.true(), *(self.table.c[key] == word for key, word in self.words.items()))


class ExistingMessages(ClaimStrategy):
    """The strategy ``delete_returning`` on a message table of the application's own.

    ::

        __queue__ = QueueConfig(
            strategy=ExistingMessages(Message, job="target_id", order_by="created", waiting={"status": "new"}),
            ...
        )

    :param table: the mapped class of the messages, or their table. It needs a primary key, and no foreign key.
    :param job: the attribute, or attributes, that hold the key of a message's job.
    :param order_by: the attribute, or attributes, by which messages are taken, smallest first; then by their key.
    :param waiting: what attributes hold while a message waits. Others are left alone, and new messages get these
        values. None when all messages wait.
    :raises ConfigurationError: when it does not fit its table, as soon as a class is mapped with it.
    """

    name: ClassVar[str] = "delete_returning"
    holds_transaction: ClassVar[bool] = True
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
        """Add the claim's index to the message table, and the ledger."""
        super().attach(spec)
        messages = self._messages(spec)
        if spec.has("priority"):
            without = "columns={'priority': None}" if spec.config.adopt is None else "adopt={... without 'priority'}"
            msg = (
                f"{spec.model.__name__}.{spec.attributes['priority']}: jobs are taken in the order of their messages, "
                f"which has nothing to do with it; leave it out with QueueConfig({without}), or name columns of the "
                "messages in ExistingMessages(order_by=...)"
            )
            raise ConfigurationError(msg)
        backend().side_tables.crash_journal(spec)
        if self._order_by:
            name = conv(backend().object_name("ix", messages.table.name, "queue", "claim"))
            index = next((each for each in messages.table.indexes if each.name == name), None)
            if index is None:
                where = messages.waits if messages.words else None
                index = sa.Index(name, *messages.order, postgresql_where=where)
            spec.claim_indexes.append(index)

    def required_privileges(self, spec: QueueSpec) -> Iterator[RequiredPrivilege]:
        """Messages are deleted, and one is inserted for a job that runs again."""
        yield from super().required_privileges(spec)
        messages = self._messages(spec)
        for right in everything(messages.table):
            generated = [key for key in messages.ids if key.identity is None] if right.privilege == "INSERT" else []
            yield replace(right, generated=generated)

    def claim(self, request: ClaimRequest) -> AnySelect:
        """Lock the first messages with their jobs, delete the messages, return the jobs."""
        spec, scan_range = request.spec, request.scan_range
        messages = self._messages(spec)
        part = () if scan_range is None else (scan_range(spec.claim_order),)
        waiting = (
            self.pick(spec, request.candidates, *spec.table.c)
            .add_columns(*_labels("sqlaqueue_id", messages.ids), *_labels("sqlaqueue_order", messages.order))
            .where(
                self.same_key(spec, messages.jobs, spec.table),
                messages.waits,
                # As in delete_returning: else the planner may look for waiting jobs first, among all that are over.
                sa.case((spec.in_state("pending"), sa.true())),
                *spec.due(spec.columns.get("run_at")),
                *part,
            )
            .order_by(*messages.order)
            .limit(request.limit)
        )
        # The job comes first in OF: one that somebody holds is passed over before its message is locked.
        picked = self.lock(spec, waiting, messages.table).cte("picked")
        ids, order = (
            [picked.c[label.name] for label in labels]
            for labels in (_labels("sqlaqueue_id", messages.ids), _labels("sqlaqueue_order", messages.order))
        )
        consumed = (
            sa.delete(messages.table)
            .where(_same(messages.ids, ids))
            .returning(*_labels("consumed", messages.ids))
            .cte("consumed")
        )
        # Two messages may be for one job, and so may two rows of another table in the filter: it is handed out once.
        keys = [column_of(picked, key) for key in spec.keys]
        time = sa.func.row_number().over(partition_by=keys, order_by=order).label("sqlaqueue_time")
        times = sa.select(*picked.c, time).where(_same(ids, list(consumed.c))).subquery("times")
        return (
            sa.select(*(column_of(times, column) for column in spec.table.c))
            .where(times.c.sqlaqueue_time == 1)
            .order_by(*(times.c[column.name] for column in order))
        )

    def fence(self, spec: QueueSpec, held: ClaimedJobs) -> sa.ColumnElement[bool]:
        """The rows are locked by this transaction; one that it has settled already is left as it is."""
        return sa.and_(super().fence(spec, held), spec.in_state("pending"))

    def settle(self, spec: QueueSpec, held: ClaimedJobs, settlement: Settlement) -> Verb:
        """End the runs, and write another message for a job that goes on waiting."""
        verb = super().settle(spec, held, settlement)
        if settlement.state != "pending" or not isinstance(verb, sa.Update):
            return verb
        return self.beside(spec, verb, self._announce(spec, sa.select(*spec.keys).where(self.fence(spec, held))))

    def requeue(self, spec: QueueSpec, chosen: AnySelect) -> Verb:
        """Make finished jobs wait again, each with another message."""
        verb = super().requeue(spec, chosen)
        if not isinstance(verb, sa.Update):
            return verb
        changed = verb.returning(*named(spec.keys)).cte("changed")
        return sa.select(*changed.c).add_cte(self._announce(spec, sa.select(*changed.c)).cte("announced"))

    def reconcile(self, spec: QueueSpec) -> Verb:
        """Consume messages whose job is missing or not waiting, and return the keys that they named.

        A job that somebody holds is left alone with its messages: it may be about to wait.
        """
        messages = self._messages(spec)
        job = self.same_key(spec, messages.jobs, spec.table)
        columns = [*_labels("id", messages.ids), *_labels("job", messages.jobs)]
        gone = (
            sa.select(*columns)
            .where(
                messages.waits,
                ~sa.exists().where(job).correlate(messages.table),
                backend().checks.sees_all(spec.table),
            )
            .with_for_update(of=messages.table, skip_locked=True)
            .cte("without_job")
        )
        settled = (
            sa.select(*columns)
            .where(messages.waits, job, sa.or_(~spec.in_state("pending"), spec.columns["status"].is_(None)))
            .with_for_update(of=[spec.table, messages.table], skip_locked=True)
            .cte("not_waiting")
        )
        in_vain = sa.union_all(sa.select(*gone.c), sa.select(*settled.c)).cte("in_vain")
        consumed = (
            sa.delete(messages.table)
            .where(_same(messages.ids, [in_vain.c[label.name] for label in _labels("id", messages.ids)]))
            .returning(*(column.label(key.key) for column, key in zip(messages.jobs, spec.keys, strict=True)))
            .cte("consumed")
        )
        return sa.select(*consumed.c)

    def _announce(self, spec: QueueSpec, keys: AnySelect) -> sa.Insert:
        """Return the statement that writes a message for each of ``keys``."""
        messages = self._messages(spec)
        names = [*(column.key for column in messages.jobs), *messages.words]
        return sa.insert(messages.table).from_select(names, keys.add_columns(*messages.words.values()))

    def _messages(self, spec: QueueSpec) -> _Messages:
        """Return the columns of the message table.

        :raises ConfigurationError: naming what does not fit.
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
            msg = f"{model}: {self!r}: the table {table.name} needs a primary key, by which messages are told apart"
            raise ConfigurationError(msg)
        jobs = [column(name) for name in self._job]
        if len(jobs) != len(spec.keys):
            keys = ", ".join(key.key for key in spec.keys)
            msg = f"{model}: {self!r}: give ExistingMessages(job=...) a column for each of the job's key: {keys}"
            raise ConfigurationError(msg)
        words = [(column(name), value) for name, value in self._waiting.items()]
        return _Messages(
            table,
            ids,
            jobs,
            [column(name) for name in self._order_by] + [key for key in ids if key.key not in self._order_by],
            {one.key: sa.literal_column(literal_text(value, one.type), one.type) for one, value in words},
        )


def _names(given: str | Sequence[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def _labels(prefix: str, columns: Sequence[sa.Column[Any]]) -> list[sa.Label[Any]]:
    return [column.label(f"{prefix}_{number}") for number, column in enumerate(columns)]


def _same(columns: Sequence[sa.ColumnElement[Any]], others: Sequence[sa.ColumnElement[Any]]) -> sa.ColumnElement[bool]:
    return sa.and_(*(column == other for column, other in zip(columns, others, strict=True)))
