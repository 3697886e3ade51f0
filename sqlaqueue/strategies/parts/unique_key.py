"""The columns and conditions by which jobs are unique, for statements and for the index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from sqlaqueue.queue.options import Unique
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.queue.twin_comparison import same_unique_values, unique_values
from sqlaqueue.sql.types import period


@dataclass(frozen=True, eq=False)
class UniqueKey:
    """What makes two jobs of a queue twins."""

    spec: QueueSpec
    config: Unique

    @property
    def columns(self) -> list[sa.Column[Any]]:
        """The columns of the attributes."""
        return [self.spec.mapper.columns[name] for name in self.config.attributes]

    @property
    def stored(self) -> list[sa.Column[Any]]:
        """All columns that are compared, with the time of creation if jobs are unique for a period."""
        times = [] if self.config.per is None else [self.spec.columns["created_at"]]
        return list(dict.fromkeys([*self.columns, *times]))

    @property
    def states(self) -> tuple[str, ...]:
        """The states in which jobs count and for which the status column has a value."""
        values = self.spec.config.states
        return tuple(state for state in self.config.states if getattr(values, state) is not None)

    def values(self, rows: sa.FromClause) -> list[sa.ColumnElement[Any]]:
        """Return what is compared of the jobs in ``rows``, which has the columns :attr:`stored` by their keys."""
        values: list[sa.ColumnElement[Any]] = [rows.c[column.key] for column in self.columns]
        if self.config.per is not None:
            values.append(period(self.config.per, rows.c[self.spec.columns["created_at"].key]))
        return values

    def counts(self, rows: sa.FromClause) -> sa.ColumnElement[bool]:
        """Return the condition that jobs in ``rows``, the table or an alias of it, count."""
        if not self.spec.has("status"):
            return sa.true()
        status = rows.c[self.spec.columns["status"].key]
        # Not IN: the server prints it in another form, and that form in yet another one when it parses it again.
        return sa.or_(*(status == self.spec.literal(state) for state in self.states))

    def is_complete(self, values: Sequence[sa.ColumnElement[Any]]) -> sa.ColumnElement[bool]:
        """Return the condition that a job with these values can have a twin."""
        if not self.config.nulls_distinct:
            return sa.true()
        return sa.and_(*(value.is_not(None) for value in values))

    def are_twins(self, rows: sa.FromClause, others: sa.FromClause) -> sa.ColumnElement[bool]:
        """Return the condition that jobs of two tables have the same values."""
        pairs = zip(self.values(rows), self.values(others), strict=True)
        if self.config.nulls_distinct:
            same = sa.and_(*(one == other for one, other in pairs))
        else:
            # Not IS NOT DISTINCT FROM, which cannot use an index.
            same = sa.and_(*(sa.or_(one == other, sa.and_(one.is_(None), other.is_(None))) for one, other in pairs))
        key, nulls_distinct = rows.c[self.spec.keys[0].key], self.config.nulls_distinct
        return same_unique_values(same, key, self.values(others), nulls_distinct=nulls_distinct)

    def as_one(self, rows: sa.FromClause) -> sa.ColumnElement[Any]:
        """Return the values of the jobs in ``rows``, to order and to group by."""
        return unique_values(self.values(rows), nulls_distinct=self.config.nulls_distinct)

    @property
    def returns_from_runs(self) -> bool:
        """Whether a run may end in a state in which its job meets a twin: it does not count while it runs."""
        return "processing" not in self.config.states


def unique_key(spec: QueueSpec) -> UniqueKey | None:
    """Return what makes jobs of a queue unique; None for a queue without ``QueueConfig(unique=...)``."""
    return None if spec.config.unique is None else UniqueKey(spec, spec.config.unique)


def key_text_of(spec: QueueSpec, rows: sa.FromClause) -> sa.ColumnElement[str]:
    """Return the key of a job in ``rows`` as a text: the parts of a composite key are separated by commas."""
    parts = [sa.cast(rows.c[key.key], sa.Text()) for key in spec.keys]
    return parts[0] if len(parts) == 1 else sa.func.concat_ws(",", *parts, type_=sa.Text())
