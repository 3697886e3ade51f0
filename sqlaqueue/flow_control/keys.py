"""The limits, rates, order and turns of one queue, resolved to its columns, and whose turn it is."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import sqlalchemy as sa

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.queue.options import ConcurrencyLimit, FairShare, InOrder, Number, RateLimit
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.portable import Span, converted, earlier, greatest
from sqlaqueue.sql.types import key_hash

# A key of several columns is compared by its hash, a 64-bit number. So each index has one column for a key, whatever
# the types of its attributes, and NULL is a value like any other. Two keys of equal hashes would share what is left
# to them.


class JobKey:
    """Some attributes of a job whose values are the key of a limit, a rate, an order or a turn."""

    config: Any

    def __init__(self, spec: QueueSpec, names: Sequence[str], config: Any = None) -> None:
        self.spec, self.names, self.config = spec, names, config

    @cached_property
    def columns(self) -> list[sa.Column[Any]]:
        return [self.spec.mapper.columns[name] for name in self.names]

    def hashed(self, rows: sa.FromClause) -> sa.ColumnElement[int]:
        """Return the hash of the key of the jobs in ``rows``, the table or an alias of it, as indexes have it."""
        return key_hash([rows.c[column.key] for column in self.columns])

    def of(self, rows: sa.FromClause) -> sa.ColumnElement[int]:
        """Return the hash of the key; NULL for a job without a value in one of the columns; 0 without columns."""
        if not self.names:
            return sa.literal_column("0", sa.BigInteger())
        missing = [rows.c[column.key].is_(None) for column in self.columns if column.nullable]
        return sa.case((sa.or_(*missing), sa.null()), else_=self.hashed(rows)) if missing else self.hashed(rows)

    def running(self, rows: sa.FromClause) -> sa.ColumnElement[int]:
        """Return the hash of the key of running jobs in ``rows``; NULL for others.

        Only one index serves a search for it. Were the state a condition of its own, the planner could choose any index
        of running jobs, and a function would keep that plan.
        """
        status = rows.c[self.spec.columns["status"].key]
        runs = status == self.spec.literal("processing")
        return key_hash([rows.c[column.key] for column in self.columns], only=runs)

    @property
    def text(self) -> str:
        """The names, for names of objects and for reports."""
        return ",".join(self.names)


class KeyLimit(JobKey):
    """A limit of a queue."""

    config: ConcurrencyLimit

    @property
    def most(self) -> sa.ColumnElement[int]:
        """How many jobs of the key may run at once, from the columns of the table."""
        return _number(self.spec, self.config.most)

    @property
    def changes(self) -> bool:
        """Whether the number may change while jobs run."""
        return not isinstance(self.config.most, int)


class KeyRate(JobKey):
    """A rate of a queue."""

    config: RateLimit

    @property
    def interval(self) -> float:
        """Seconds between two beginnings."""
        return self.config.every.total_seconds() / self.config.most

    @property
    def name(self) -> str:
        """The name of the rate among those of the queue; another period is another rate."""
        return f"{self.text}/{self.config.every.total_seconds():g}s"

    def free_at(self, rates: sa.FromClause) -> sa.ColumnElement[Any]:
        """Return when the next job of a key may begin, from the columns of the side table of rates."""
        burst = sa.literal(timedelta(seconds=self.interval * (self.config.burst - 1)), Span())
        moment = sa.DateTime(timezone=True)
        return greatest(earlier(rates.c.next_at, burst), rates.c.throttled_until, type_=moment)


class KeyOrder(JobKey):
    """The order of a queue."""

    config: InOrder

    @property
    def by(self) -> tuple[sa.Column[Any], ...]:
        """The columns of the order within a key."""
        first = self.spec.mapper.columns[self.config.by]
        return (first, *(key for key in self.spec.keys if key is not first))


class TurnKey(JobKey):
    """Whose jobs take turns."""

    config: FairShare

    @property
    def weight(self) -> sa.ColumnElement[int]:
        """How many jobs of the key one turn has, from the columns of the table."""
        return _number(self.spec, self.config.weight)


def _number(spec: QueueSpec, given: Number) -> sa.ColumnElement[int]:
    if isinstance(given, int):
        return sa.literal_column(str(given), sa.Integer())
    if isinstance(given, str):
        return converted(spec.mapper.columns[given], sa.Integer())
    # A class is a callable as well as a select is an object of one; only a function gives a select for the class.
    found: Any = given(spec.model) if callable(given) and not isinstance(given, sa.sql.ClauseElement) else given
    if isinstance(found, int):
        return sa.literal_column(str(found), sa.Integer())
    if isinstance(found, sa.Select) and len(found.selected_columns) != 1:
        msg = (
            f"{spec.model.__name__}: the select of a limit or weight has {len(found.selected_columns)} columns; "
            "select the number alone"
        )
        raise ConfigurationError(msg)
    return converted(found.scalar_subquery() if isinstance(found, sa.Select) else found, sa.Integer())


class FlowControl:
    """The limits, rates, order and turns of one queue."""

    def __init__(self, spec: QueueSpec) -> None:
        config = spec.config
        self.spec = spec
        self.limits = [KeyLimit(spec, one.per, one) for one in config.limits]
        self.rates = [KeyRate(spec, one.per, one) for one in config.rates]
        self.order = None if config.order is None else KeyOrder(spec, config.order.per, config.order)
        self.turn = None if config.fair is None else TurnKey(spec, config.fair.per, config.fair)

    @property
    def keys(self) -> list[JobKey]:
        """The keys that may hold a job back."""
        return [*self.limits, *self.rates, *([] if self.order is None else [self.order])]

    @property
    def most_at_once(self) -> list[int]:
        """The numbers that no claim exceeds: of limits of the whole queue, if constant, and of rates."""
        limits = [key.config.most for key in self.limits if not key.names and isinstance(key.config.most, int)]
        if self.spec.strategy.holds_transaction:
            # A slot is for any number of jobs of one transaction.
            limits = []
        return [max(number, 1) for number in (*limits, *(key.config.burst for key in self.rates if not key.names))]

    @property
    def part(self) -> JobKey | None:
        """The attributes by which these hold jobs back, without those that take turns; None where there are none.

        The attribute that is a limit is one of them: behind jobs of a key whose limit is reached may be one with a
        higher limit.
        """
        turns = () if self.turn is None else self.turn.names
        numbers = [limit.config.most for limit in self.limits if isinstance(limit.config.most, str)]
        each = (*(name for key in self.keys for name in key.names), *numbers)
        names = dict.fromkeys(name for name in each if name not in turns)
        return JobKey(self.spec, tuple(names)) if names else None


def flow_control(spec: QueueSpec) -> FlowControl | None:
    """Return the flow control of a queue; None for a queue without any."""
    return FlowControl(spec) if spec.flow_rules else None
