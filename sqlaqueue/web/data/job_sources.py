"""Where the jobs of a list are stored: in the queue's table, or in the table of dead letters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from sqlaqueue.queue.backend import DEAD_LETTER, backend
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.strategies.message_table import MessageStrategy
from sqlaqueue.strategies.parts.dead_letters import stored_columns
from sqlaqueue.strategies.parts.retention_index import PURPOSE, index_name
from sqlaqueue.web.data.job_columns import JobColumns, state_of
from sqlaqueue.web.data.job_filters import Condition, JobsWanted


@dataclass(frozen=True, eq=False)
class Restriction:
    """A condition that an index of the table may serve."""

    column: sa.Column[Any]
    clause: sa.ColumnElement[bool]
    is_equality: bool
    condition: Condition | None = None
    """The condition of the filter that it stands for; None for one that the filter does not name as such."""


@dataclass(frozen=True, eq=False)
class Exposed:
    """Rows of a source with the values of all columns of the jobs."""

    rows: sa.FromClause
    values: Mapping[str, sa.ColumnElement[Any]]
    """The values by the names of the columns."""
    keys: Sequence[sa.ColumnElement[Any]]
    state: sa.ColumnElement[str]


class Source:
    """The rows of a queue's own table."""

    def __init__(self, columns: JobColumns, wanted: JobsWanted) -> None:
        self.columns, self.wanted, self.spec = columns, wanted, columns.spec
        self.table: sa.Table = self.spec.table

    @property
    def keys(self) -> Sequence[sa.Column[Any]]:
        """The columns of the table that identify a job."""
        return self.spec.keys

    @property
    def read(self) -> Sequence[sa.Column[Any]]:
        """The columns of the table that :meth:`expose` needs."""
        return [each.column for each in self.columns.values()]

    def expose(self, rows: sa.FromClause) -> Exposed:
        """Return the values of jobs in ``rows``, which have the columns :attr:`read` under their names."""
        values = {name: rows.c[each.column.name] for name, each in self.columns.items()}
        status = self.columns.by_role.get("status")
        pending = sa.literal_column("'pending'", sa.Text())
        state = pending if status is None else state_of(self.spec, values[status.name])
        return Exposed(rows, values, [values[each.name] for each in self.columns.keys], state)

    def restrictions(self) -> list[Restriction]:
        """Return the conditions of the filter that an index may serve."""
        found = [
            Restriction(each.column.column, each.on(each.column.column), each.is_equality, each)
            for each in self.wanted.conditions
            if each.is_equality or each.is_range
        ]
        for column, value in zip(self.columns.keys, self.wanted.key_values(), strict=False):
            found.append(Restriction(column.column, sa.type_coerce(column.column, value.type) == value, True))
        if self.wanted.state is not None and self.spec.has("status"):
            found.append(Restriction(self.spec.columns["status"], self.spec.in_state(self.wanted.state), True))
        return found

    def others(self, exposed: Exposed, served: Sequence[Restriction]) -> list[sa.ColumnElement[bool]]:
        """Return the conditions of the filter but those that are ``served``, on exposed rows."""
        conditions = [each.condition for each in served if each.condition is not None]
        found = self.wanted.on_columns(exposed.values, without=conditions)
        if self.wanted.state is not None and not any(self._is_of_state(each) for each in served):
            found.append(self._in_state(exposed))
        return found

    def name_of(self, column: sa.Column[Any]) -> str | None:
        """Return the name under which a list is sorted by a column of the table; None if that is not allowed."""
        found = self.columns.stored_as(column.name)
        return None if found is None or found.is_redacted else found.name

    def implies(self, index: str) -> bool:
        """Return whether the filter implies the predicate of a partial index of the queue's own."""
        states = {
            _own_index(self.spec, "claim"): ("pending",),
            _own_index(self.spec, "lease"): ("processing",),
            index_name(self.spec.table): tuple(self.spec.config.retention),
        }
        return self.wanted.state is not None and self.wanted.state in states.get(index, ())

    def few(self, limit: int) -> tuple[sa.ColumnElement[bool], sa.FromClause] | None:
        """Return what finds pending jobs by their messages: a condition, and the messages, up to ``limit`` of them."""
        strategy = self.spec.strategy
        if self.wanted.state != "pending" or not isinstance(strategy, MessageStrategy):
            return None
        messages = strategy.messages(self.spec)
        first = sa.select(*messages.jobs).where(*messages.waits).limit(limit)
        keys = sa.tuple_(*self.keys) if len(self.keys) > 1 else self.keys[0]
        return keys.in_(first), first.subquery("messages")

    @staticmethod
    def _is_of_state(restriction: Restriction) -> bool:
        return restriction.column.info.get("sqlaqueue_listed_state", False)

    def _in_state(self, exposed: Exposed) -> sa.ColumnElement[bool]:
        return exposed.state == self.wanted.state


def _own_index(spec: QueueSpec, purpose: str) -> str:
    return backend().object_name("ix", spec.table.name, "queue", purpose)
